"""Sizes of a step that were not traced: derived where that is exact, else traced."""

import pytest

from autoaccum._estimate.allocation_trace import Category, Storage, Timeline
from autoaccum._estimate.trace import TracedSizes

MIB = 2**20


def step(size):
    """A step with a workspace that rounds, and many samples, with which another operator runs."""
    storages = [
        Storage(100, Category.PARAMETERS),
        Storage(8 * size, Category.MADE, "op"),
        Storage(1000 + size // 3, Category.WORKSPACE, "op"),
    ]
    timeline = Timeline(size, storages, [0, 1, 2, ~2, ~1])
    if size > 100:
        timeline.storages.append(Storage(16 * size, Category.MADE, "another"))
        timeline.events.append(3)
    return timeline


@pytest.mark.parametrize("size", [1, 3, 50, 63, 80, 100, 101, 127])
def test_a_size_is_the_same_whichever_others_were_asked_for(size):
    told = [TracedSizes(step, 2, most)(size) for most in (150, 200, 4096)]

    assert told[0] == told[1] == told[2]
    assert told[0].storages[1] == step(size).storages[1]
    assert len(told[0].storages) == len(step(size).storages)


def test_no_size_is_traced_where_two_tell_all():
    asked = []

    def run(size):
        asked.append(size)
        return Timeline(size, [Storage(8 * size, Category.MADE, "op")], [0])

    told = TracedSizes(run, 2, 1000)

    assert told(1000).size == 1000
    assert asked == [1000]
    assert [told(size).storages[0].size_bytes for size in (1, 77, 999)] == [8, 616, 7992]
    assert asked == [1000, 2]


def test_a_size_that_the_model_refuses_takes_what_the_next_power_of_two_takes():
    def run(size):
        if size % 2:
            raise ValueError("pairs")
        return step(size)

    assert TracedSizes(run, 2, 1000)(1) == step(2)
