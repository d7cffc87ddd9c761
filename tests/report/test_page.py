"""The page, as text and as a browser sees it."""

import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autoaccum._estimate.footprint import KINDS  # the list that the page draws
from autoaccum.errors import InvalidInputError
from support.data.reports import (
    DEVICE,
    MANY_GPUS,
    MEASURED,
    MIB,
    NOTHING_FITS,
    PREDICTED_ONLY,
    REPORT,
    SUBJECT,
)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = '<script>document.title = "taken over"</script>&"\''

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH to look at the page with")


def browsed(tmp_path, *options, page="page.html"):
    """Run the browser without a screen on page.html, with a home of its own and no network to speak of."""
    page = (tmp_path / page).as_uri()
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--timeout=5000", *options, page]
    environment = os.environ | {"HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)


class Balanced(HTMLParser):
    """Sees that every element that is opened is closed."""

    EMPTY = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("report", [REPORT, NOTHING_FITS, MANY_GPUS])
def test_the_page_is_well_formed(report):
    parser = Balanced()

    parser.feed(report.to_html())

    assert parser.open == []
    for table in re.findall("<table.*?</table>", report.to_html(), flags=re.DOTALL):
        assert len({len(re.findall("<t[dh]", row)) for row in table.split("<tr")[1:]}) == 1


def test_the_page_fetches_nothing_and_runs_nothing():
    page = REPORT.to_html()

    assert "default-src 'none'; style-src 'unsafe-inline'\"" in page
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|src=|\bon\w+=", page)


def test_what_comes_from_the_user_is_escaped():
    device = replace(DEVICE, name=NASTY)
    report = replace(REPORT, subject=replace(SUBJECT, model=NASTY, script=NASTY), warnings=(NASTY,))

    page = replace(report, measured=replace(MEASURED, device=device)).to_html()

    assert page.count("<script") == 0
    assert page.count("&lt;script&gt;") >= 6


L4 = PREDICTED_ONLY.predicted[0]
HEADLINES = {
    "fits": (
        REPORT,
        "<b>Fits on all 3 devices.</b> NVIDIA GeForce RTX 3060, which holds least: 256 in 2 micro-batches",
    ),
    "fits on one": (replace(PREDICTED_ONLY, predicted=(L4,)), "<b>Fits on l4.</b> 256 or more at once, predicted."),
    "fails": (
        replace(REPORT, predicted=(*REPORT.predicted, *NOTHING_FITS.predicted)),
        "<b>Does not fit on tiny.</b> tiny: a micro-batch of 1 is predicted",
    ),
    "tight": (replace(PREDICTED_ONLY, predicted=(replace(L4, safe_micro_batch=0),)), "<b>Tight on l4.</b>"),
}


@pytest.mark.parametrize("answer", HEADLINES)
def test_the_headline_is_a_sentence_for_a_stranger_and_marked_by_the_answer(answer):
    report, said = HEADLINES[answer]
    kind = answer.split()[0]

    page = report.to_html()

    assert f'<p class="headline {kind}">{said}' in page
    assert f".{kind} {{ --c" in page


def test_pictures_say_in_words_what_they_show():
    """A label that does not fit into what it names is hidden, so all is also in legends and titles."""
    bars, curve = figures = re.findall(r"<figure>.*?</figure>", REPORT.to_html(), flags=re.DOTALL)

    assert [re.search("<h2>([^<]*)", figure)[1] for figure in figures] == [
        "Where it fits, and what takes the memory",
        "Memory over the micro-batch",
    ]
    for figure in figures:
        assert re.search("<figcaption>[^<]{20,}</figcaption>", figure)
    drawn = set(re.findall(r'<span class="(k-\w+)"', bars))
    assert (
        {"k-activations", "k-outside", "k-free"} <= set(re.findall(r'<i class="(k-\w+)"', bars)) <= {*drawn, "k-free"}
    )
    assert 'title="activations: 4.9 GiB"' in bars
    assert "Each bar has a scale of its own" in bars
    assert "rtx-3070, predicted: may use 7.6 GiB; the plan&#x27;s 128 take" in curve


@pytest.mark.parametrize("peak_mib", [5340, 6200])
def test_a_mark_for_what_may_be_used_is_drawn_and_explained_where_a_peak_is_above_it(peak_mib):
    trial = replace(MEASURED.trials[2], peak_bytes=peak_mib * MIB)
    report = replace(REPORT, measured=replace(MEASURED, trials=(trial,)), predicted=())

    page = report.to_html().partition("</style>")[2].partition("Memory over the micro-batch")[0]

    assert page.count("<em ") == page.count('<i class="k-limit">') == (peak_mib > 6144)


@pytest.mark.parametrize("report", [REPORT, PREDICTED_ONLY, MANY_GPUS])
def test_the_dot_of_a_plan_lies_on_its_line_and_sizes_have_ticks(report):
    page = report.to_html()
    lines = re.findall(r'<polyline class="(c\d)(?: dashed)?" points="([^"]*)"', page)
    dots = dict(re.findall(r'<i class="(c\d)" style="(left[^"]*)"', page))

    for style, points in lines:
        curve = [tuple(map(float, point.split(","))) for point in points.split()]
        left, bottom = map(float, re.findall(r"([\d.]+)%", dots[style]))
        assert min(math.dist((10 * left, 1000 - 10 * bottom), point) for point in curve) < 1
    ticks = re.findall(r'<b style="left:[\d.]+%">(\d+)</b>', page)
    assert ticks == ["0", "64", "128", "192", "256"]


def test_what_is_alive_at_the_peak_is_listed():
    page = REPORT.to_html()

    assert "<h2>Tensors alive at the peak on NVIDIA GeForce RTX 3060: 5.2 GiB of 5.2 GiB, in backward</h2>" in page
    assert "<td>convolution</td>" in page


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
    assert seen.count("<figure") == 2
    assert "256 in 2 micro-batches, 128+128, measured" in seen


def complaints(tmp_path, page):
    """What the browser's console says of a page; its policy makes each request for something a complaint."""
    (tmp_path / "page.html").write_text(page)
    told = browsed(tmp_path, "--enable-logging=stderr", "--dump-dom")
    return told.stdout.count("<figure"), re.findall(r"CONSOLE.*", told.stderr)


@needs_browser
def test_a_browser_shows_the_pictures_asks_for_nothing_and_complains_of_nothing(tmp_path):
    assert complaints(tmp_path, REPORT.to_html()) == (2, [])


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


@needs_browser
@pytest.mark.parametrize(
    ("report", "width", "medium"), [(REPORT, 390, "screen"), (MANY_GPUS, 390, "screen"), (REPORT, 690, "print")]
)
def test_nothing_is_wider_than_a_phone_or_a_sheet_of_paper(tmp_path, report, width, medium):
    """On a phone tables scroll by themselves; on paper, of 18 cm, nothing does. Words end where their box ends."""
    (tmp_path / "page.html").write_text(report.to_html().replace(f"@media {medium} {{", "@media all {"))
    measure = "const page = this.contentDocument; const boxes = [...page.querySelectorAll('.bar span')];"
    measure += "const cut = boxes.every(one => getComputedStyle(one).overflow === 'hidden');"
    measure += "const ticks = [...page.querySelectorAll('.plot b')].map(tick => tick.getBoundingClientRect());"
    measure += "const left = Math.min(...ticks.map(tick => tick.left));"
    measure += "const right = Math.max(page.documentElement.scrollWidth, ...ticks.map(tick => tick.right));"
    measure += "document.title = `wide ${left} ${right} ${boxes.length > 0 &amp;&amp; cut}`"
    frame = f'<iframe src="page.html" width="{width}" height="900" onload="{measure}"></iframe>'
    (tmp_path / "outer.html").write_text(f"<html><body>{frame}</body></html>")

    seen = browsed(tmp_path, "--allow-file-access-from-files", "--dump-dom", page="outer.html").stdout

    left, right, are_cut = re.search(r"<title>wide ([-.\d]+) ([.\d]+) (\w+)", seen).groups()
    assert float(left) >= 0
    assert float(right) <= width
    assert are_cut == "true"


def test_every_kind_of_memory_has_a_colour_of_its_own():
    colours = dict(re.findall(r"\.k-(\w+)[^{]* \{ --k: (#\w{6})", REPORT.to_html()))

    assert colours.keys() == {*KINDS, "outside"}
    assert len({*colours.values()}) == len(colours)
