"""The pictures are what their scripts draw from what is kept, light and dark, and say in words what they show."""

import re
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from support.processes.folders import ROOT

SCRIPTS = ROOT / "scripts" / "docs_pictures"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DRAWN = [ROOT / "docs" / "window.svg"]
DRAWN += [ROOT / "docs" / "images" / f"{name}.svg" for name in ("packages", "memory-by-size", "losses", "timeline")]
TERMINAL = ROOT / "docs" / "images" / "terminal.svg"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow  # it draws all of them
def test_committed_pictures_pages_and_notebook_are_what_the_scripts_make():
    done = subprocess.run([sys.executable, str(SCRIPTS), "--check"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("picture", DRAWN, ids=lambda path: path.stem)
def test_picture_says_what_it_shows_and_is_dark_for_those_who_want_it(picture):
    root = ET.parse(picture).getroot()  # noqa: S314 - our own

    assert root.findtext(f"{SVG}title")
    assert len(root.findtext(f"{SVG}desc")) > 100
    assert "prefers-color-scheme: dark" in root.findtext(f"{SVG}style")


@pytest.mark.parametrize("picture", [*DRAWN, TERMINAL], ids=lambda path: path.stem)
def test_picture_fetches_nothing(picture):
    assert re.findall(r"(?:href|src)=|url\((?!#)|@import|<script", picture.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_picture_of_a_page_has_a_text_in_its_place(page):
    for text, _ in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
        assert len(text.split()) > 5


def test_every_picture_is_shown():
    shown = {
        (page.parent / path).resolve()
        for page in [*PAGES, ROOT / "README.md"]
        for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }

    there = {path for path in (ROOT / "docs").rglob("*") if path.suffix in (".svg", ".png")}
    assert there - shown == {ROOT / "docs" / "images" / "icon.svg"}
