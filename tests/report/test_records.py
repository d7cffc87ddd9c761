from dataclasses import replace

from report_examples import GIB, MEASURED, MIB, predicted


def test_the_peak_is_that_of_the_trial_of_the_plans_size():
    assert MEASURED.peak_bytes == 5340 * MIB


def test_headroom_is_what_the_peak_leaves():
    assert MEASURED.headroom_bytes == 6 * GIB - MEASURED.peak_bytes


def test_of_a_size_that_was_not_tried_the_peak_is_on_the_line():
    assert replace(MEASURED, trials=()).peak_bytes == (220 + 128 * 40) * MIB


def test_without_a_line_either_nothing_is_said():
    unseen = replace(MEASURED, trials=(), fixed_bytes=None)

    assert unseen.peak_bytes is None
    assert unseen.headroom_bytes is None


def test_a_prediction_that_does_not_fit_has_less_than_no_headroom():
    assert predicted(total=GIB, micro_batch=0, sizes=(256,)).headroom_bytes < 0


def test_a_larger_size_that_failed_is_the_cap_itself():
    assert not MEASURED.is_capped
    assert replace(MEASURED, trials=MEASURED.trials[:3], micro_batch=128).is_capped
    assert not replace(MEASURED, trials=MEASURED.trials[:3]).is_capped  # 145, of the 148 that the room is for
