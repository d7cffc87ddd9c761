"""Whatever fails on one of several unlike ranks: none hangs, and all have the same parameters or say what failed."""

import pytest

import autoaccum
from support.ranks import attacks
from support.ranks.training import FAR, assert_alike, far


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("where", ["forward", "backward", "reserve", "reduce"])
def test_memory_that_runs_out_on_one_of_unlike_ranks_changes_no_update(rank_pool, where, size):
    expected = attacks.alone()

    found = rank_pool.run("attacks:lacking", where, size - 1, size=size)

    assert [one["has failed"] for one in found] == [False] * (size - 1) + [True]
    assert_alike(found)
    assert attacks.counted(found) == [40, 40, 40, 2]
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR


@pytest.mark.parametrize("what", ["loss", "callback"])
def test_error_on_one_of_four_ranks_is_told_to_all_others(rank_pool, what):
    answers = rank_pool.answers("training:failing", 2, what, size=4)

    assert isinstance(answers.pop(2), ZeroDivisionError)
    for answer in answers:
        assert isinstance(answer, autoaccum.RankFailedError)
        assert "rank 2: ZeroDivisionError: the user's own" in str(answer)
