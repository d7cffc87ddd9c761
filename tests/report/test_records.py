from dataclasses import replace

from report_examples import DEVICE, GIB, MEASURED, MIB, predicted


def test_on_a_gpu_the_peak_counts_the_model():
    assert MEASURED.peak_bytes == MEASURED.footprint.reserved_bytes


def test_on_the_host_the_peak_does_not_count_the_model_that_was_there_before():
    on_host = replace(MEASURED, device=replace(DEVICE, holds_model=False))

    assert on_host.peak_bytes == MEASURED.footprint.reserved_bytes - 44 * MIB


def test_headroom_is_what_the_peak_leaves():
    assert MEASURED.headroom_bytes == 6 * GIB - MEASURED.peak_bytes


def test_without_a_footprint_the_peak_is_on_the_line():
    unseen = replace(MEASURED, footprint=None)

    assert unseen.peak_bytes == (220 + 128 * 40) * MIB


def test_without_a_line_either_nothing_is_said():
    unseen = replace(MEASURED, footprint=None, fixed_bytes=None)

    assert unseen.peak_bytes is None
    assert unseen.headroom_bytes is None


def test_a_prediction_that_does_not_fit_has_less_than_no_headroom():
    assert predicted(total=GIB, micro_batch=0, sizes=(256,)).headroom_bytes < 0


def test_a_larger_size_that_failed_is_the_cap_itself():
    assert not MEASURED.is_capped
    assert replace(MEASURED, trials=MEASURED.trials[:3], micro_batch=128).is_capped
    assert not replace(MEASURED, trials=MEASURED.trials[:3]).is_capped  # 145, of the 148 that the room is for
