"""The documentation as a browser shows it: nothing fetched from elsewhere, light, dark, on a phone."""

import json
import re
import subprocess
import sys

import pytest

import autoaccum
from support.processes.folders import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=250)
    return folder


def test_every_page_is_reached_by_its_title_and_developers_pages_are_not_in_the_navigation(site):
    home = (site / "index.html").read_text()

    navigation = home[home.index("md-nav--primary") : home.index("md-content")]
    for page in (ROOT / "docs").glob("*.md"):
        title = re.match(r"# (.+)\n", page.read_text())[1]
        assert re.search(rf'md-ellipsis">\s*{title}\s*<', navigation), title
    assert "dev/" not in navigation
    assert f"autoaccum <small>{autoaccum.__version__}</small>" in home


def test_pages_can_be_searched_and_their_code_copied_in_light_and_dark(site):
    home = (site / "index.html").read_text()
    configuration = json.loads(re.search(r'<script id="__config" type="application/json">(.*?)</script>', home)[1])
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]

    assert {"content.code.copy", "navigation.tabs", "search.suggest"} <= set(configuration["features"])
    assert "CUDA out of memory at step 4,000" in {entry["title"] for entry in found}
    assert re.findall(r'data-md-color-scheme="(\w+)"[^>]*name="__palette"', home) == ["default", "slate"]


def test_no_page_shows_a_backslash_before_a_bar(site):
    for page in site.rglob("*.html"):
        assert "\\|" not in re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL), page


def test_pages_fetch_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="(https?:[^"]*)"', page.read_text())
        fetched += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]*)"', page.read_text())

        assert fetched == [], page
