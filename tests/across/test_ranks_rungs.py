"""save_memory="auto" on several ranks: the one that lacks memory saves it, and the training is that of one process."""

import pytest
import torch

from support.ranks.training import FAR, far


@pytest.fixture(scope="module")
def found(rank_pool):
    """Rank 1 is too small for one sample with nothing saved, and rank 0 is not."""
    return rank_pool.run("savings:train", size=2, capacities=["16MiB", "4MiB"], shard_data=True)


def test_rank_that_lacks_memory_saves_it_by_itself(found):
    large, small = found

    assert large["memory"] == ()
    assert small["memory"] != ()
    assert large["is plain"]
    assert small["is plain"]


def test_ranks_have_the_parameters_of_one_process_where_memory_is_plenty(rank_pool, found):
    (alone,) = rank_pool.run("savings:train", size=1, capacities=["1GiB"], save_memory=None)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*(one["parameters"] for one in found), strict=True))
    assert far(found[0]["parameters"], alone["parameters"]) <= FAR
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-9)


@pytest.mark.parametrize(
    "lists",
    [pytest.param(False, id="tensors"), pytest.param(True, id="lists of samples", marks=pytest.mark.slow)],
)
def test_rank_that_lacks_memory_later_saves_it_while_the_other_waits(rank_pool, lists):
    one, other = rank_pool.run("savings:lacking_late", size=2, lists=lists)

    assert one["steps"] == other["steps"] == 12
    assert one["memory"] == () != other["memory"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one["parameters"], other["parameters"], strict=True))


@pytest.mark.slow
def test_resumed_ranks_keep_what_was_chosen(rank_pool, tmp_path):
    arguments = {"size": 2, "capacities": ["16MiB", "4MiB"], "shard_data": True, "checkpoint": tmp_path}
    first = rank_pool.run("savings:train", max_steps=5, **arguments)

    second = rank_pool.run("savings:train", max_steps=8, **arguments)

    assert [one["memory"] for one in second] == [one["memory"] for one in first]
    assert len(second[0]["losses"]) == 3


@pytest.mark.slow
def test_accumulators_agree_and_have_the_gradients_of_one_process(rank_pool):
    (expected,) = rank_pool.run("savings:accumulate", size=1, capacities=["1GiB"])

    one, other = rank_pool.run("savings:accumulate", size=2, capacities=["16MiB", "4MiB"], save_memory="auto")

    assert one["memory"] == () != other["memory"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one["parameters"], other["parameters"], strict=True))
    assert far(one["parameters"], expected["parameters"]) <= FAR
    assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9)
