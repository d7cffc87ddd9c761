from dataclasses import replace

import pytest

from autoaccum._report.curves import apart, picture_of
from report_examples import (
    DEVICE,
    GIB,
    MEASURED,
    MIB,
    NOTHING_FITS,
    PREDICTED_ONLY,
    REPORT,
    TRIALS,
    estimate,
    predicted,
)


def test_there_is_a_curve_for_each_place():
    assert [(curve.name, curve.is_measured) for curve in picture_of(REPORT).curves] == [
        ("NVIDIA GeForce RTX 3060", True),
        ("l4", False),
        ("rtx-3070", False),
    ]


def test_predicted_lines_that_would_hide_each_other_are_one():
    assert [line.label for line in picture_of(REPORT).lines] == [
        "NVIDIA GeForce RTX 3060, measured",
        "l4, rtx-3070, predicted",
    ]


def test_lines_that_part_somewhere_are_two():
    steeper = replace(predicted("steeper"), estimate=estimate(each=41 * MIB))
    higher = replace(predicted("higher"), estimate=estimate(fixed=800 * MIB))
    report = replace(PREDICTED_ONLY, predicted=(predicted("l4", 8 * GIB), steeper, higher))

    assert [line.label for line in picture_of(report).lines] == [f"{n}, predicted" for n in ("l4", "steeper", "higher")]


def test_plans_of_a_line_are_told_by_their_sizes():
    cards = (predicted("a"), predicted("b", 8 * GIB, 180, (128, 128)), predicted("c"), predicted("none", GIB, 0, ()))

    (line,) = picture_of(replace(PREDICTED_ONLY, predicted=cards)).lines

    assert [(names, size) for names, (size, _) in line.plans] == [(("a", "c"), 256), (("b",), 128)]


def test_trials_are_points_and_those_that_failed_are_told_apart():
    measured = picture_of(REPORT).curves[0]

    assert measured.fitted == ((2, 300 * MIB), (8, 540 * MIB), (128, 5340 * MIB), (145, 6020 * MIB))
    assert measured.failed == (150,)


def test_the_plan_is_a_point_of_its_own():
    assert picture_of(REPORT).curves[0].chosen == (128, MEASURED.peak_bytes)


def test_a_line_goes_on_beyond_the_largest_size():
    picture = picture_of(REPORT)

    assert picture.most > 256
    assert {curve.line[-1][0] for curve in picture.curves} == {picture.most}


def test_a_limit_far_above_all_else_is_out_of_sight():
    picture = picture_of(replace(PREDICTED_ONLY, predicted=(predicted(total=1000 * GIB),)))

    assert not picture.shows(999 * GIB)


def test_a_limit_that_something_failed_at_is_in_sight():
    measured = replace(MEASURED, device=replace(DEVICE, room_bytes=100 * GIB))

    assert picture_of(replace(REPORT, measured=measured, predicted=())).shows(100 * GIB)


def test_limits_that_read_the_same_are_one():
    cards = [predicted(name, total) for name, total in (("a", 10 * GIB), ("b", 12 * GIB), ("c", 10 * GIB + MIB))]

    limits = picture_of(replace(PREDICTED_ONLY, predicted=tuple(cards))).limits

    assert [limit.label for limit in limits] == ["b: 11.6 GiB", "a, c: 9.6 GiB"]


def test_a_limit_belongs_to_the_line_of_all_its_places():
    other = replace(predicted("other", 10 * GIB), estimate=estimate(fixed=800 * MIB))
    cards = (other, predicted("a", 9 * GIB), predicted("b", 10 * GIB), predicted("c", 9 * GIB))

    limits = picture_of(replace(PREDICTED_ONLY, predicted=cards)).limits

    assert [(limit.names, limit.line) for limit in limits] == [(("other", "b"), None), (("a", "c"), 1)]


def test_a_limit_of_many_places_names_some():
    cards = tuple(predicted(f"card-{n}") for n in range(9))

    (limit,) = picture_of(replace(PREDICTED_ONLY, predicted=cards)).limits

    assert limit.label == "card-0, card-1, card-2, card-3 and 5 more: 21.6 GiB"


@pytest.mark.parametrize(
    ("heights", "moved"), [([90, 50], [90, 50]), ([90, 89, 50], [90, 80, 50]), ([4, 3, 2], [20, 10, 0]), ([], [])]
)
def test_labels_stand_apart_and_not_below_the_picture(heights, moved):
    assert apart(heights, 10) == pytest.approx(moved, abs=2)


def test_peaks_that_nobody_counted_leave_a_picture_without_points():
    trials = tuple(replace(trial, peak_bytes=None) for trial in TRIALS)
    measured = replace(MEASURED, trials=trials, fixed_bytes=None, bytes_per_sample=None, footprint=None)

    (curve,) = picture_of(replace(REPORT, measured=measured, predicted=())).curves

    assert (curve.line, curve.fitted, curve.chosen) == ((), (), None)


def test_where_nothing_fits_there_is_no_plan_to_show():
    assert [curve.chosen for curve in picture_of(NOTHING_FITS).curves] == [None, None]
