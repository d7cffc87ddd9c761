"""Pages of HTML: well formed, escaped, and with curves that stay small however long a training was."""

import re
from html.parser import HTMLParser

import pytest

from autoaccum._system import html_page
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


def points_of(figure):
    return [
        tuple(map(float, point.split(","))) for point in re.findall(r'measured.*?points="([^"]*)"', figure)[0].split()
    ]


def test_result_is_a_page_with_its_numbers_and_a_curve():
    history = [step_report(step, loss=1.0 / step) for step in range(1, 11)]
    result = fit_result(history)

    texts = read(result.to_html())

    assert "autoaccum.fit: 10 steps, 1000 samples" in texts
    assert "100 in 3 micro-batches of at most 34" in texts
    assert "512.0 MiB" in texts
    assert {f"{EVALUATION.loss:.4g}", "accuracy", "0.9375"} <= set(texts)
    assert len(points_of(result._repr_html_())) == 10


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
    figure = html_page.curve_of(NASTY, [(0, 0), (1, 1)], NASTY)
    page = html_page.document_of(NASTY, html_page.article_of(html_page.header_of(NASTY, NASTY) + table + figure))

    read(page)
    assert "<script" not in page


def test_curve_goes_from_corner_to_corner_and_leaves_out_what_is_not_finite():
    figure = html_page.curve_of("loss", [(1, 4.0), (2, float("nan")), (3, float("inf")), (4, 2.0)], "step")

    (left, high), (right, low) = points_of(figure)
    assert left < right
    assert high < low  # y downwards


def test_curve_of_a_long_training_has_few_points_and_keeps_its_level():
    figure = html_page.curve_of("loss", [(step, float(step % 2)) for step in range(100_000)], "step")

    assert len(points_of(figure)) <= 600


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, float("nan")), (2, float("nan"))]])
def test_curve_without_two_points_is_left_out(points):
    assert html_page.curve_of("loss", points, "step") == ""


@pytest.mark.parametrize("level", [0.0, 3.0, -2.0, 1e-30])
def test_curve_that_stays_level_is_drawn_in_the_middle(level):
    heights = {y for _, y in points_of(html_page.curve_of("loss", [(1, level), (2, level)], "step"))}

    assert len(heights) == 1


@pytest.mark.parametrize(("low", "high", "marks"), [(0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]), (7.0, 33.0, [10, 20, 30])])
def test_grid_is_at_round_numbers(low, high, marks):
    assert html_page._round_numbers(low, high) == marks
