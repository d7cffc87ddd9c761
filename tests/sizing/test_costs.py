"""Costs of samples and micro-batches, from the times of micro-batches."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum._sizing.costs import BY_ELEMENTS, Cost, Costs, fitted

SIZES = [(9, 30), (30, 30), (4, 200), (2, 900), (1, 900), (12, 200)]


def seconds(samples, width, cost):
    return cost.fixed + samples * cost.of(width)


def costs_of(times):
    """Costs that were measured, the first of which is left out."""
    costs = Costs()
    costs.note(1, 1, 1.0)
    for samples, width, elapsed_s in times:
        costs.note(samples, width, elapsed_s)
    return costs


@pytest.mark.parametrize(
    "cost",
    [
        Cost(2e-5, 3e-8),
        Cost(2e-5, 0.0),
        Cost(0.0, 3e-8),
        Cost(2e-5, 0.0, 4e-3),
        Cost(0.0, 3e-8, 4e-3),
        Cost(2e-5, 3e-8, 4e-3),
    ],
)
def test_linear_quadratic_and_fixed_cost_are_found_in_exact_times(cost):
    costs = costs_of((samples, width, seconds(samples, width, cost)) for samples, width in SIZES)

    found = fitted(costs.measured())

    assert found == pytest.approx(cost, rel=1e-6, abs=1e-12)


def test_one_that_has_waited_for_something_else_changes_little():
    cost = Cost(2e-5, 0.0, 4e-3)
    times = [(*size, seconds(*size, cost)) for size in SIZES]
    times[2] = (*times[2][:2], 20 * times[2][2])

    found = fitted(costs_of(times).measured())

    assert found.of(500) == pytest.approx(cost.of(500), rel=0.2)
    assert found.fixed == pytest.approx(cost.fixed, rel=0.2)


def test_nothing_measured_costs_its_elements_and_one_width_is_linear():
    assert fitted(()) == BY_ELEMENTS == Cost(1.0, 0.0)
    assert fitted(((1, 40, 2.0), (3, 40, 6.0))) == pytest.approx(Cost(0.05, 0.0))


@pytest.mark.parametrize("exponent", [0.2, 3.0])
def test_no_cost_is_below_zero_whatever_the_clock_has_said(exponent):
    found = fitted(tuple((1, width, 1e-6 * width**exponent) for width in (10, 100, 1000)))

    assert min(found) >= 0.0
    assert all(0.0 < found.of(width) < math.inf for width in (1, 10, 10**6))


@pytest.mark.parametrize("cost", [Cost(2e-5, 0.0), Cost(2e-5, 3e-8, 4e-3)])
def test_what_a_collator_truncates_costs_no_more_than_what_is_left_of_it(cost):
    sizes = [(9, 30), (30, 30), (8, 120), (4, 512), (8, 512), (2, 2000), (4, 2000), (2, 9000), (1, 90_000)]
    costs = costs_of((samples, width, seconds(samples, min(width, 512), cost)) for samples, width in sizes)

    found = fitted(costs.measured())

    assert found.of(10**6) == found.of(2000) == pytest.approx(cost.of(512), rel=0.1)
    assert found.of(120) == pytest.approx(cost.of(120), rel=0.1)


@pytest.mark.parametrize("elapsed_s", [0.0, -1.0, math.nan, math.inf])
def test_time_that_no_clock_can_have_measured_is_left_out(elapsed_s):
    assert costs_of([(2, 10, elapsed_s)]).measured() == ()
    assert costs_of([(2, 0, 1.0)]).measured() == ()


def test_fastest_of_micro_batches_that_are_about_alike_counts():
    costs = costs_of([(4, 100, 1.2), (4, 101, 1.0), (4, 99, 1.1), (1, 100, 0.5)])

    assert costs.measured() == ((1, 100, 0.5), (4, 101, 1.0))


def test_costs_are_those_of_their_state():
    costs = costs_of([(2, 100, 1.0), (4, 1000, 1.0)])

    assert Costs.of_state([list(one) for one in costs.measured()]).measured() == costs.measured()


@pytest.mark.parametrize(
    "state",
    [None, 3, {"a": 1}, ["x", [1], [0, 1, 1.0], [1, -5, 1.0], [5, 5, math.nan], [1, 1 << 63, 1.0], [2, 3], [2, 3, 4]]],
)
def test_state_that_no_training_can_have_written_is_none(state):
    assert Costs.of_state(state).measured() == ()


def in_row(samples):
    """Yield all sizes of parts in a row."""
    yield from [(first, *rest) for first in range(1, samples + 1) for rest in in_row(samples - first)] or [()]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9)), min_size=1, max_size=9), st.integers(0, 100))
def test_cheapest_cut_weighs_padding_against_what_each_micro_batch_costs_anyway(samples, fixed):
    widths, limits = sorted((width for width, _ in samples), reverse=True), sorted(limit for _, limit in samples)

    found = Cost(1.0, 0.0, fixed).cheapest(widths, limits)

    costs_of = {}
    for sizes in in_row(len(widths)):
        starts = list(itertools.accumulate(sizes[:-1], initial=0))
        if all(size <= limits[start] for size, start in zip(sizes, starts, strict=True)):
            cost = sum(fixed + size * widths[start] for size, start in zip(sizes, starts, strict=True))
            costs_of[sizes] = sizes.count(1), cost  # BatchNorm refuses one sample
    assert costs_of[found] == min(costs_of.values())
