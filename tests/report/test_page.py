"""The page, as text and as a browser sees it."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autoaccum.errors import InvalidInputError
from report_examples import (
    DEVICE,
    GIB,
    MANY_CARDS,
    MEASURED,
    NOTHING_FITS,
    PREDICTED_ONLY,
    REMEDIES,
    REPORT,
    SUBJECT,
    TRACED,
)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = '<script>document.title = "taken over"</script>&"\''

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH to look at the page with")


def browsed(tmp_path, *options):
    """Run the browser without a screen on page.html, with a home of its own and no network to speak of."""
    page = (tmp_path / "page.html").as_uri()
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--timeout=5000", *options, page]
    environment = os.environ | {"HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)


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


@pytest.mark.parametrize("report", [REPORT, TRACED, NOTHING_FITS, MANY_CARDS])
def test_the_page_is_well_formed(report):
    parser = Balanced()

    parser.feed(report.to_html())

    assert parser.open == []


def test_the_page_fetches_nothing_and_runs_only_what_sorts():
    page = TRACED.to_html()

    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert not re.search(r"<link|<img|<iframe|@import|url\(|src=|\bon\w+=", page.replace(script, ""))


def test_what_comes_from_the_user_is_escaped():
    device = replace(DEVICE, name=NASTY)
    report = replace(REPORT, subject=replace(SUBJECT, model=NASTY, recipe=NASTY), warnings=(NASTY,))

    page = replace(report, measured=replace(MEASURED, device=device)).to_html()

    assert page.count("<script") == 1
    assert page.count("&lt;script&gt;") >= 8


def test_the_headline_has_the_verdict_the_largest_micro_batch_and_the_plan():
    page = REPORT.to_html()

    assert '<p class="headline fits"><b>Fits on all of 3 devices.</b>' in page
    assert (
        "holds least: largest micro-batch 145, below which the plan cuts evenly: 256 in 2 micro-batches, 128+128, "
        "measured</p>"
    ) in page


def test_a_headline_is_that_of_the_worst_place():
    half = replace(REPORT, predicted=(*REPORT.predicted, NOTHING_FITS.predicted[0]))

    assert '<p class="headline fails"><b>Does not fit on tiny.</b>' in half.to_html()


def test_pictures_have_a_text_in_their_place_and_numbers_for_the_pointer():
    pictures = re.findall(r"<svg.*?</svg>", TRACED.to_html(), flags=re.DOTALL)

    assert len(pictures) == 5
    for picture in pictures:
        assert len(re.search(r'role="img" aria-label="([^"]*)"', picture)[1]) > 80
        assert len(re.findall("<title>[^<]*(?:[KMG]iB|samples)[^<]*</title>", picture)) >= 2


def test_what_is_alive_at_the_peak_is_listed():
    page = TRACED.to_html()

    assert "<h2>Alive at the peak on NVIDIA GeForce RTX 3060: 273.0 MiB, in backward</h2>" in page
    assert "<td>aten.convolution.default</td>" in page


def test_without_the_extra_the_page_has_its_tables_and_says_what_to_install(monkeypatch):
    for name in ("altair", "autoaccum._report.charts"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr("autoaccum._report.charts", raising=False)

    page = TRACED.to_html()

    assert "<svg" not in page
    assert page.count("<table") == 9
    assert "pip install altair vl-convert-python" in page


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

    seen = browsed(tmp_path, "--dump-dom").stdout

    assert re.search(r"<title>(.*?)</title>", seen)[1].startswith("Pre-flight report: ")
    assert seen.count("<table") == 8
    assert seen.count("<svg") == 3
    assert "256 in 2 micro-batches, 128+128, measured" in seen


def complaints(tmp_path, page):
    """What the browser's console says of a page; its policy makes each request for something a complaint."""
    (tmp_path / "page.html").write_text(page)
    told = browsed(tmp_path, "--enable-logging=stderr", "--dump-dom")
    return told.stdout.count("<svg"), re.findall(r"CONSOLE.*", told.stderr)


@needs_browser
def test_a_browser_shows_the_pictures_asks_for_nothing_and_complains_of_nothing(tmp_path):
    assert complaints(tmp_path, TRACED.to_html()) == (5, [])


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("wrong", ['<img src="https://example.org/a.png">', "<script>boom()</script>"])
def test_a_request_or_another_script_would_be_complained_of(tmp_path, wrong):
    _, (told,) = complaints(tmp_path, PREDICTED_ONLY.to_html().replace("</body>", f"{wrong}</body>"))

    assert "Content Security Policy" in told


@needs_browser
def test_a_browser_sorts_remedies_by_a_click_on_a_column(tmp_path):
    cheaper = replace(REMEDIES[0], name="cheaper", peak_bytes=GIB, micro_batch=999)
    page = replace(REPORT, remedies=(*REMEDIES, cheaper)).to_html()
    click = """<script>document.querySelectorAll("table.sorts thead button")[1].click()</script></body>"""
    # The page's own policy refuses this test's script.
    page = re.sub("<meta http-equiv[^>]*>", "", page).replace("</body>", click)
    (tmp_path / "page.html").write_text(page)

    seen = browsed(tmp_path, "--dump-dom").stdout

    table = re.search(r'<table class="columns sorts"[^>]*>.*?</table>', seen, flags=re.DOTALL)[0]
    assert re.findall(r'<th scope="row">([^<]*)', table) == ["cheaper", "checkpointing", "Adafactor"]
    assert 'aria-sort="ascending"' in table


@needs_browser
@pytest.mark.parametrize(("scheme", "is_dark"), [("1", False), ("0", True)])
def test_a_browser_paints_it_light_or_dark(tmp_path, scheme, is_dark):
    from PIL import Image  # noqa: PLC0415 - torchvision brings it

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

    assert '<p class="headline tight"><b>Tight on l4.</b>' in page
    assert ".tight { --c" in page
