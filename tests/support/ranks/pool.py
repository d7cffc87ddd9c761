"""Processes that wait for work: what tests of several ranks run in, since each takes seconds to import torch.

They are forked from one that has imported it (`fork_server.py`), and one that is killed is there again at once. The
functions that they run are called with `rank` and `size` first, and named as "module:function", with a module of
this folder or the whole path of another one. Every job has a process group of its own, by gloo over a file.
"""

import contextlib
import importlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta

from support.processes import fork_server
from support.processes.folders import TESTS


class RankPool:
    """`size` processes that do one job after the other together."""

    def __init__(self, size):
        self._members = [_Member() for _ in range(size)]

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
                member.give((name, (rank, size, *args), kwargs, f"file://{folder}/meet", wait_s))
            return [self._answer(rank) for rank in range(size)]

    def close(self):
        for member in self._members:
            member.end()

    def _answer(self, rank):
        try:
            has_raised, value = self._members[rank].answer()
        except (EOFError, ConnectionError):
            code = self._members[rank].end()
            self._members[rank] = _Member()
            return RuntimeError(f"rank {rank} is gone with exit code {code}")
        if has_raised:
            value.add_note(f"on rank {rank}")
        return value


class _Member:
    """One process of a pool, as seen from outside."""

    def __init__(self):
        # Brings SciPy and Transformers, which each rank would take seconds to import.
        own = {
            "AUTOACCUM_RANK_TIMEOUT_S": "20",
            "AUTOACCUM_CACHE_DIR": "",
            "HF_HUB_OFFLINE": "1",
            "WARM_IMPORTS": "torchmetrics.classification",
        }
        own["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
        self._process = subprocess.Popen(
            [*fork_server.python(), "-m", "support.ranks.pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **own},
        )

    def give(self, job):
        pickle.dump(job, self._process.stdin)
        self._process.stdin.flush()

    def answer(self):
        return pickle.load(self._process.stdout)  # noqa: S301

    def end(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            return self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it hangs
            self._process.kill()
            return self._process.wait()
        finally:
            self._process.stdout.close()


def _work(jobs, answers):
    import torch  # noqa: PLC0415 - only where it is there already
    from torch import distributed  # noqa: PLC0415

    torch.set_num_threads(1)
    while True:
        try:
            name, args, kwargs, meet, wait_s = pickle.load(jobs)  # noqa: S301
        except (EOFError, ConnectionError):
            return
        rank, size, *_ = args
        limit = timedelta(seconds=wait_s)
        distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=size, timeout=limit)
        try:
            distributed.barrier()  # one that is done at once would end the group while another still connects to it
            module, function = name.split(":")
            found = importlib.import_module(module if "." in module else f"support.ranks.{module}")
            answer = False, getattr(found, function)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - it is the answer
            if os.environ.get("RANK_TRACEBACKS"):
                traceback.print_exc()
            error.__traceback__, error.__context__, error.__cause__ = None, None, None
            answer = True, error
        finally:
            logging.disable(logging.NOTSET)  # trainings by frameworks disable it
            if distributed.is_initialized():  # a function that makes groups of its own may fail between two
                distributed.destroy_process_group()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    sent = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a rank prints goes where its errors go
    _work(sys.stdin.buffer, sent)
    os._exit(0)
