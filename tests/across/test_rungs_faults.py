"""Memory that runs out anywhere while save_memory="auto" tries what saves it: no update is other than without."""

import pytest
import torch

import autoaccum
from support.faults.modes import FailAt
from support.models.memory_heavy import Wide, seed
from support.ranks import savings
from support.training.savings import STEPS, assert_same, is_plain, replayed, trained

CAPACITY = "3MiB"
# Operators that make model and data.
_BEFORE = 600
SHARES = [0, *(pytest.param(share, marks=pytest.mark.sweep) for share in range(1, 6))]


@pytest.fixture(scope="module")
def operators():
    """How many operators a training takes; the clock makes it a few more or less."""
    with FailAt() as counting:
        trained(CAPACITY, progress=False)
    return counting.count


def points(operators, number):
    """Spread over the windows that try something, the first half or so, at ever other operators of a step."""
    return [_BEFORE + share * (operators // 2) // number + 7 * share for share in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_single_failures_change_nothing_but_cuts(operators, share):
    at = points(operators, 24)[share::6]

    with FailAt(*at) as faults:
        model, result = trained(CAPACITY, progress=False)

    assert faults.hits == len(at)
    assert result.steps == STEPS
    assert_same(model, replayed(result))
    assert is_plain(model)


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
def test_failures_that_last_take_the_next_rung_or_end_with_what_is_done(operators, share):
    first, model, damaged = points(operators, 6)[share], Wide(), False

    with FailAt(*range(first, first + 60)) as faults:
        try:
            _, result = trained(CAPACITY, model=model, progress=False)
        except (autoaccum.DoesNotFitError, autoaccum.StateDamagedError) as error:
            result, damaged = error.result, isinstance(error, autoaccum.StateDamagedError)

    assert faults.hits
    assert result.steps == len(result.history)
    assert is_plain(model)
    if not damaged:  # the clock decides which operator the failures begin with, and it may be one that writes
        assert_same(model, replayed(result))


def test_run_that_needed_offload_is_resumed_where_activations_are_on_the_host_anyway(tmp_path):
    def train(device, steps):
        seed()
        return autoaccum.fit(
            Wide().double(),
            savings.data(6),
            8,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
            device=device,
            micro_batch=1,
            save_memory="auto",
            checkpoint=tmp_path,
            max_steps=steps,
            progress=False,
        )

    first = train(autoaccum.Simulated("3MiB"), 2)
    second = train("cpu", 4)

    assert "offload" in first.savings
    assert (second.resumed_from, second.savings) == (2, ())
