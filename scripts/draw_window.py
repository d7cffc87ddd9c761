"""Draws docs/window.svg: what happens to a batch of 100 whose third micro-batch runs out of memory.

    python scripts/draw_window.py            # write docs/window.svg
    python scripts/draw_window.py --check    # exit with 1 if the file is out of date

The sizes are what `fit` does with `micro_batch=32, strategy="greedy"` when the third backward pass fails and 20 fit;
tests/across/test_window_picture.py runs it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs" / "window.svg"
TITLE = "What happens to a batch of 100"
DESCRIPTION = (
    "A batch of 100 samples is cut into micro-batches of 32, 32, 32 and 4. Each runs forward and backward, weighted by "
    "its share of the 100. The third runs out of memory; what it and the ones before it did is undone, and the same "
    "100 samples start over in five micro-batches of 20. One optimizer step follows, with the gradient of the whole "
    "batch."
)
CAPTION = 'Every sample counts once, whatever the cut. Here strategy="greedy"; the default cuts evenly.'

SAMPLES = 100
CUT = (32, 32, 32, 4)
FAILED = 2  # the third: its backward pass runs out of memory
CUT_AGAIN = (20, 20, 20, 20, 20)

WIDTH, HEIGHT = 880, 430
LEFT, PX_PER_SAMPLE, GAP = 214, 6.4, 4  # start of the bars, width of a sample, gap between bars
BAR = 40

# Its own background, to be readable on any page; the colours follow the reader's light or dark mode.
STYLE = """
svg { --ground: #ffffff; --edge: #d0d7de; --text: #1f2328; --quiet: #59636e; --on: #ffffff;
  --data: #57606a; --micro: #0a5cc2; --again: #1a7f37; --failed: #cf222e; --faint: #eef1f4; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #161b22; --edge: #3d444d; --text: #e6edf3; --quiet: #9198a1; --on: #0d1117;
    --data: #b1bac4; --micro: #79b8ff; --again: #56d364; --failed: #ff8d85; --faint: #21262d; }
}
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--text); }
.step { font-weight: 600; }
.quiet { font-size: 13px; fill: var(--quiet); }
.in { text-anchor: middle; fill: var(--on); font-weight: 600; }
.not-run { text-anchor: middle; fill: var(--quiet); }
.alarm { fill: var(--failed); font-weight: 600; }
.ground { fill: var(--ground); stroke: var(--edge); }
.data { fill: var(--data); } .micro { fill: var(--micro); } .again { fill: var(--again); }
.failed { fill: var(--failed); }
.empty { fill: var(--faint); stroke: var(--quiet); stroke-dasharray: 4 3; }
.line { fill: none; stroke: var(--quiet); stroke-width: 2; }
.back { fill: none; stroke: var(--failed); stroke-width: 2; }
.head { fill: var(--quiet); } .back-head { fill: var(--failed); }
""".strip()


@dataclass(frozen=True)
class Bar:
    """One rectangle of a row: its samples and its text."""

    samples: int
    text: str
    kind: str


def picture() -> str:
    """Return the SVG."""
    cut = [Bar(size, str(size), "micro") for size in CUT]
    passes = [Bar(size, _weight(size), "micro") for size in CUT[:FAILED]]
    passes.append(Bar(CUT[FAILED], "out of memory", "failed"))
    passes += [Bar(size, "", "empty") for size in CUT[FAILED + 1 :]]
    again = [Bar(size, _weight(size), "again") for size in CUT_AGAIN]
    parts = [
        *_row(24, "The loader's batch", "", [Bar(SAMPLES, f"{SAMPLES} samples, one window", "data")]),
        *_down(24),
        *_row(92, "Cut to what fits", "micro-batches", cut),
        *_down(92),
        *_row(160, "Forward, backward", "weight in the mean", passes),
        *_back(160),
        *_row(268, "The same 100 again", "cut smaller", again),
        *_down(268),
        *_row(336, "One optimizer step", "", [Bar(SAMPLES, "the gradient of the whole batch", "data")]),
        _text(LEFT, 404, CAPTION, "quiet"),
    ]
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-labelledby="title description">\n'
        f'<title id="title">{escape(TITLE)}</title>\n<desc id="description">{escape(DESCRIPTION)}</desc>\n'
        f"<style>\n{STYLE}\n</style>\n"
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>\n'
        f"{body}\n</svg>\n"
    )


def _weight(size: int) -> str:
    return f"\u00d7 {size}/{SAMPLES}"


def _row(top: int, step: str, note: str, bars: list[Bar]) -> list[str]:
    parts = [_text(24, top + (18 if note else 25), step, "step")]
    if note:
        parts.append(_text(24, top + 36, note, "quiet"))
    done = 0
    for bar in bars:
        x = LEFT + done * PX_PER_SAMPLE
        width = bar.samples * PX_PER_SAMPLE - GAP
        parts.append(f'<rect class="{bar.kind}" x="{x:g}" y="{top}" width="{width:g}" height="{BAR}" rx="5"/>')
        if bar.text:
            parts.append(_text(x + width / 2, top + 25, bar.text, "in"))
        done += bar.samples
    return parts


def _down(top: int) -> list[str]:
    """Return an arrow from a row to the next."""
    x, start, end = LEFT + SAMPLES * PX_PER_SAMPLE / 2, top + BAR + 4, top + BAR + 22
    return [
        f'<path class="line" d="M{x:g} {start}V{end - 4}"/>',
        f'<path class="head" d="M{x - 5:g} {end - 6}h10l-5 8z"/>',
    ]


def _back(top: int) -> list[str]:
    """Return the arrow from the failed micro-batch back to the start of the window, with what is undone."""
    x = LEFT + (sum(CUT[:FAILED]) + CUT[FAILED] / 2) * PX_PER_SAMPLE - GAP / 2
    start, level, end = top + BAR + 4, top + BAR + 24, top + BAR + 60
    first = LEFT + 24
    return [
        f'<path class="back" d="M{x:g} {start}V{level - 6}q0 6 -6 6H{first + 6}q-6 0 -6 6V{end - 4}"/>',
        f'<path class="back-head" d="M{first - 5} {end - 6}h10l-5 8z"/>',
        _text(first + 16, level + 20, "undone: gradients, buffers, random state", "alarm"),
    ]


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def main() -> int:
    """Write the file, or say whether it is up to date; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    drawn = picture()
    if not parser.parse_args().check:
        FILE.write_text(drawn, encoding="utf-8")
    elif not FILE.is_file() or FILE.read_text(encoding="utf-8") != drawn:
        print(f"{FILE} is out of date; run python scripts/draw_window.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
