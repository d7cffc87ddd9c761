"""The planner: plain numbers in, plain numbers out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum import Plan
from autoaccum._sizing.planner import cut, format_cut, plan, shrink
from autoaccum.records import Trial

SIZES = st.integers(min_value=1, max_value=5000)
SMALL = st.integers(min_value=1, max_value=18)  # for brute force


@given(SIZES, SIZES)
def test_shrinking_ends_at_one_sample_in_few_steps(samples, size):
    tried = 0
    while size is not None:
        smaller = shrink(samples, size)
        assert smaller is None or 1 <= smaller < size
        size, tried = smaller, tried + 1

    assert tried < 60


def test_first_failure_of_a_full_window_halves_it_and_the_next_takes_a_third():
    assert shrink(100, 100) == 50
    assert shrink(100, 50) == 34
    assert shrink(100, 34) == 25


def test_sizes_that_fail_again_may_halve():
    assert [shrink(3000, size, 2) for size in (3000, 1500, 750, 375, 188, 1)] == [1500, 750, 375, 188, 94, None]


def test_plan_avoids_sizes_that_a_trial_showed_to_fail():
    trials = (Trial(8, True, None, 0.1), Trial(30, False, None, 0.1))

    assert plan(100, 40, trials=trials).micro_batch == 25


def test_hand_made_plan_may_be_uneven():
    assert Plan(target_batch=10, micro_batches=[7, 3]).micro_batch == 7


def cuts_of(samples, most, steps):
    """Return every cut into `steps` sizes of at most `most`, the larger first."""
    sizes = itertools.combinations_with_replacement(range(most, 0, -1), steps)
    return [found for found in sizes if sum(found) == samples]


@given(SIZES, SIZES, st.booleans())
def test_every_cut_sums_up_stays_within_the_limit_and_puts_the_largest_first(samples, most, is_uniform):
    found = cut(samples, most, is_uniform=is_uniform)

    assert sum(found) == samples
    assert max(found) <= most
    assert list(found) == sorted(found, reverse=True)
    assert min(found) >= 1
    if not is_uniform:
        assert max(found) - min(found) <= 1
        assert len(found) == -(-samples // most)


@given(SIZES, SIZES)
def test_uniform_cut_has_one_size_where_that_takes_at_most_twice_the_fewest_steps(samples, most):
    fewest = -(-samples // most)
    equal = [steps for steps in range(fewest, 2 * fewest + 1) if samples % steps == 0]

    found = cut(samples, most, is_uniform=True)

    assert len(found) == (equal[0] if equal else fewest)
    assert len(set(found[:-1])) <= 1
    assert len(set(found)) == (1 if equal else 2)


@given(SMALL, SMALL)
def test_uniform_cut_with_a_shorter_last_one_leaves_it_as_long_as_can_be(samples, most):
    found = cut(samples, most, is_uniform=True)

    alike = [other for other in cuts_of(samples, most, len(found)) if len(set(other[:-1])) <= 1]
    assert found[-1] == max(other[-1] for other in alike)


@pytest.mark.parametrize(
    ("sizes", "text"), [((34, 33, 33), "34+33+33"), ((26, 26, 25, 25, 25), "2 x 26 + 3 x 25"), ((1,) * 100, "100 x 1")]
)
def test_a_cut_is_spelled_out_while_short_and_told_in_runs_when_long(sizes, text):
    assert format_cut(sizes) == text
