"""Sizes that grow by what smaller ones show: they reach what is safe, and never more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum._sizing.fsdp_growth import Growth


def sizes_of(peak_of, *, held, limit, most, windows=12, size=1):
    """Return the sizes of some windows, whose peaks are told."""
    growth, sizes = Growth(most), [size]
    for _ in range(windows):
        growth.note(sizes[-1], held_bytes=held, peak_bytes=peak_of(sizes[-1]))
        sizes.append(growth.next_size(sizes[-1], limit))
    return sizes


def test_size_grows_to_what_leaves_a_part_of_the_memory_alone():
    sizes = sizes_of(lambda size: 1000 + 10 * size, held=900, limit=4000, most=10_000)

    assert sizes[:4] == [1, 4, 16, 64]
    assert sizes[-1] == (4000 * 85 // 100 - 1000) // 10


def test_size_grows_by_four_times_at_most_and_to_the_largest_that_is_wanted():
    assert sizes_of(lambda size: 1000 + size, held=1000, limit=10**9, most=50, windows=4) == [1, 4, 16, 50, 50]


def test_size_doubles_where_memory_does_not_rise():
    assert sizes_of(lambda _: 1000, held=1000, limit=2000, most=10, windows=5) == [1, 2, 4, 8, 10, 10]


def test_size_stays_where_even_the_smallest_is_near_the_limit():
    assert set(sizes_of(lambda size: 900 + 50 * size, held=900, limit=1000, most=10)) == {1}


def test_size_stays_where_nothing_is_known():
    assert Growth(10).next_size(3, 10**9) == 3


@given(
    held=st.integers(0, 10**6),
    once=st.integers(0, 10**6),
    each=st.integers(1, 10**5),
    room=st.floats(1.0, 100.0),
    most=st.integers(1, 10**4),
)
def test_no_size_on_a_line_comes_near_the_limit(held, once, each, room, most):
    limit = int((held + once + each) * room)

    sizes = sizes_of(lambda size: held + once + each * size, held=held, limit=limit, most=most)

    assert sizes == sorted(sizes)
    assert max(sizes) <= most
    for size in sizes[1:]:
        assert size == 1 or held + once + each * size <= limit * 0.85 + 1


@pytest.mark.parametrize("power", [1.2, 1.5])
def test_memory_that_rises_faster_than_a_line_is_approached_and_not_passed(power):
    def peak_of(size):
        return int(1000 + 10 * size**power)

    assert max(map(peak_of, sizes_of(peak_of, held=1000, limit=10_000, most=10_000))) <= 10_000
