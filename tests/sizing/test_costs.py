"""Costs of samples by width, from the times of micro-batches."""

import math

import pytest

from autoaccum._sizing.costs import BY_ELEMENTS, Cost, Costs, fitted


def seconds(width, cost):
    return cost.linear * width + cost.quadratic * width**2


def costs_of(times):
    """Costs that were measured, the first of which is left out."""
    costs = Costs()
    costs.note(1, 1, 1.0)
    for samples, width, elapsed_s in times:
        costs.note(samples, width, elapsed_s)
    return costs


@pytest.mark.parametrize("cost", [Cost(2e-5, 3e-8), Cost(2e-5, 0.0), Cost(0.0, 3e-8)])
def test_linear_and_quadratic_cost_are_found_in_exact_times(cost):
    costs = costs_of(
        (samples, width, samples * seconds(width, cost)) for samples, width in [(9, 30), (4, 200), (2, 900)]
    )

    found = fitted(costs.measured())

    assert found.linear == pytest.approx(cost.linear, abs=1e-12)
    assert found.quadratic == pytest.approx(cost.quadratic, abs=1e-14)


def test_nothing_measured_costs_its_elements_and_one_width_is_linear():
    assert fitted([]) == BY_ELEMENTS == Cost(1.0, 0.0)
    assert fitted([(40, 2.0), (40, 2.0)]) == Cost(0.05, 0.0)


@pytest.mark.parametrize("exponent", [0.2, 3.0])
def test_no_cost_is_below_zero_whatever_the_clock_has_said(exponent):
    found = fitted((width, 1e-6 * width**exponent) for width in (10, 100, 1000))

    assert min(found) >= 0.0
    assert all(0.0 < found.of(width) < math.inf for width in (1, 10, 10**6))


@pytest.mark.parametrize("elapsed_s", [0.0, -1.0, math.nan, math.inf])
def test_time_that_no_clock_can_have_measured_is_left_out(elapsed_s):
    assert costs_of([(2, 10, elapsed_s)]).measured() == ()
    assert costs_of([(2, 0, 1.0)]).measured() == ()


def test_fastest_micro_batch_of_about_as_wide_samples_counts():
    costs = costs_of([(2, 100, 1.0), (4, 101, 1.0), (1, 99, 1.0)])

    assert costs.measured() == ((101, 0.25),)


def test_costs_are_those_of_their_state():
    costs = costs_of([(2, 100, 1.0), (4, 1000, 1.0)])

    assert Costs.of_state([list(one) for one in costs.measured()]).measured() == costs.measured()


@pytest.mark.parametrize(
    "state", [None, 3, {"a": 1}, ["x", [1], [0, 1.0], [-5, 1.0], [5, math.nan], [1 << 63, 1.0], [2, 3]]]
)
def test_state_that_no_training_can_have_written_is_none(state):
    assert Costs.of_state(state).measured() == ()
