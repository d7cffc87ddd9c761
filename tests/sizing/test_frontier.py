"""Limits of micro-batches of unlike width: few failures, few micro-batches, whatever comes first."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum._sizing.frontier import Frontier

MIB = 2**20
POINTS = st.lists(st.tuples(st.booleans(), st.integers(1, 64), st.integers(1, 64), st.integers(1, 64)), max_size=30)


def of_attention(samples, width):
    """MiB that a transformer with eager attention takes, as measured: 1,024 tokens take 23 to 117."""
    return 23 / 1024 * samples * width + (117 - 23) / (1024 * 992) * samples * width * max(0, width - 32)


def of_elements(samples, width):
    """MiB in proportion to the elements: 60 fit in 60."""
    return samples * width


def simulated(widths, window, memory, capacity):
    """Train windows of these widths; return the failures, the micro-batches, and how few would have done."""
    frontier, failures, steps, least = Frontier(), 0, 0, 0
    for width in widths:
        best = max((size for size in range(1, window + 1) if memory(size, width) <= capacity), default=1)
        least += math.ceil(window / best)
        left = window
        while left:
            size = frontier.largest((width,), capacity * MIB, left)
            steps += 1
            if memory(size, width) <= capacity or size == 1:
                frontier.note(size, (width,))
                frontier.measure(size, (width,), int(memory(size, width) * MIB))
                left -= size
            else:
                failures += 1
                frontier.fail(size, (width,))
                left = window  # it begins again
    return failures, steps, least


def lognormal(seed, windows=300):
    chance = random.Random(seed)  # noqa: S311 - a simulation
    return [min(1024, max(16, int(chance.lognormvariate(4.8, 0.9)))) for _ in range(windows)]


def test_texts_of_unlike_length_hardly_ever_fail_and_fill_the_memory():
    found = [simulated(lognormal(seed), 64, of_attention, 120) for seed in range(20)]

    assert sum(failures for failures, _, _ in found) <= len(found)
    assert all(steps <= 1.10 * least for _, steps, least in found)


def test_narrow_batches_at_first_limit_no_wide_ones():
    _, steps, least = simulated([16] * 10 + [64] * 30 + [16] * 10, 64, of_elements, 4096)

    assert steps <= least + 5


@given(POINTS)
def test_what_fitted_is_believed_and_what_failed_is_not_tried(points):
    frontier = Frontier()
    seen = []
    for fits, samples, *widths in points:
        point = samples, tuple(widths)
        if fits:
            frontier.note(*point)
        else:
            frontier.fail(*point)
        seen.append((fits, *point))
    if not seen:
        return
    fits, samples, widths = seen[-1]
    if fits:
        assert frontier.largest(widths, 0, 64) >= samples
        assert frontier.surely(tuple(width - 1 for width in widths)) >= samples
    else:
        assert frontier.surely(widths) < samples
    again = Frontier.of_state(json.loads(json.dumps(frontier.state())))
    assert again.surely(widths) == frontier.surely(widths)


@pytest.mark.parametrize(
    "state", [None, [], {"fits": 3}, {"fits": [["a"], [0, 1], [2.0], [True, 1], []]}, {"fails": {}}]
)
def test_state_that_nobody_can_have_written_is_left_out(state):
    frontier = Frontier.of_state(state)

    assert (frontier.fits, frontier.fails) == ([], [])


def test_forgiven_failures_are_tried_again():
    frontier = Frontier()
    frontier.note(2, (8,))
    frontier.measure(2, (8,), 2 * 8 * MIB)
    frontier.fail(8, (8,))
    assert frontier.largest((8,), 1000 * MIB, 64) == 7

    frontier.forgive()

    assert frontier.largest((8,), 1000 * MIB, 64) > 7
