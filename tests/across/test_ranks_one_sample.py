"""Ranks with a single sample each infer what a loss runs over from each other's samples."""

import pytest

import rank_training
from helpers import a_few_of
from rank_training import FAR, assert_alike, far

# Of unlike numbers of tokens, which go by turns to ranks; alike on a rank, and late.
ALIKE = [text for text in rank_training.texts(30) for _ in range(2)]
LATE = rank_training.texts(1) * 8 + rank_training.texts(10)


@pytest.mark.parametrize(
    ("loss", "size"), a_few_of(["tokens, found out", "pair", "sum", "vector", "several", "list"], [2, 3])
)
def test_gradient_is_that_of_the_window_from_the_first_on(crew, loss, size):
    asked = {"loss": loss, "target_batch": size, "max_steps": 6}
    expected = rank_training.train(0, 1, micro_batch=size, **asked)

    found = crew.run("rank_training:train", size=size, micro_batch=1, shard=True, **asked)

    assert_alike(found)
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR


@pytest.mark.parametrize(("data", "each"), [(ALIKE, 2), (LATE, 1)], ids=["alike", "late"])
@pytest.mark.parametrize("train", ["rank_training:train", "sharded_training:train"])
def test_samples_that_are_alike_on_each_rank_are_compared_with_those_of_others(crew, train, data, each):
    asked = {"loss": "tokens, found out", "data": data, "target_batch": 2 * each, "max_steps": 6}
    expected = rank_training.train(0, 1, micro_batch=2 * each, **asked)

    found = crew.run(train, size=2, micro_batch=each, shard=True, **asked)

    assert_alike(found)
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR
