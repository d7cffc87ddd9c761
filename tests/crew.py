"""Processes that wait for work: what tests of several ranks run in, since each takes seconds to import torch.

The functions that they run are named as "module:function" and called with `rank` and `size` first. Every job has a
process group of its own, by gloo over a file.
"""

import importlib
import os
import pickle
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
        self._members = [self._member() for _ in range(size)]

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
                pickle.dump(job, member.stdin)
                member.stdin.flush()
            return [self._answer(rank) for rank in range(size)]

    def close(self):
        for member in self._members:
            member.kill()
            member.wait()
            member.stdin.close()
            member.stdout.close()

    def _member(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "AUTOACCUM_RANK_TIMEOUT_S": "20"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
        return subprocess.Popen(
            [sys.executable, str(HERE / "crew.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def _answer(self, rank):
        member = self._members[rank]
        try:
            kind, value = pickle.load(member.stdout)  # noqa: S301
        except EOFError:
            member.stdin.close()
            member.stdout.close()
            self._members[rank] = self._member()
            return RuntimeError(f"rank {rank} is gone with exit code {member.wait()}")
        if kind == "raised":
            value.add_note(f"on rank {rank}")
        return value


def _work():
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
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
    _work()
