"""Draws what happens to a batch of 100 whose third micro-batch runs out of memory.

The sizes are what `fit` does with `micro_batch=32` when the third backward pass fails and 20 fit;
tests/docs/test_window_picture.py runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from svg import box, down, framed, text

TITLE = "What happens to a batch of 100"
DESCRIPTION = (
    "A batch of 100 samples is cut into micro-batches of 25. Each runs forward and backward, weighted by "
    "its share of the 100. The third runs out of memory; what it and the ones before it did is undone, and the same "
    "100 samples start over in five micro-batches of 20. One optimizer step follows, with the gradient of the whole "
    "batch."
)
CAPTION = "Every sample counts once, whatever the cut."

SAMPLES = 100
CUT = (25, 25, 25, 25)
FAILED = 2  # the third: its backward pass runs out of memory
CUT_AGAIN = (20, 20, 20, 20, 20)

WIDTH, HEIGHT = 880, 430
LEFT, PX_PER_SAMPLE, GAP = 214, 6.4, 4  # start of the bars, width of a sample, gap between bars
BAR = 40


@dataclass(frozen=True)
class Bar:
    """One rectangle of a row: its samples and its text."""

    samples: int
    text: str
    kind: str


def picture() -> str:
    """Return the SVG."""
    cut = [Bar(size, str(size), "blue") for size in CUT]
    passes = [Bar(size, _weight(size), "blue") for size in CUT[:FAILED]]
    passes.append(Bar(CUT[FAILED], "out of memory", "red"))
    passes += [Bar(size, "", "empty") for size in CUT[FAILED + 1 :]]
    again = [Bar(size, _weight(size), "green") for size in CUT_AGAIN]
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
        text(LEFT, 404, CAPTION, "quiet"),
    ]
    return framed(WIDTH, HEIGHT, TITLE, DESCRIPTION, parts)


def _weight(size: int) -> str:
    return f"\u00d7 {size}/{SAMPLES}"


def _row(top: int, step: str, note: str, bars: list[Bar]) -> list[str]:
    parts = [text(24, top + (18 if note else 25), step, "step")]
    if note:
        parts.append(text(24, top + 36, note, "quiet"))
    done = 0
    for bar in bars:
        parts += box(LEFT + done * PX_PER_SAMPLE, top, bar.samples * PX_PER_SAMPLE - GAP, BAR, bar.kind, bar.text)
        done += bar.samples
    return parts


def _down(top: int) -> list[str]:
    """Return an arrow from a row to the next."""
    return down(LEFT + SAMPLES * PX_PER_SAMPLE / 2, top + BAR + 4, top + BAR + 22)


def _back(top: int) -> list[str]:
    """Return the arrow from the failed micro-batch back to the start of the window, with what is undone."""
    x = LEFT + (sum(CUT[:FAILED]) + CUT[FAILED] / 2) * PX_PER_SAMPLE - GAP / 2
    start, level, end = top + BAR + 4, top + BAR + 24, top + BAR + 60
    first = LEFT + 24
    return [
        f'<path class="back" d="M{x:g} {start}V{level - 6}q0 6 -6 6H{first + 6}q-6 0 -6 6V{end - 4}"/>',
        f'<path class="back-head" d="M{first - 5} {end - 6}h10l-5 8z"/>',
        text(first + 16, level + 20, "undone: gradients, buffers, random state", "alarm"),
    ]
