"""The planner: plain numbers in, plain numbers out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoaccum
from autoaccum.planner import balanced, plan, shrink
from autoaccum.records import Plan, Trial

SIZES = st.integers(min_value=1, max_value=5000)


def test_balanced_cut_of_100_with_at_most_37_is_even():
    made = autoaccum.plan(100, 37)

    assert made == Plan(100, (34, 33, 33))
    assert (made.micro_batch, made.accum_steps) == (34, 3)


@given(SIZES, SIZES)
def test_balanced_cut_sums_up_is_even_and_has_the_fewest_steps(samples, most):
    cut = balanced(samples, most)

    assert sum(cut) == samples
    assert max(cut) <= most
    assert max(cut) - min(cut) <= 1
    assert list(cut) == sorted(cut, reverse=True)
    assert len(cut) == -(-samples // most)


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


def test_plan_avoids_sizes_that_a_trial_showed_to_fail():
    trials = (Trial(8, True, None, 0.1), Trial(30, False, None, 0.1))

    assert plan(100, 40, trials=trials).micro_batch == 25


@pytest.mark.parametrize("target", [0, -3, 2.5, True, "100", None])
def test_target_that_is_no_positive_int_is_refused_with_its_value(target):
    with pytest.raises(autoaccum.InvalidInputError, match="target_batch") as caught:
        plan(target, 10)

    assert repr(target) in str(caught.value)


@pytest.mark.parametrize("most", [0, -1, 1.5, False])
def test_limit_that_is_no_positive_int_is_refused(most):
    with pytest.raises(autoaccum.InvalidInputError, match="max_micro_batch"):
        plan(10, most)


def test_unknown_strategy_is_refused_with_the_known_ones():
    with pytest.raises(autoaccum.InvalidInputError, match=r"'best'.*balanced"):
        plan(10, 5, strategy="best")


def test_plan_where_one_sample_failed_is_refused():
    with pytest.raises(autoaccum.InvalidInputError, match="one sample"):
        plan(10, 5, trials=[Trial(1, False, None, 0.1)])


@pytest.mark.parametrize("sizes", [(50, 49), (50, 0, 50), (100.0,), ()])
def test_hand_made_plan_that_does_not_add_up_is_refused(sizes):
    with pytest.raises(autoaccum.InvalidInputError):
        Plan(target_batch=100, micro_batches=sizes)


def test_hand_made_plan_may_be_uneven():
    assert Plan(target_batch=10, micro_batches=[7, 3]).micro_batch == 7
