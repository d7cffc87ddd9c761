"""The documentation as a browser shows it: nothing fetched from elsewhere, light, dark, on a phone."""

import contextlib
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading

import pytest

import autoaccum
from folders import ROOT

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
    assert "The run crashes at step 4,000" in {entry["title"] for entry in found}
    assert re.findall(r'data-md-color-scheme="(\w+)"[^>]*name="__palette"', home) == ["default", "slate"]


def test_no_page_shows_a_backslash_before_a_bar(site):
    for page in site.rglob("*.html"):
        assert "\\|" not in re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL), page


class _Folder(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class _Outside(http.server.BaseHTTPRequestHandler):
    """A proxy that notes what is asked for, and has none of it."""

    def refuse(self):
        self.server.asked.append(self.path)
        self.send_error(502)

    do_GET = do_CONNECT = do_POST = do_HEAD = refuse  # noqa: N815 - the library's names

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked_elsewhere(browser, page, folder):
    """What a browser that shows a page asks other machines for, by a proxy that it must use for them."""
    with serving(functools.partial(_Folder, directory=str(folder))) as own, serving(_Outside) as outside:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
        command += ["--disable-background-networking", "--disable-component-update", "--timeout=15000", "--dump-dom"]
        command += [f"--proxy-server=127.0.0.1:{outside.server_address[1]}"]
        with tempfile.TemporaryDirectory() as home:
            command += [f"--user-data-dir={home}", f"http://127.0.0.1:{own.server_address[1]}/{page}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert "</html>" in done.stdout
        # The browser looks by itself, whatever the page, for a proxy's address and for its maker's services.
        return [name for name in outside.asked if "google" not in name and "gvt1" not in name]


@pytest.mark.parametrize("page", ["", "tutorial/", "how-it-works/", "dev/design/"])
def test_browser_asks_no_other_machine_for_anything(site, page):
    if (browser := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        pytest.skip("no chromium on the PATH to look at the pages with")

    assert asked_elsewhere(browser, page, site) == []


def test_what_a_page_asks_of_another_machine_would_be_noticed(tmp_path):
    if (browser := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        pytest.skip("no chromium on the PATH to look at the pages with")
    (tmp_path / "index.html").write_text('<html><script src="http://elsewhere.invalid/x.js"></script></html>')

    assert asked_elsewhere(browser, "", tmp_path) == ["http://elsewhere.invalid/x.js"]


def test_pages_fetch_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="(https?:[^"]*)"', page.read_text())
        fetched += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]*)"', page.read_text())

        assert fetched == [], page
