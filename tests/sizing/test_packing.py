"""Packed micro-batches are filled by best fit, up to the tokens that fit."""

import random

import pytest

import autoaccum
from autoaccum._sizing.cutter import Cutter
from autoaccum._sizing.cutting import Cutting, SizingOptions
from autoaccum._sizing.events import Events
from autoaccum._sizing.frontier import Frontier, mean_widths_between
from autoaccum._sizing.learner import Learner
from autoaccum._sizing.packing import best_fit, in_turn


def drawn(number, seed):
    chance = random.Random(seed)  # noqa: S311 - a test
    return sorted((min(500, 1 + int(chance.lognormvariate(4, 1))) for _ in range(number)), reverse=True)


@pytest.mark.parametrize("most", [None, 3, 1])
@pytest.mark.parametrize("tokens", [1, 100, 512, 10**9])
@pytest.mark.parametrize("number", [1, 7, 200])
def test_every_sample_is_in_one_micro_batch_that_fits_and_cut_in_turn_they_are_the_same(number, tokens, most):
    each = drawn(number, number)

    found = best_fit(each, tokens, most)

    assert sorted(sample for together in found for sample in together) == list(range(number))
    assert all(len(one) == 1 or sum(each[sample] for sample in one) <= tokens for one in found)
    assert most is None or max(map(len, found)) <= most
    assert in_turn([each[sample] for one in found for sample in one], tokens, most) == tuple(map(len, found))


def test_each_goes_where_it_leaves_least_room():
    assert best_fit([60, 50, 40, 30, 10], 100, None) == [[0, 2], [1, 3, 4]]


@pytest.mark.parametrize("tokens", [512, 2048])
def test_no_more_micro_batches_than_one_beyond_the_fewest_and_fewer_than_in_order_of_width(tokens):
    each = drawn(200, 1)

    found = best_fit(each, tokens, None)

    assert len(found) <= 1 + -(-sum(each) // tokens)
    assert len(found) <= len(in_turn(each, tokens, None))


def test_mean_width_is_of_the_samples_of_a_micro_batch():
    runs = [(2, (100,)), (3, (10,))]

    assert mean_widths_between(runs, 0, 2) == (100,)
    assert mean_widths_between(runs, 1, 3) == (55,)
    assert mean_widths_between(runs, 2, 5) == (10,)
    assert mean_widths_between([(2, (0,))], 0, 2) == (1,)


def packed():
    frontier = Frontier()
    frontier.begin_anew(packs=True)
    return frontier


def test_what_fits_packed_fits_in_any_shape_of_so_many_tokens():
    frontier = packed()
    frontier.note(10, (100,))
    frontier.fail(12, (100,))

    assert [frontier.surely((width,)) for width in (1000, 100, 10, 1)] == [1, 10, 100, 1000]
    assert [frontier.too_many((width,)) for width in (1000, 100, 10)] == [2, 12, 120]


def test_bytes_that_were_measured_packed_are_those_of_tokens():
    frontier = packed()
    frontier.measure(4, (100,), 5_000)
    frontier.measure(8, (100,), 9_000)

    assert frontier.expected_bytes(2, (400,)) == frontier.expected_bytes(8, (100,)) == 9_000
    assert frontier.line((100,)).bytes_per_sample == pytest.approx(1_000)
    assert frontier.largest((1,), 11_000, 10**6) == 1_000
    assert frontier.largest((50,), 11_000, 10**6) == 20


def test_packed_frontier_is_that_of_its_state_and_an_unpacked_one_says_nothing_of_it():
    frontier = packed()
    frontier.note(10, (100,))
    frontier.measure(4, (100,), 5_000)

    again = Frontier.of_state(frontier.state())

    assert again.packs
    assert again.state() == frontier.state()
    assert not Frontier.of_state({"packs": [[7]]}).packs
    assert "packs" not in Frontier().state()


def test_nothing_that_was_found_padded_holds_packed():
    frontier = Frontier()
    frontier.note(10, (100,))
    frontier.begin_anew(packs=True)

    assert frontier.surely((1,)) == 0


def cutter_of_packed(target=100):
    memory = autoaccum.Simulated(10_000)
    options = SizingOptions(by_width=True, frontier=packed())
    cutter = Cutter(memory, list, Cutting.of(autoaccum.plan(target, target)), options, Events(memory))
    cutter.frontier.note(100, (10,))
    cutter.begin([[(target, (10,))]], is_learning=False)
    return cutter


def test_fit_that_the_search_ends_with_is_one_of_the_tokens_that_ran():
    cutter = cutter_of_packed(9)
    cutter.frontier.fits.clear()
    learner = Learner(cutter)
    cutter.begin([[(1, (70,)), (8, (10,))]], is_learning=True)

    learner._conclude([9], 0)

    assert cutter.frontier.surely((1,)) <= 70 + 80
