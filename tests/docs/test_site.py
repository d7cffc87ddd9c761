"""The documentation as a browser shows it: four tabs, nothing fetched from elsewhere, light, dark, on a phone."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from folders import ROOT

SCRIPTS = ROOT / "scripts" / "docs_pictures"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=250)
    return folder


def test_pages_have_four_tabs_and_the_way_through_the_tutorial(site):
    home = (site / "index.html").read_text()

    tabs = re.findall(r'class="md-tabs__link">\s*(.*?)\s*<', home)
    assert tabs == ["Get started", "How-to", "Explain", "Reference"]
    assert 'href="tutorial/"' in home


def test_pages_fetch_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="(https?:[^"]*)"', page.read_text())
        fetched += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]*)"', page.read_text())

        assert fetched == [], page


def test_screenshots_are_light_dark_and_as_narrow_as_a_phone(site, tmp_path):
    from PIL import Image  # noqa: PLC0415 - torchvision brings it

    command = [sys.executable, str(SCRIPTS / "screenshots.py"), str(tmp_path), "--site", str(site), "tutorial/"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250)
    if "no chromium" in done.stderr:
        pytest.skip("no chromium on the PATH to look at the pages with")

    def ground_and_width(look):
        with Image.open(tmp_path / f"tutorial-{look}.png") as image:
            return image.convert("L").getpixel((5, image.height - 400)), image.width

    (light, wide), (dark, _), (on_a_phone, narrow) = map(ground_and_width, ("light", "dark", "phone"))
    assert (wide, narrow) == (1280, 500)
    assert min(light, on_a_phone) > 240
    assert dark < 60


def test_version_goes_onto_a_local_branch_beside_the_others(tmp_path):
    if not (ROOT / ".git").exists() or not shutil.which("make"):
        pytest.skip("no git checkout, or no make")

    def git(*arguments):
        command = ["git", "-C", str(tmp_path / "clone"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True)  # noqa: S607
    git("config", "user.name", "nobody")
    git("config", "user.email", "nobody@example.org")
    environment = Path(sys.executable).parents[1]
    make = ["make", f"--assume-old={environment}/.for-development", f"VENV={environment}", "docs-version"]
    subprocess.run(make, cwd=tmp_path / "clone", check=True, capture_output=True, timeout=250)

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {version, "latest", "versions.json"} <= set(git("ls-tree", "--name-only", "gh-pages").split())
    assert git("status", "--porcelain", "--untracked-files=no") == ""
