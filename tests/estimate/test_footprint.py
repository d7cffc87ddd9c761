"""Records of a step's memory: sizes that were not traced lie on a line through what tensors hold."""

from dataclasses import replace

import pytest

from autoaccum._estimate.footprint import PARTS, Estimate
from report_examples import GIB, estimate, footprint


def test_a_size_between_two_is_on_the_line_between_them():
    assert estimate().at(100) == footprint(100)


def test_a_size_that_was_gone_through_is_taken_as_it_is():
    known = estimate()

    assert known.at(128) is known.footprints[2]


def test_beyond_the_largest_the_line_goes_on():
    assert estimate().at(300) == footprint(300)


def test_one_size_alone_is_all_there_is():
    assert Estimate((footprint(8),)).at(3) == replace(footprint(8), size=3)


@pytest.mark.parametrize("size", [1, 3, 77, 300])
def test_parts_add_up_to_the_peak(size):
    found = estimate().at(size)

    assert sum(getattr(found, name) for name in PARTS) == found.peak_bytes
    assert found.reserved_bytes >= found.peak_bytes


def test_the_line_goes_through_what_tensors_hold_and_not_through_segments():
    segments = [replace(footprint(size), reserved_bytes=GIB) for size in (1, 2)]

    known = Estimate(tuple(segments))

    assert known.bytes_per_sample == footprint(2).peak_bytes - footprint(1).peak_bytes
    assert known.fixed_bytes == footprint(1).peak_bytes - known.bytes_per_sample
    assert known.largest(GIB, 2048) < 100


@pytest.mark.parametrize("most", [37, 64, 1000])
def test_the_largest_size_is_asked_for_in_an_order_that_does_not_depend_on_the_largest_of_interest(most):
    class Fragmented(Estimate):
        def fits(self, size, room_bytes):
            return size <= 24 or 30 <= size <= 36

    assert Fragmented((footprint(1),)).largest(GIB, most) == 36
