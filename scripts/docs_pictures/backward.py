"""Draws what is half done when memory runs out in a backward pass, and what is put back."""

from __future__ import annotations

from svg import box, framed, right, text

TITLE = "Memory runs out in a backward pass"
DESCRIPTION = (
    "Three states of a training step, side by side. Before micro-batch 3, all layers hold the gradients of 1 and 2, "
    "and BatchNorm's statistics and the random state have moved twice. When memory runs out in the backward "
    "pass of micro-batch 3, the last two layers already hold its gradient and the others do not; statistics and random "
    "state have moved three times, and the exception keeps the activations alive. Then all is put back to the start of "
    "the window: no gradients, statistics and random state as before micro-batch 1, activations released. Parameters "
    "and the optimizer's state were never touched. The window is restarted, cut smaller."
)
WIDTH, HEIGHT = 880, 384
LEFT, COLUMN, GAP, TOP, ROW = 176, 214, 20, 84, 44
LAYERS = 5
COLUMNS = ("before micro-batch 3", "memory runs out", "put back")
NOTES = ("1 and 2 are done", "in its backward pass, at layer 3", "and the window cut smaller")
ROWS = (
    ("BatchNorm, random state", (("plain", "moved twice"), ("red", "moved three times"), ("green", "as at the start"))),
    ("activations", (("plain", "none"), ("red", "kept by the exception"), ("green", "released"))),
    ("parameters, optimizer", (("plain", "of the last update"), ("plain", "the same"), ("plain", "the same"))),
)
GRADIENTS = (("plain",) * 5, ("plain",) * 3 + ("red",) * 2, ("empty",) * 5)
HELD = {"plain": "1+2", "red": "+3", "empty": "none"}


def picture() -> str:
    """Return the SVG."""
    parts = []
    for number, (name, note) in enumerate(zip(COLUMNS, NOTES, strict=True)):
        x = LEFT + number * (COLUMN + GAP)
        parts += [text(x, 36, name, "alarm" if number == 1 else "step"), text(x, 56, note, "quiet")]
        if number:
            parts += right(TOP + 16, x - GAP + 2, x - 2)
    parts += [text(20, TOP + 14, "gradients", "step"), text(20, TOP + 32, "of layers 1 to 5", "quiet")]
    for number, kinds in enumerate(GRADIENTS):
        x, width = LEFT + number * (COLUMN + GAP), COLUMN / LAYERS
        for layer, kind in enumerate(kinds):
            parts += box(x + layer * width, TOP, width - 3, 32, kind)
            held = "in quiet" if kind == "red" else "middle quiet"
            parts.append(_small(x + layer * width + (width - 3) / 2, TOP + 20, HELD[kind], held))
    for row, (name, states) in enumerate(ROWS, start=1):
        y = TOP + row * ROW + 8
        parts.append(_row_name(y, name))
        for number, (kind, words) in enumerate(states):
            parts += box(LEFT + number * (COLUMN + GAP), y, COLUMN - 3, 32, kind, words)
    y = TOP + 4 * ROW + 44
    parts += [
        text(
            20,
            y,
            "A failure in a forward pass is undone in the same way. The costliest micro-batch runs first.",
            "quiet",
        ),
        text(
            20,
            y + 20,
            "Then the window begins again, in smaller micro-batches.",
            "quiet",
        ),
        text(20, y + 40, "Only the optimizer writes parameters, and its memory is reserved before it begins.", "quiet"),
    ]
    return framed(WIDTH, HEIGHT, TITLE, DESCRIPTION, parts)


def _row_name(y: float, name: str) -> str:
    first, _, second = name.partition(", ")
    if not second:
        return text(20, y + 21, first, "step")
    return text(20, y + 13, first, "step") + text(20, y + 30, second, "step")


def _small(x: float, y: float, words: str, kind: str) -> str:
    colour = "var(--on)" if kind.startswith("in") else "var(--text)"
    return f'<text style="font-size: 12px; text-anchor: middle; fill: {colour}" x="{x:g}" y="{y:g}">{words}</text>'
