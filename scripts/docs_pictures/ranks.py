"""Draws how three unequal ranks make one update together: what each does, and what they agree on."""

from __future__ import annotations

from svg import box, framed, text

TITLE = "Three unequal ranks make one update"
DESCRIPTION = (
    "Three ranks work on 64 samples each of a target batch of 192. Rank 0 takes them at once, rank 1 in two "
    "micro-batches of 32. Rank 2 runs out of memory with 32 and repeats its part in 22, 21 and 21, while the others "
    "wait. Then each says that it is done, gradients are added up in buckets, each says whether it holds the sum, and "
    "all make the same optimizer step. Until the second answer every rank can return to the start of the window."
)
WIDTH, HEIGHT = 880, 368
LEFT, TOP, LANE, BAR = 110, 76, 58, 38
DONE, SUMMED = 500, 690  # where the two questions stand
UNIT = 2.2  # pixels for a sample
WORK = (
    ("rank 0", "a large card", (("blue", 64, "64"),)),
    ("rank 1", "half of it", (("blue", 64, "32"), ("blue", 64, "32"))),
    ("rank 2", "a small one", (("red", 44, "failed"), ("green", 44, "22"), ("green", 42, "21"), ("green", 42, "21"))),
)


def picture() -> str:
    """Return the SVG."""
    bottom = TOP + len(WORK) * LANE
    parts = [text(LEFT, 36, "each rank by itself", "step"), text(LEFT, 56, "forward and backward", "quiet")]
    for number, (rank, card, bars) in enumerate(WORK):
        y, x = TOP + number * LANE, LEFT
        parts += [text(20, y + 16, rank, "step"), text(20, y + 34, card, "quiet")]
        for kind, units, words in bars:
            width = units * UNIT
            parts += box(x, y, width - 3, BAR, kind, words)
            x += width
        if x + 60 < DONE:
            parts.append(text(x + 8, y + 24, "waits", "quiet"))
    parts += _question(DONE, bottom, "1. Done?", "512 bytes from each")
    height = bottom - TOP - LANE + BAR
    parts += box(DONE + 16, TOP, SUMMED - DONE - 32, height, "data")
    for words, y in (("gradients are", TOP + height / 2 - 4), ("added up", TOP + height / 2 + 16)):
        parts.append(text((DONE + SUMMED) / 2, y, words, "in"))
    parts += _question(SUMMED, bottom, "2. All hold the sum?", "then there is no way back")
    for number in range(len(WORK)):
        parts += box(SUMMED + 16, TOP + number * LANE, 140, BAR, "data", "optimizer step")
    parts += [
        text(20, bottom + 46, "A bar is as wide as its time: ranks 1 and 2 need twice as long for a sample.", "quiet"),
        text(20, bottom + 66, "Every sample has the same weight, whoever computed it.", "quiet"),
        text(
            20, bottom + 86, "If one rank cannot hold the sum, all repeat the window: parameters stay equal.", "quiet"
        ),
    ]
    return framed(WIDTH, HEIGHT, TITLE, DESCRIPTION, parts)


def _question(x: float, bottom: float, asked: str, note: str) -> list[str]:
    return [
        f'<path class="line" stroke-dasharray="5 4" d="M{x} 66V{bottom}"/>',
        text(x, 36, asked, "step"),
        text(x, 56, note, "quiet"),
    ]
