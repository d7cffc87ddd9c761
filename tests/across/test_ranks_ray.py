"""Ray Train's workers train together, one is killed and started again, another lacks memory as `ray_job` says."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch

from support.models.small import assert_bitwise
from support.processes.folders import SUPPORT, TESTS
from support.ranks import ray_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed; scripts/test_with.sh ray has it"
    ),
]
RANKS = range(ray_job.WORKERS)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    ray_folder = tempfile.mkdtemp(prefix="ray-")  # whose sockets' paths must be short
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "ranks" / "ray_job.py"), str(folder), ray_folder],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1400,
        check=False,
    )
    shutil.rmtree(ray_folder, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-8000:]
    return folder


def ends(home, name):
    return [torch.load(home / name / f"end-{rank}.pt") for rank in RANKS]


def entries(home, name, rank, kind):
    lines = (home / name / f"steps-{rank}.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if kind in entry]


def test_worker_that_is_killed_is_started_again_and_the_training_ends_where_the_undisturbed_one_ends(home):
    whole, killed = ends(home, "undisturbed"), ends(home, "killed")

    assert [one.pop("resumed_from") for one in whole + killed] == [None, None, 12, 12]
    assert_bitwise(killed, whole)
    for rank in RANKS:
        assert entries(home, "killed", rank, "step") == entries(home, "undisturbed", rank, "step")


def test_each_restart_goes_on_from_the_last_checkpoint(home):
    assert all((home / "killed" / f"killed-{rank}-{step}").exists() for rank, step in ray_job.KILLS)
    assert entries(home, "killed", 0, "resumed_from") == [{"resumed_from": 6}, {"resumed_from": 12}]


def test_worker_that_lacks_memory_cuts_smaller_and_all_end_alike(home):
    first, second = ends(home, "short")

    assert_bitwise(second["parameters"], first["parameters"])
    assert_bitwise(second["optimizer"], first["optimizer"])
    assert first["steps"] == second["steps"] == 20
    assert not entries(home, "short", 0, "oom_at")
    assert entries(home, "short", 1, "oom_at")
    largest = [max(entries(home, "short", rank, "step")[-1]["micro_batches"]) for rank in RANKS]
    assert largest[0] == 100 > largest[1]
