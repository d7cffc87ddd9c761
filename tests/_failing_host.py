"""Trains under lower and lower limits on the host, for real; `tally_of` starts this file as a process of its own.

Each training gets a process with a heap of its own, since what one leaves behind there comes for free for the next, and
since native code can die where it runs out of memory.
"""

# ruff: noqa: T201 - the process answers on stdout

import ctypes
import json
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import warm
from fault_cases import SAMPLES, Case
from fault_sweep import Sweep, Tally
from fault_training import play, warm_up

# In float32, where oneDNN, which can break for good where it runs out of memory, computes convolutions only.
CASES = (
    Case("huge mlp", "fp32", "AdamW, foreach", sizes=(SAMPLES,)),
    Case("huge layers", "fp32", "Adam, foreach", sizes=(SAMPLES,)),
    Case("huge transformer", "fp32", "Adam, loop", sizes=(SAMPLES,), clip=0.5),
    Case("huge convolutional", "fp32", "SGD, foreach", sizes=(SAMPLES,)),
)
# Of what the tensors take.
_LIMITS = [1.2 * 0.85**step for step in range(10)]
# That of the host backend.
_LEAST_LIMIT_BYTES = 4 * 2**20
# Autograd's threads for a card would not survive the fork.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}
_M_MMAP_THRESHOLD = -3


def tally_of(case, every=1):
    """Run this file for a case, under every so manyeth limit; return what it found."""
    done = subprocess.run(
        [*warm.python(), __file__, str(CASES.index(case)), str(every)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | _ENVIRONMENT,
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
    told = json.loads(done.stdout.splitlines()[-1])
    return Tally(**told | {"damaged": Counter(told["damaged"])})


def under_limit(case, limit_bytes):
    """Train a case under a limit on this process, at which allocations fail; return what it left behind, pickled."""
    data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    bound = int(data.split()[1]) * 1024 + limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (bound, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return pickle.dumps(play(case))


def judged(case, limit_bytes, played):
    """Compare what a training under a limit left behind with one without; return the tally.

    In another process than the one that was limited: memory that ran out inside oneDNN ends its convolutions there.
    """
    sweep = Sweep(case)
    sweep.judge_failing(pickle.loads(played), f"under a limit of {limit_bytes} bytes")  # noqa: S301 - our own
    return sweep.tally


def in_a_process_of_its_own(function, *arguments):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as process:
        return process.submit(function, *arguments).result()


def main():
    # glibc would keep what the trainings before have freed, and no limit would count it.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024) == 1
    torch.set_num_threads(1)  # with more, a fork hangs
    warm_up()
    case, every = CASES[int(sys.argv[1])], int(sys.argv[2])
    peak, tally = in_a_process_of_its_own(Sweep(case).peak_bytes), Tally()
    for limit_bytes in (int(part * peak) for part in _LIMITS[::every] if part * peak > _LEAST_LIMIT_BYTES):
        played = in_a_process_of_its_own(under_limit, case, limit_bytes)
        tally.add(in_a_process_of_its_own(judged, case, limit_bytes, played))
    print(json.dumps(asdict(tally)))


if __name__ == "__main__":
    main()
