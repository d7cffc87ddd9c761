"""Draws what a terminal shows after the tutorial's `trains.py`, by tmux and rich."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from tutorial import IMAGES, SCRIPTS

if TYPE_CHECKING:
    from rich.text import Text

COLUMNS, LINES, PX, TALL = 66, 60, 8.0, 19
LONGEST_S = 120
GROUND, TEXT, DIM = "#0d1117", "#e6edf3", "#9198a1"
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'


def run() -> None:
    """Write docs/images/terminal.svg."""
    if shutil.which("tmux") is None:
        print("no tmux on the PATH: terminal.svg stays as it is", file=sys.stderr)
        return
    (IMAGES / "terminal.svg").write_text(picture(_screen()), encoding="utf-8")


def _screen() -> str:
    """Return the lines of the screen at the end of the run, with their colours."""
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS.glob("*.py"):
            shutil.copy(script, folder)
        tmux = ["tmux", "-S", f"{folder}/socket", "-f", "/dev/null"]
        typed = f"{sys.executable} trains.py; touch done; sleep {LONGEST_S}"
        own = os.environ | {"AUTOACCUM_CACHE_DIR": folder}
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        subprocess.run([*tmux, "new-session", "-d", *size, "-c", folder, typed], check=True, env=own)  # noqa: S603
        started = time.monotonic()
        while not (Path(folder) / "done").exists() and time.monotonic() - started < LONGEST_S:
            time.sleep(0.2)
        taken = subprocess.run([*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True)  # noqa: S603
        subprocess.run([*tmux, "kill-server"], check=True)  # noqa: S603
    shown = taken.stdout.partition("time besides")[0].rpartition("\n")[0]  # a summary follows
    return f"$ python trains.py\n{shown}"


def picture(screen: str) -> str:
    """Return the SVG of lines with ANSI colours. It fetches nothing, and is dark as terminals are."""
    lines = list(AnsiDecoder().decode(screen))
    width, height = COLUMNS * PX + 32, 24 + len(lines) * TALL
    rows = [row for number, line in enumerate(lines) for row in _row(line, 30 + number * TALL)]
    said = escape(" ".join(line.plain.strip() for line in lines))
    head = f'viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {head} role="img" aria-labelledby="title description">\n'
        f'<title id="title">A run in a terminal</title>\n<desc id="description">{said}</desc>\n'
        f"<style>text {{ font: 13px {MONO}; white-space: pre; fill: {TEXT}; }}</style>\n"
        f'<rect width="{width:g}" height="{height}" rx="8" fill="{GROUND}"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def _row(line: Text, y: float) -> list[str]:
    """Return the pieces of a line, each at its column, so that the font's width does not matter."""
    pieces = []
    for segment in line.render(Console()):
        words, style = segment.text.rstrip("\n"), segment.style
        start = sum(len(text) for text, *_ in pieces)
        pieces.append((words, start, style))
    drawn = []
    for words, start, style in pieces:
        if not words.strip():
            continue
        colour = DIM if style and style.dim else TEXT
        if style and style.color and style.color.number is not None:
            colour = style.color.get_truecolor(SVG_EXPORT_THEME).hex
        bold = ' font-weight="700"' if style and style.bold else ""
        drawn.append(
            f'<text x="{16 + start * PX:g}" y="{y:g}" textLength="{len(words) * PX:g}" '
            f'style="fill: {colour}"{bold}>{escape(words)}</text>'
        )
    return drawn
