"""The samples of a window are shared out so that the busiest rank has as little to do as can be."""

import io
import math
import pickle
import random
from operator import ne

import numpy as np
import pytest
import torch

from autoaccum._distributed.dealing import _Pickler, busiest, least, shares


def lengths_drawn(spread, number, chance):
    """Log-normal lengths of mean 200 with this coefficient of variation."""
    deviation = math.sqrt(math.log(1 + spread**2))
    return [max(8, int(chance.lognormvariate(math.log(200) - deviation**2 / 2, deviation))) for _ in range(number)]


@pytest.mark.parametrize("quadratic", [0.0, 1 / 200])
@pytest.mark.parametrize("spread", [0.29, 0.6, 1.0])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_busiest_rank_is_within_3_percent_of_the_least_it_can_have(spread, ranks, quadratic):
    chance = random.Random(0)  # noqa: S311 - a test
    for each in (8, 16, 32):
        for _ in range(5):
            costs = [one + quadratic * one**2 for one in lengths_drawn(spread, ranks * each, chance)]

            loaded = [at // each for at in range(ranks * each)]

            owners = shares(costs, loaded, ranks)

            assert busiest(costs, owners, ranks) <= 1.03 * least(costs, ranks)
            assert len(owners) == len(costs)
            assert set(owners) == set(range(ranks))
            assert sum(map(ne, owners, loaded)) <= 0.5 * len(costs)


@pytest.mark.parametrize("costs", [[101.0, 1.0, 1.0], [1.0, 101.0, 1.0, 1.0], [5.0, 1.0, 1.0, 1.0, 1.0]])
def test_no_rank_that_has_a_sample_ends_without(costs):
    loaded = [at % 4 for at in range(len(costs))]

    assert set(shares(costs, loaded, 4)) >= set(loaded)


def test_equal_costs_are_equal_numbers():
    owners = shares([3.0] * 24, [0] * 20 + [1] * 4, 4)

    assert [owners.count(rank) for rank in range(4)] == [6] * 4


def test_what_is_even_as_loaded_stays():
    loaded = [0, 0, 1, 1, 2, 2]

    assert shares([9.0, 1.0, 5.0, 5.0, 4.0, 6.0], loaded, 3) == loaded


SHARED = torch.arange(4)


@pytest.mark.parametrize(
    "sample",
    [
        torch.randn(3, 4),
        torch.randn(100, 4)[7].t(),
        torch.randn(3, 4).t(),
        torch.tensor(5),
        torch.empty(0, 3, dtype=torch.bool),
        torch.randn(5).bfloat16(),
        torch.randn(5, dtype=torch.complex64),
        torch.tensor([True, False]),
        {"a": SHARED, "b": [SHARED, (SHARED[1:], [1, 2, 3], np.arange(3))]},
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_samples_are_sent_as_they_are_and_of_a_view_only_its_own_part(sample):
    stream = io.BytesIO()

    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(sample)

    assert stream.tell() < 1500
    found = pickle.loads(stream.getvalue())  # noqa: S301 - its own
    torch.testing.assert_close(found, sample, rtol=0, atol=0)
