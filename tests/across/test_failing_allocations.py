"""Memory that really runs out, simulated and on the host, changes nothing but the cut and damages nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

import _failing_host
from fault_cases import WIDE, allocating
from fault_sweep import Sweep, Tally
from fault_training import warm_up

SWEEP = Path(__file__).parents[2] / "scripts" / "faults.py"


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


@pytest.mark.parametrize(("every", "capacities"), [(3, 2), pytest.param(1, 10, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("model", WIDE)
def test_simulated_device_that_gets_smaller_and_smaller_changes_nothing_but_the_cut(model, every, capacities):
    tally = Tally()

    for case in allocating([model])[::every]:
        sweep = Sweep(case)
        sweep.capacities(capacities)
        tally.add(sweep.tally)

    assert tally.mismatches == []
    assert not tally.damaged
    assert tally.injected > 10 // every
    assert tally.survived + tally.refused > 5 // every


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the host takes Linux")
@pytest.mark.parametrize(
    ("case", "every"),
    [
        pytest.param(_failing_host.CASES[1], 4, id="a few limits"),
        *(pytest.param(case, 1, id=f"{case}-all", marks=pytest.mark.sweep) for case in _failing_host.CASES),
    ],
)
def test_real_limit_that_gets_lower_and_lower_changes_nothing_but_the_cut(case, every):
    tally = _failing_host.tally_of(case, every)

    assert tally.mismatches == []
    assert not tally.damaged
    assert tally.survived + tally.refused > 1


@pytest.mark.sweep
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the host takes Linux")
def test_the_whole_sweep_ends_with_limits_on_this_host():
    done = subprocess.run(
        [sys.executable, SWEEP, "--workers", "1", "--sample", "1", "--case", "huge mlp"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert "this host" in done.stdout
    assert " 0 mismatches" in done.stdout.splitlines()[-1]
