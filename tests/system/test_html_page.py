"""Pages of HTML: well formed, escaped, and with curves that stay small however long a training was."""

import re
import sys
from html.parser import HTMLParser

import pytest

from autoaccum._system import html_page
from autoaccum._system.curve import curve_of
from autoaccum.errors import InvalidInputError
from record_examples import EVALUATION, fit_result, step_report

NASTY = "<script>alert(1)</script>"


class Balanced(HTMLParser):
    """Sees that every element that is opened is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    return parser.texts


def test_result_is_a_page_with_its_numbers_and_a_curve():
    history = [step_report(step, loss=1.0 / step) for step in range(1, 11)]
    result = fit_result(history)

    texts = read(result.to_html())

    assert "autoaccum.fit: 10 steps, 1000 samples" in texts
    assert "100 in 3 micro-batches of at most 34" in texts
    assert "512.0 MiB" in texts
    assert {f"{EVALUATION.loss:.4g}", "accuracy", "0.9375"} <= set(texts)
    assert len(re.findall("<title>step [0-9]+: loss [0-9.]+</title>", result._repr_html_())) == 10
    assert 'aria-label="Loss by step. loss by step: 1 at 1, 0.1 at 10."' in result._repr_html_()


def test_notebook_shows_a_fragment_and_a_file_holds_the_whole_page(tmp_path):
    result = fit_result()

    result.save_html(tmp_path / "run.html")

    assert result._repr_html_().startswith("<style>")
    assert (tmp_path / "run.html").read_text() == result.to_html()
    assert result.to_html().startswith("<!doctype html>")


def test_page_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(InvalidInputError, match="cannot be written"):
        fit_result().save_html(tmp_path / "missing" / "run.html")


def test_result_without_windows_and_evaluations_has_no_curve():
    page = fit_result([]).to_html()

    read(page)
    assert "<svg" not in page


def test_texts_are_escaped():
    table = html_page.table_of(NASTY, [(NASTY, NASTY)], [NASTY, NASTY])
    figure = html_page.figure_of(curve_of(NASTY, [(0, 0), (1, 1)], NASTY)) + html_page.lacking_of(NASTY)
    page = html_page.document_of(NASTY, html_page.article_of(html_page.header_of(NASTY, NASTY) + table + figure))

    read(page)
    assert "<script" not in page


def test_without_the_library_that_draws_the_page_has_its_tables_and_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "autoaccum._system.curve", None)
    monkeypatch.delattr("autoaccum._system.curve")

    page = fit_result([step_report(step, loss=1.0 / step) for step in range(1, 11)]).to_html()

    read(page)
    assert "<svg" not in page
    assert "pip install &#x27;autoaccum[report]&#x27;." in page
    assert "<h2>Run</h2>" in page


def test_curve_leaves_out_what_is_not_finite():
    drawing = curve_of("loss", [(1, 4.0), (2, float("nan")), (3, float("inf")), (4, 2.0)], "step")

    assert re.findall("<title>([^<]*)</title>", drawing.svg) == ["step 1: loss 4", "step 4: loss 2"]


def test_curve_of_a_long_training_has_few_points_and_keeps_its_level():
    drawing = curve_of("loss", [(step, float(step % 2)) for step in range(100_000)], "step")

    levels = re.findall("loss ([0-9.]+)</title>", drawing.svg)
    assert 300 <= len(levels) <= 600
    assert all(float(level) == pytest.approx(0.5, abs=0.01) for level in levels)
    assert "mean of" in drawing.caption


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, float("nan")), (2, float("nan"))]])
def test_curve_without_two_points_is_left_out(points):
    assert curve_of("loss", points, "step") is None


@pytest.mark.parametrize("level", [0.0, 3.0, -2.0, 1e-30, 1e30])
def test_curve_that_stays_level_is_drawn(level):
    drawing = curve_of("loss", [(1, level), (2, level)], "step")

    assert "NaN" not in drawing.svg
