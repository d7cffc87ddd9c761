"""Draws what happens to a batch of 100 whose third micro-batch runs out of memory.

The sizes are what `fit` does with `micro_batch=34` when the third backward pass fails;
tests/docs/test_window_picture.py runs it.
"""

from __future__ import annotations

from svg import box, down, framed, text

TITLE = "What happens to a batch of 100"
DESCRIPTION = (
    "A batch of 100 samples is split into micro-batches of 34, 33 and 33. Each runs forward and backward, weighted by "
    "its share of the 100. The third runs out of memory; the step is undone, and the same 100 samples run again in "
    "five micro-batches of 20. One optimizer step follows, with the gradient of the whole batch."
)

SAMPLES = 100
CUT = (34, 33, 33)
FAILED = 2  # the third: its backward pass runs out of memory
CUT_AGAIN = (20, 20, 20, 20, 20)

# Narrow, with words above the bars, so that a phone shows it large enough to read.
WIDTH, LEFT, PX_PER_SAMPLE, GAP, BAR = 520, 20, 4.8, 4, 38


def picture() -> str:
    """Return the SVG."""
    passes = [(size, _weight(size), "blue") for size in CUT]
    passes[FAILED] = (CUT[FAILED], "out of memory", "red")
    again = [(size, _weight(size), "green") for size in CUT_AGAIN]
    middle = LEFT + SAMPLES * PX_PER_SAMPLE / 2
    parts = [
        *_row(20, "Your batch", [(SAMPLES, f"{SAMPLES} samples", "data")]),
        *down(middle, 88, 108),
        *_row(108, "Micro-batches that fit: forward, backward", passes),
        *_back(154 + 20),
        *_row(224, "The same 100, in smaller micro-batches", again),
        *down(middle, 292, 312),
        *_row(312, "One optimizer step", [(SAMPLES, "with the gradient of all 100", "data")]),
    ]
    return framed(WIDTH, 396, TITLE, DESCRIPTION, parts)


def _weight(size: int) -> str:
    return f"\u00d7 {size}/{SAMPLES}"


def _row(top: int, name: str, bars: list[tuple[int, str, str]]) -> list[str]:
    parts, done = [text(LEFT, top + 16, name, "step")], 0
    for samples, words, kind in bars:
        parts += box(LEFT + done * PX_PER_SAMPLE, top + 26, samples * PX_PER_SAMPLE - GAP, BAR, kind, words)
        done += samples
    return parts


def _back(start: int) -> list[str]:
    """Return the arrow from the failed micro-batch back to the start of the window."""
    x = LEFT + (sum(CUT[:FAILED]) + CUT[FAILED] / 2) * PX_PER_SAMPLE - GAP / 2
    level, end, first = start + 16, start + 44, LEFT + 12
    return [
        f'<path class="back" d="M{x:g} {start}V{level - 6}q0 6 -6 6H{first + 6}q-6 0 -6 6V{end - 4}"/>',
        f'<path class="back-head" d="M{first - 5} {end - 6}h10l-5 8z"/>',
        text(first + 16, level + 22, "undone: gradients, buffers, random state", "alarm"),
    ]
