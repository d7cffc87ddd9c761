from dataclasses import replace

from support.data.reports import MEASURED, MIB


def test_of_a_size_that_was_not_tried_the_peak_is_on_the_line():
    assert replace(MEASURED, trials=()).peak_bytes == (220 + 128 * 40) * MIB


def test_without_a_line_either_nothing_is_said():
    unseen = replace(MEASURED, trials=(), fixed_bytes=None)

    assert unseen.peak_bytes is None
    assert unseen.headroom_bytes is None


def test_a_larger_size_that_failed_is_the_cap_itself():
    assert not MEASURED.is_capped
    assert replace(MEASURED, trials=MEASURED.trials[:3], micro_batch=128).is_capped
    assert not replace(MEASURED, trials=MEASURED.trials[:3]).is_capped  # 145, of the 148 that the room is for
