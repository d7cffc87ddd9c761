"""`autoaccum verify` with torchrun, on two ranks."""

import sys

import pytest

from autoaccum._launch.run import Options  # an argument
from autoaccum._verify.api import verify_command
from support.processes.folders import SUPPORT, TESTS

pytestmark = pytest.mark.slow
KINDS = {
    "ddp": "",
    "ddp_not_divided": "every gradient is 4 times as large: the loss is not divided by the accumulation steps",
    "ddp_never_reduced": "ranks step with gradients of their own: the last backward pass is not reduced, as in no_sync",
    "by_hand": "",
    "by_hand_world_size": "every gradient is 2 times as large: as many as there are ranks (2)",
    "fsdp2": "",
    "fsdp2_not_divided": "every gradient is 4 times as large: the loss is not divided by the accumulation steps",
}


# Loops by hand and by fsdp2 that are right, and one more that does not divide, are of the same kinds.
SWEPT = ("ddp_not_divided", "by_hand", "fsdp2")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.sweep if kind in SWEPT else ()) for kind in KINDS]
)
def test_loop_on_two_ranks_is_right_or_told(kind, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(SUPPORT / "ranks" / "verify.py"),
        kind,
    ]
    target = 8 if KINDS[kind] else 4

    found = verify_command([*torchrun, "{micro_batch}", "{accum_steps}"], Options(target_batch=target))

    assert found.world_size == 2
    last = found.splits[-1]
    assert last.diagnosis == KINDS[kind], str(found)
    assert found.is_right == (not KINDS[kind])
