"""Runs a script by torchrun on two ranks, each of which writes what it found."""

import os
import subprocess
import sys

import torch

from support.processes.folders import SUPPORT, TESTS


def found_by_ranks(script, folder):
    """What each of two ranks has written to `rank-N.pt` in a folder."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(SUPPORT / "ranks" / script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
