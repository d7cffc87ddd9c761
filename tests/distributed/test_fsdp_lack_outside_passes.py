"""Memory that runs out between the passes of a model spread over ranks: the window begins anew on all of them."""

import pytest

from support.ranks import training
from support.ranks.training import assert_trained_as


def alone(**arguments):
    return training.train(0, 1, model=training.net(), **arguments)


@pytest.mark.parametrize(
    ("where", "fails_at", "cut"), [("enter", 2, 2), ("transfer", 2, 2), ("reserve", 2, 1), ("after the passes", 2, 1)]
)
def test_lack_of_memory_outside_of_a_pass_begins_the_window_anew_on_all_ranks(rank_pool, where, fails_at, cut):
    asked = {"target_batch": 16, "micro_batch": 8, "shard_data": True, "epochs": 2}
    expected = alone(target_batch=16, micro_batch=16, epochs=2)

    found = rank_pool.run("sharded_lacking:lacking", where, fails_at=fails_at, size=2, **asked)

    assert_trained_as(found, expected)
    assert found[0]["oom"] == 1
    assert {len(one["cuts"][1]) for one in found} == {cut}
    assert max(max(one["recomputed"]) for one in found) == 8  # the samples of a rank


@pytest.mark.parametrize(
    "points",
    [[("after the passes", 2), ("transfer", 3)], [("reserve", 2), ("reserve", 3)], [("enter", 2), ("reserve", 3)]],
)
def test_ranks_may_lack_memory_one_after_the_other_each_somewhere_else(rank_pool, points):
    asked = {"target_batch": 16, "micro_batch": 8, "shard_data": True, "epochs": 2}
    expected = alone(target_batch=16, micro_batch=16, epochs=2)

    found = rank_pool.run("sharded_lacking:lacking_each", points, size=2, **asked)

    assert_trained_as(found, expected)
