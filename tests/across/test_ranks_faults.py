"""Whatever rank runs out of memory, and wherever: nobody is left waiting, nobody diverges, every sample counts once."""

import itertools

import pytest
import torch

from autoaccum import DoesNotFitError, RankFailedError, StateDamagedError
from support.models.small import a_few_of
from support.ranks import faults
from support.ranks.training import FAR, assert_alike, far


@pytest.mark.parametrize("most", [2, pytest.param(10, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("size", "loss", "optimizer", "clip"),
    [
        pytest.param(2, "mean", "sgd", None, marks=pytest.mark.sweep),
        (4, "mean", "adam", 1.0),
        (2, "pair", "adam", None),
        (2, "several", "sgd", 0.5),
    ],
)
def test_memory_that_runs_out_anywhere_changes_nothing_but_cuts(rank_pool, size, loss, optimizer, clip, most):
    arguments = {"size": size, "loss": loss, "optimizer": optimizer, "clip": clip}
    expected = rank_pool.run("faults:faulted", **arguments)
    seeds = list(
        range(min(most, 4) if loss == "several" else most)
    )  # which takes many operators to find out what it runs over

    found = rank_pool.run("faults:many", seeds, expected[0]["operators"], **arguments)

    hits = 0
    for seed, outcomes in zip(seeds, zip(*found, strict=True), strict=True):
        if faults.is_damage(outcomes) or faults.is_given_up(outcomes):
            continue
        assert not any(isinstance(one, str) for one in outcomes), (seed, outcomes)
        hits += sum(one["hits"] for one in outcomes)
        assert_alike(outcomes)
        assert far(outcomes[0]["parameters"], expected[0]["parameters"]) <= FAR, seed
        assert outcomes[0]["samples"] == expected[0]["samples"]
        loaded = sorted(itertools.chain.from_iterable(one["loaded"] for one in outcomes))
        assert loaded == list(range(faults.SAMPLES))
    assert hits  # else this test shows little


@pytest.mark.parametrize(("size", "at"), a_few_of([2, 4], [100, 150, 200]))
def test_rank_on_which_nothing_fits_any_more_ends_all_of_them(rank_pool, size, at):
    answers = rank_pool.answers("faults:faulted", size=size, points={1: [at]}, lasts=True)

    # The optimizer may have begun to write.
    assert isinstance(answers[1], DoesNotFitError | torch.OutOfMemoryError | StateDamagedError), answers[1]
    for rank in set(range(size)) - {1}:
        assert isinstance(answers[rank], RankFailedError)
        assert "rank 1: " in str(answers[rank])


@pytest.mark.parametrize("who", [0, 1])
def test_error_in_on_fit_end_of_one_rank_ends_the_others(rank_pool, who):
    answers = rank_pool.answers("differences:failing_at_end", who, size=2)

    assert isinstance(answers[who], ZeroDivisionError)
    assert isinstance(answers[1 - who], RankFailedError)
    assert f"rank {who}: ZeroDivisionError: the user's own" in str(answers[1 - who])
