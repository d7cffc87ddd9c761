"""Ranks with a single sample each infer what a loss runs over from each other's samples."""

import pytest

from support.models.small import a_few_of
from support.ranks import training
from support.ranks.training import assert_trained_as

# Of unlike numbers of tokens, which go by turns to ranks; alike on a rank, and late.
ALIKE = [text for text in training.texts(30) for _ in range(2)]
LATE = training.texts(1) * 8 + training.texts(10)


def check(rank_pool, train, size, micro_batch, **asked):
    asked |= {"target_batch": size * micro_batch, "max_steps": 6}
    expected = training.train(0, 1, micro_batch=size * micro_batch, **asked)

    found = rank_pool.run(train, size=size, micro_batch=micro_batch, shard_data=True, **asked)

    assert_trained_as(found, expected)


@pytest.mark.parametrize(
    ("loss", "size"), a_few_of(["tokens, found out", "pair", "sum", "vector", "several", "list"], [2, 3])
)
def test_gradient_is_that_of_the_window_from_the_first_on(rank_pool, loss, size):
    check(rank_pool, "training:train", size, 1, loss=loss)


@pytest.mark.parametrize(("data", "each"), [(ALIKE, 2), (LATE, 1)], ids=["alike", "late"])
@pytest.mark.parametrize("train", ["training:train", "sharded:train"])
def test_samples_that_are_alike_on_each_rank_are_compared_with_those_of_others(rank_pool, train, data, each):
    check(rank_pool, train, 2, each, loss="tokens, found out", data=data)
