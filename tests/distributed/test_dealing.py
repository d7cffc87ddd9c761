"""The samples of a window are shared out so that the busiest rank has as little to do as can be."""

import math
import random

import pytest

from autoaccum._distributed.dealing import busiest, least, shares


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

            owners = shares(costs, ranks)

            assert busiest(costs, owners, ranks) <= 1.03 * least(costs, ranks)
            assert len(owners) == len(costs)
            assert set(owners) == set(range(ranks))


@pytest.mark.parametrize("samples", [1, 3, 4, 5])
def test_no_rank_is_idle_unless_there_are_fewer_samples_than_ranks(samples):
    owners = shares([float(1 + 100 * (one == 0)) for one in range(samples)], 4)

    assert len(set(owners)) == min(samples, 4)


def test_equal_costs_are_equal_numbers():
    owners = shares([3.0] * 24, 4)

    assert [owners.count(rank) for rank in range(4)] == [6] * 4
