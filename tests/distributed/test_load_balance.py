"""How a window is shared out: every sample to one rank, and by speed where ranks differ."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum import InvalidInputError
from autoaccum._distributed.load_balance import Shares, check_shares, cut, cut_by

SPEEDS = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12)


def lengths(samples, weights):
    return [end - begin for begin, end in itertools.pairwise(cut(samples, weights))]


@given(st.integers(0, 10_000), SPEEDS)
def test_every_sample_is_one_ranks_and_none_goes_without_where_there_are_enough(samples, weights):
    bounds = cut(samples, weights)

    assert (bounds[0], bounds[-1], len(bounds)) == (0, samples, len(weights) + 1)
    assert min(lengths(samples, weights)) >= (1 if samples >= len(weights) else 0)


@given(st.integers(0, 10_000), SPEEDS)
def test_share_is_off_its_proportion_by_less_than_a_sample_for_each_rank(samples, weights):
    for length, weight in zip(lengths(samples, weights), weights, strict=True):
        assert abs(length - samples * weight / sum(weights)) < len(weights) + 1e-6 * samples


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_equal_shares_differ_by_at_most_one(samples, ranks):
    assert max(lengths(samples, [1.0] * ranks)) - min(lengths(samples, [1.0] * ranks)) <= 1


@pytest.mark.parametrize("weights", [[0.1] * 10, [2.28, 1.71, 3.93], [1e-3, 1e6]])
def test_rounding_loses_no_sample(weights):
    assert all(cut(samples, weights)[-1] == samples for samples in range(2000))


def test_rank_that_is_ever_so_slow_gets_one_sample():
    assert cut(10, [1e-9, 1.0, 1.0]) == [0, 1, 5, 10]
    assert cut(10, [1.0, 1.0, 1e-9]) == [0, 4, 9, 10]


def test_of_fewer_samples_than_ranks_the_first_get_one_each():
    assert lengths(2, [1.0, 5.0, 1.0, 1.0]) == [1, 1, 0, 0]


def run(shares, seconds_per_sample, *, windows, target=100, fixed_s=0.0):
    """Let ranks of these speeds work, and return the seconds that each window takes."""
    took = []
    for _ in range(windows):
        samples = lengths(target, shares.weights)
        seconds = [fixed_s + count * each for count, each in zip(samples, seconds_per_sample, strict=True)]
        shares.note(samples, seconds)
        took.append(max(seconds))
    return took


def test_shares_become_proportional_to_speed():
    shares = Shares(3, by_speed=True)

    run(shares, [0.01, 0.01, 0.03], windows=5)

    assert lengths(70, shares.weights) == [30, 30, 10]


@given(st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=8))
def test_windows_never_take_much_longer_than_with_equal_shares(seconds_per_sample):
    took = run(Shares(len(seconds_per_sample), by_speed=True), seconds_per_sample, windows=40)

    slack = len(seconds_per_sample) * max(seconds_per_sample)  # a sample for each rank, by rounding
    assert max(took) <= took[0] + slack


def test_what_a_window_costs_however_small_is_found_out_in_turns():
    shares = Shares(2, by_speed=True)

    took = run(shares, [0.01, 0.04], windows=60, target=1000, fixed_s=1.0)

    best = (1000 + 1.0 / 0.01 + 1.0 / 0.04) / (1 / 0.01 + 1 / 0.04)  # both end at once
    assert took[-1] < 1.06 * best < took[0]


def test_equal_shares_stay_whatever_the_speed():
    shares = Shares(2, by_speed=False)

    assert run(shares, [0.01, 0.1], windows=20) == [5.0] * 20


def test_small_differences_change_nothing():
    shares = Shares(2, by_speed=True)

    run(shares, [0.0100, 0.0104], windows=20)

    assert shares.weights == (1.0, 1.0)


def test_first_window_and_parts_without_a_sample_are_not_counted():
    shares = Shares(2, by_speed=True)

    shares.note([50, 50], [60.0, 0.5])  # the start of a process
    for _ in range(3):
        shares.note([50, 0], [0.5, 0.0])
    run(shares, [0.01, 0.01], windows=10)

    assert shares.weights == (1.0, 1.0)


def test_what_a_single_slow_window_has_changed_wears_off():
    shares = Shares(2, by_speed=True)

    run(shares, [0.01, 0.01], windows=8)
    shares.note([50, 50], [5.0, 0.5])
    run(shares, [0.01, 0.01], windows=21)

    assert lengths(100, shares.weights)[0] in range(48, 53)  # what is left is within what is taken for noise


@pytest.mark.parametrize(
    ("shares", "shard", "said"),
    [
        ("fast", True, "choose 'equal' or 'speed'"),
        ("speed", False, "shares='speed' needs shard=True"),
        ("equal", 1, "shard=1 is unknown; choose True or False"),
    ],
)
def test_unknown_or_contradicting_arguments_are_refused(shares, shard, said):
    with pytest.raises(InvalidInputError, match=said):
        check_shares(shares, shard=shard)


@given(st.lists(st.integers(0, 1000), max_size=60), SPEEDS)
def test_every_sample_is_one_ranks_whatever_samples_cost(costs, weights):
    bounds = cut_by(costs, weights)

    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), len(weights) + 1)
    each = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert min(each) >= (1 if len(costs) >= len(weights) else 0)


def test_ranks_get_as_much_as_whole_samples_allow():
    assert cut_by([9, 1, 1, 1, 3, 3], [1.0, 1.0]) == [0, 1, 6]
    assert cut_by([1, 1, 1, 1, 2, 6], [1.0, 1.0]) == [0, 5, 6]
    assert cut_by([2] * 8, [3.0, 1.0]) == [0, 6, 8]


@given(st.lists(st.integers(1, 50), min_size=100, max_size=100), st.integers(2, 5))
def test_equal_shares_of_cost_differ_by_no_more_than_a_sample(costs, ranks):
    bounds = cut_by(costs, [1.0] * ranks)

    shares = [sum(costs[begin:end]) for begin, end in itertools.pairwise(bounds)]
    assert max(shares) - min(shares) <= 2 * max(costs)
