from dataclasses import replace

import pytest

from autoaccum._records import Trial
from autoaccum._report.capacity import Asked, footprint_at, predict
from autoaccum._sizing.footprint import Estimate
from report_examples import GIB, MIB, card, estimate, footprint

ASKED = Asked(None, 256, 256, "balanced", None, "micro_batch")
PARTS = [name for name in footprint(1).__dataclass_fields__ if name.endswith("_bytes")]


def test_a_size_between_two_is_on_the_line_between_them():
    assert footprint_at(estimate(), 100) == footprint(100)


def test_a_size_that_was_gone_through_is_taken_as_it_is():
    known = estimate()

    assert footprint_at(known, 128) is known.footprints[2]


def test_beyond_the_largest_the_line_goes_on():
    assert footprint_at(estimate(), 300) == footprint(300)


def test_one_size_alone_is_all_there_is():
    assert footprint_at(Estimate((footprint(8),)), 3) == replace(footprint(8), size=3)


def test_a_small_size_has_the_peak_of_the_update_where_that_is_higher():
    update = footprint(1, fixed=2 * GIB, phase="optimizer")
    bent = Estimate((update, footprint(128), footprint(256)))

    small, large = footprint_at(bent, 20), footprint_at(bent, 100)

    assert (small.phase, small.reserved_bytes) == ("optimizer", update.reserved_bytes)
    assert (large.phase, large.reserved_bytes) == ("backward", bent.reserved_bytes(100))


@pytest.mark.parametrize("size", [1, 3, 77, 300])
def test_parts_add_up_to_the_peak(size):
    found = footprint_at(estimate(), size)

    assert (
        sum(getattr(found, name) for name in PARTS if name not in ("peak_bytes", "reserved_bytes")) == found.peak_bytes
    )
    assert found.reserved_bytes >= found.peak_bytes


def test_a_large_card_takes_the_target_at_once():
    found = predict(ASKED, card(total=22 * GIB), "fp32", estimate())

    assert (found.micro_batch, found.plan.micro_batches) == (256, (256,))
    assert found.headroom_bytes == found.room_bytes - footprint(256).reserved_bytes


def test_a_smaller_card_cuts_it():
    found = predict(ASKED, card(total=6 * GIB), "fp32", estimate())

    assert 128 <= found.micro_batch < 256
    assert found.plan.micro_batches == (128, 128)
    assert footprint_at(estimate(), found.micro_batch).reserved_bytes <= found.room_bytes


def test_a_card_that_is_too_small_says_what_the_least_step_takes():
    found = predict(ASKED, card(total=600 * MIB), "fp32", estimate())

    assert (found.micro_batch, found.plan, found.footprint.size) == (0, None, 1)
    assert found.headroom_bytes < 0


@pytest.mark.parametrize(("limit", "room"), [("2GiB", 2 * GIB), ("100GiB", 22 * GIB - 448 * MIB), (0.5, 11 * GIB)])
def test_a_memory_limit_holds_for_cards_too(limit, room):
    found = predict(replace(ASKED, memory_limit=limit), card(total=22 * GIB), "fp32", estimate())

    assert found.room_bytes == room


def test_in_half_precision_sizes_are_multiples_that_tensor_cores_like():
    asked = replace(ASKED, target_batch=100, most=100)

    found = predict(asked, card(total=int(2.5 * GIB)), "bf16", estimate())

    assert sum(size % 8 == 0 for size in found.plan.micro_batches) >= len(found.plan.micro_batches) - 1


def test_the_fastest_cut_is_planned_as_fit_begins():
    asked = replace(ASKED, strategy="fastest", target_batch=64)
    trials = tuple(Trial(size, fits=True, peak_bytes=None, elapsed_s=size**2) for size in (64, 64, 32, 16))

    assert asked.plan(64, "fp32", trials).micro_batches == (64,)
