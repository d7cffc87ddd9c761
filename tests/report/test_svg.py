from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from autoaccum._report.curves import picture_of
from autoaccum._report.svg import svg_of, ticks
from report_examples import DEVICE, MANY_CARDS, MEASURED, NOTHING_FITS, REPORT


@pytest.mark.parametrize("report", [REPORT, NOTHING_FITS, MANY_CARDS])
def test_the_picture_is_well_formed_and_draws_inside_its_frame(report):
    drawn = ET.fromstring(svg_of(picture_of(report)))  # noqa: S314 - our own

    width, height = map(float, drawn.get("viewBox").split()[2:])
    circles = list(drawn.iter("circle"))
    assert all(0 <= float(one.get("cx")) <= width and 0 <= float(one.get("cy")) <= height for one in circles)
    assert circles or report is NOTHING_FITS


def test_a_line_that_cards_share_is_drawn_once_with_a_plan_for_each_size():
    drawn = ET.fromstring(svg_of(picture_of(REPORT)))  # noqa: S314 - our own

    plans = [path.find("title").text for path in drawn.iter("path") if path.get("class") == "plan"]
    lines = [line for line in drawn.iter("polyline") if line.get("class") in ("measured", "predicted")]
    assert len(lines) == 2
    assert plans[1:] == ["l4: the plan, 256 at once", "rtx-3070: the plan, 128 at once"]


def test_names_are_escaped():
    measured = replace(MEASURED, device=replace(DEVICE, name='<b>&"card"'))

    drawn = svg_of(picture_of(replace(REPORT, measured=measured)))

    assert "<b>" not in drawn
    ET.fromstring(drawn)  # noqa: S314 - our own


@pytest.mark.parametrize(
    ("top", "expected"), [(23.4, [0, 5, 10, 15, 20]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (300, [0, 100, 200, 300])]
)
def test_ticks_are_round_numbers(top, expected):
    assert ticks(top) == pytest.approx(expected)


def test_ticks_of_samples_are_whole():
    assert ticks(2, whole=True) == [0, 1, 2]
