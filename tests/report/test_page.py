"""The page, as text and as a browser sees it."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autoaccum.errors import InvalidInputError
from report_examples import MANY_CARDS, NOTHING_FITS, PREDICTED_ONLY, REPORT, SUBJECT

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = '<script>document.title = "taken over"</script>&"\''

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH to look at the page with")


def browsed(tmp_path, *options):
    """Run the browser without a screen on page.html, with a home of its own and no network to speak of."""
    page = (tmp_path / "page.html").as_uri()
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--timeout=5000", *options, page]
    environment = os.environ | {"HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment).stdout


class Balanced(HTMLParser):
    """Sees that every element that is opened is closed."""

    EMPTY = ("meta",)

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("report", [REPORT, NOTHING_FITS, MANY_CARDS])
def test_the_page_is_well_formed(report):
    parser = Balanced()

    parser.feed(report.to_html())

    assert parser.open == []


def test_the_page_fetches_nothing_and_runs_nothing():
    page = REPORT.to_html()

    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|src=|\bon\w+=", page)


def test_what_comes_from_the_user_is_escaped():
    page = replace(REPORT, subject=replace(SUBJECT, model=NASTY, recipe=NASTY), warnings=(NASTY,)).to_html()

    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4


def test_what_stands_under_a_row_goes_across_the_table():
    assert '<td colspan="4"><i>cost</i> a third more time</td>' in REPORT.to_html()


def test_the_page_is_light_or_dark():
    assert "prefers-color-scheme: dark" in REPORT.to_html()


def test_a_notebook_shows_the_same_without_a_document_around_it():
    shown = REPORT._repr_html_()

    assert shown in REPORT.to_html()
    assert "<html" not in shown


def test_a_file_is_whole_or_not_there(tmp_path):
    REPORT.save_html(tmp_path / "page.html")

    assert (tmp_path / "page.html").read_text() == REPORT.to_html()
    with pytest.raises(InvalidInputError, match=r"none.*cannot be written"):
        REPORT.save_html(tmp_path / "none" / "page.html")


@needs_browser
def test_a_browser_shows_the_tables_and_the_picture(tmp_path):
    replace(REPORT, subject=replace(SUBJECT, model=NASTY)).save_html(tmp_path / "page.html")

    seen = browsed(tmp_path, "--dump-dom")

    assert re.search(r"<title>(.*?)</title>", seen)[1].startswith("Pre-flight report: ")
    assert seen.count("<table") == 8
    assert seen.count("<circle") == 8
    assert "256 in 2 micro-batches, 128+128, measured" in seen


@needs_browser
@pytest.mark.parametrize(("scheme", "is_dark"), [("1", False), ("0", True)])
def test_a_browser_paints_it_light_or_dark(tmp_path, scheme, is_dark):
    from PIL import Image  # noqa: PLC0415 - matplotlib brings it

    REPORT.save_html(tmp_path / "page.html")
    picture = tmp_path / "page.png"

    browsed(
        tmp_path, f"--screenshot={picture}", "--window-size=900,1200", f"--blink-settings=preferredColorScheme={scheme}"
    )

    with Image.open(picture) as image:
        corner, colours = image.convert("L").getpixel((5, 5)), image.convert("RGB").getcolors(1 << 20)
    assert (corner < 60) is is_dark
    assert len(colours) > 50


def test_what_is_tight_is_said_and_marked_so():
    one = PREDICTED_ONLY.predicted[0]

    page = replace(PREDICTED_ONLY, predicted=(replace(one, safe_micro_batch=0),)).to_html()

    assert '<li class="tight"><b>l4 is tight</b>' in page
    assert ".verdicts .tight" in page
