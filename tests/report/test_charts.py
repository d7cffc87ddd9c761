import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from autoaccum._report.charts import charts_of
from autoaccum._report.drawing import DARK, KIND_COLOURS, LIGHT, ON_KIND
from report_examples import DEVICE, MANY_CARDS, MEASURED, NOTHING_FITS, REPORT, TRACED

SVG = "{http://www.w3.org/2000/svg}"
FITS, BY_KIND, BY_MODULE, OVER_STEP, BY_SIZE = range(5)


def words(drawing):
    return [text.text for text in ET.fromstring(drawing.svg).iter(f"{SVG}text")]  # noqa: S314 - our own


def told(drawing):
    return [title.text for title in ET.fromstring(drawing.svg).iter(f"{SVG}title")]  # noqa: S314 - our own


@pytest.fixture(scope="module")
def drawings():
    return list(charts_of(TRACED))


def test_places_stand_side_by_side_with_verdict_cut_rest_and_seconds(drawings):
    assert words(drawings[FITS])[-3:] == [
        "fits: 256 in 2 micro-batches of 128, 804.0 MiB left, 1.2 s an update",
        "fits: 256 at once, 11.3 GiB left",
        "fits: 256 in 2 micro-batches of 128, 2.3 GiB left",
    ]


def test_a_step_is_stacked_by_kind_as_traced_or_as_counted(drawings):
    seen = told(drawings[BY_KIND])

    assert "NVIDIA GeForce RTX 3060: loss 30.0 MiB, 1%" in seen  # traced
    assert "l4: optimizer 86.0 MiB, 1%" in seen  # counted by part
    assert any(text.startswith("l4: reserved, unused 20.0 MiB") for text in seen)


def test_a_kind_that_has_no_room_in_its_bar_is_named_below_it(drawings):
    below = {text for text in words(drawings[BY_KIND]) if text and "MiB" in text}

    assert {"activations 200.0 MiB", "inputs 256.0 MiB", "optimizer 86.0 MiB · inputs 128.0 MiB"} <= below


def test_each_plan_is_named_beside_its_point(drawings):
    shown = words(drawings[BY_SIZE])

    assert "plan 128, NVIDIA GeForce RTX 3060" in shown
    assert "plan 256, l4" in shown


def test_a_kind_that_is_too_narrow_for_its_name_has_it_beside(drawings):
    assert words(drawings[OVER_STEP]).count("loss") == 2  # the other is the legend's


def test_modules_are_drawn_as_a_tree(drawings):
    assert told(drawings[BY_MODULE])[:3] == [
        "(model): 243.0 MiB, 89% (parameters 43.0 MiB, activations 200.0 MiB)",
        "layer1: 193.0 MiB, 71% (parameters 43.0 MiB, activations 150.0 MiB)",
        "layer1.conv: 190.0 MiB, 70% (parameters 40.0 MiB, activations 150.0 MiB)",
    ]
    assert "head: 50.0 MiB" in words(drawings[BY_MODULE])


def test_the_peak_of_the_step_is_marked_and_each_moment_told(drawings):
    assert "peak 273.0 MiB" in words(drawings[OVER_STEP])
    assert "forward" in words(drawings[OVER_STEP])
    assert "273.0 MiB in backward: parameters 43.0 MiB, activations 200.0 MiB, loss 30.0 MiB" in told(
        drawings[OVER_STEP]
    )
    assert len(told(drawings[OVER_STEP])) == 4


@pytest.mark.parametrize("report", [REPORT, NOTHING_FITS, MANY_CARDS])
def test_reports_without_a_trace_have_the_other_pictures(report):
    assert [drawing.title for drawing in charts_of(report)] == [
        "Where it fits",
        "What takes the memory, by kind",
        "Memory over the micro-batch",
    ]


def test_names_that_are_markup_or_no_text_at_all_are_drawn():
    report = replace(REPORT, measured=replace(MEASURED, device=replace(DEVICE, name='<b>&"card"\x00\n')))

    for drawing in charts_of(report):
        ET.fromstring(drawing.svg)  # noqa: S314 - our own


def test_a_picture_fetches_nothing(drawings):
    for drawing in drawings:
        assert re.findall(r"(?:href|src)=|url\((?!#)|@import|<script", drawing.svg) == []


def light_of(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    brighter, darker = sorted((light_of(first), light_of(second)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_words_stand_out_from_their_ground(colours):
    for name in set(colours) - {"ground", "faint", "band"}:
        assert contrast(colours[name], colours["ground"]) >= 4.5, name


def test_words_stand_out_from_the_kinds():
    for kind, colour in KIND_COLOURS.items():
        assert contrast(ON_KIND[kind], colour) >= 4.5, kind


def test_colours_that_dark_screens_change_are_those_of_no_kind():
    assert not {*LIGHT.values()} & {*KIND_COLOURS.values(), *ON_KIND.values()}
    assert len({*LIGHT.values()}) == len(LIGHT)
