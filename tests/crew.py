"""Processes that wait for work: what tests of several ranks run in, since each takes seconds to import torch.

They are forked from one process that has imported it, so all of them together take no longer than one, and one that is
killed is there again at once. The functions that they run are named as "module:function" and called with `rank` and
`size` first. Every job has a process group of its own, by gloo over a file.
"""

import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

HERE = Path(__file__).parent
# Long enough for a machine that others use too; a rank that hangs is ended by it.
LIMIT_S = 120


class Crew:
    """`size` processes that do one job after the other together."""

    def __init__(self, size):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "AUTOACCUM_RANK_TIMEOUT_S": "20",
            "AUTOACCUM_CACHE_DIR": "",
        }
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
        self._origin_socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, str(HERE / "crew.py"), str(theirs.fileno())]
            self._origin = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()]
            )
        self._origin_answers = self._origin_socket.makefile("rb")
        self._members = [_Member(self) for _ in range(size)]

    def run(self, name, *args, size, **kwargs):
        """Run a function on `size` ranks and return what each has returned, by rank; raise what the first raised."""
        answers = self.answers(name, *args, size=size, **kwargs)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def answers(self, name, *args, size, wait_s=30, **kwargs):
        """Like `run`, but return exceptions instead of raising them; ranks wait so long for each other."""
        with tempfile.TemporaryDirectory() as folder:
            for rank, member in enumerate(self._members[:size]):
                job = {
                    "name": name,
                    "args": args,
                    "kwargs": kwargs,
                    "rank": rank,
                    "size": size,
                    "meet": f"{folder}/meet",
                    "wait_s": wait_s,
                }
                member.give(job)
            return [self._answer(rank) for rank in range(size)]

    def close(self):
        for member in self._members:
            member.end()
        self._origin_socket.close()  # by which the process that they were forked from ends
        self._origin_answers.close()
        self._origin.wait()

    def ask(self, question, *sockets):
        """Ask the process that all members are forked from."""
        socket.send_fds(self._origin_socket, [pickle.dumps(question)], [one.fileno() for one in sockets])
        return pickle.load(self._origin_answers)  # noqa: S301

    def _answer(self, rank):
        try:
            kind, value = self._members[rank].answer()
        except (EOFError, ConnectionError):
            code = self._members[rank].end()
            self._members[rank] = _Member(self)
            return RuntimeError(f"rank {rank} is gone with exit code {code}")
        if kind == "raised":
            value.add_note(f"on rank {rank}")
        return value


class _Member:
    """One process of a crew, as seen from outside."""

    def __init__(self, crew):
        self._crew = crew
        mine, theirs = socket.socketpair()
        with mine, theirs:
            self._pid = crew.ask("a member", theirs)
            self._jobs, self._answers = mine.makefile("wb"), mine.makefile("rb")

    def give(self, job):
        pickle.dump(job, self._jobs)
        self._jobs.flush()

    def answer(self):
        return pickle.load(self._answers)  # noqa: S301

    def end(self):
        """Kill it if it lives; return its exit code."""
        self._answers.close()
        self._jobs.close()
        return self._crew.ask(self._pid)


def _keep_out():
    """Keep what is imported out of garbage collections: every member for itself collects whenever it frees memory."""
    gc.collect()
    gc.freeze()


def _fork_members(origin):
    """Fork a member whenever asked for one, and tell how one ended, until nobody can ask any more."""
    importlib.import_module("torch._dynamo")  # which the first optimizer does, in seconds
    importlib.import_module("autoaccum")
    importlib.import_module("torchmetrics")  # as some members would, each for itself
    _keep_out()
    while True:
        question, sockets, *_ = socket.recv_fds(origin, 1024, 1)
        if not question:
            return
        asked = pickle.loads(question)  # noqa: S301
        if sockets:
            answer = os.fork()
            if answer == 0:
                origin.close()
                _work(socket.socket(fileno=sockets[0]))
                os._exit(0)
            os.close(sockets[0])
        else:
            os.kill(asked, signal.SIGKILL)  # nothing to one that has ended and was not waited for
            answer = os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
        origin.sendall(pickle.dumps(answer))


def _work(connection):
    jobs, answers = connection.makefile("rb"), connection.makefile("wb")
    modules = len(sys.modules)
    while True:
        if len(sys.modules) > modules + 20:
            _keep_out()
            modules = len(sys.modules)
        try:
            job = pickle.load(jobs)  # noqa: S301
        except (EOFError, ConnectionError):
            return
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{job['meet']}",
            rank=job["rank"],
            world_size=job["size"],
            timeout=timedelta(seconds=job["wait_s"]),
        )
        try:
            distributed.barrier()  # one that is done at once would end the group while another still connects to it
            module, function = job["name"].split(":")
            value = getattr(importlib.import_module(module), function)(
                job["rank"], job["size"], *job["args"], **job["kwargs"]
            )
            answer = ("returned", value)
        except Exception as error:  # noqa: BLE001 - it is the answer
            if os.environ.get("CREW_TRACEBACKS"):
                traceback.print_exc()
            error.__traceback__, error.__context__, error.__cause__ = None, None, None
            answer = ("raised", error)
        finally:
            if distributed.is_initialized():  # a function that makes groups of its own may fail between two
                distributed.destroy_process_group()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    os.dup2(2, 1)  # what a rank prints goes where its errors go
    torch.set_num_threads(1)
    _fork_members(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # libraries that are taken down have much to say, and take their time
