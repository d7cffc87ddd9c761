"""Lays out the report's picture, memory against micro-batch size, and writes it as SVG without any library.

`drawing_of` places marks and labels. `svg_of` writes them for the page, whose CSS variables (`--c0` to `--c5`, `--ink`,
`--faint`) set light or dark colours. `_report/plotting.py` draws the same marks to files with matplotlib, which
`pip install autoaccum` does not install: the page does not need it, only `Report.plot` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from autoaccum._memory.limits import format_bytes
from autoaccum._report.curves import apart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._report.curves import Line, Picture

COLOURS = 6
# In the picture's own units, with y downwards.
WIDTH, HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 24, 44
# Approximate number of grid lines, at round numbers.
_TICKS = 5
# Height of a line of text.
_LINE = 15


@dataclass(frozen=True, slots=True)
class Mark:
    """A line through points, or a symbol at one.

    Attributes:
        kind: How it is drawn: the lines "grid", "limit", "measured" and "predicted", the symbols "tried" (a dot),
            "gone" (a ring), "failed" (a cross) and "plan" (a diamond).
        points: The coordinates.
        line: The index of the picture's line that sets its colour; None for the text's colour.
        name: Its meaning; empty if its kind says that.
        half: Half of a symbol's width.
    """

    kind: str
    points: tuple[tuple[float, float], ...]
    line: int | None = None
    name: str = ""
    half: float = 4


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text.

    Attributes:
        kind: "tick", "axis" or "room" (a limit's).
        x: The horizontal position.
        y: The baseline.
        text: The text.
        anchor: The part of it that is at `x`: "start", "middle" or "end".
        line: As in `Mark`.
    """

    kind: str
    x: float
    y: float
    text: str
    anchor: str = "end"
    line: int | None = None


def drawing_of(picture: Picture) -> Iterator[Mark | Label]:
    """Lay out the picture; later marks are drawn over earlier ones."""
    yield from _axes(picture)
    yield from _limits(picture)
    for number, line in enumerate(picture.lines):
        yield from _line(number, line, picture)


def svg_of(picture: Picture) -> str:
    """Return the picture as an `svg` element."""
    names = "; ".join(line.label for line in picture.lines)
    label = f"Memory of a step against micro-batch size: {escape(names)}"
    elements = "\n".join(map(_element, drawing_of(picture)))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">\n{elements}\n</svg>'


def ticks(top: float, *, whole: bool = False) -> Sequence[float]:
    """Return about five round numbers from 0 up to `top`."""
    rough = top / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    if whole:
        step = max(1.0, round(step))
    return [index * step for index in range(int(top / step) + 1)]


def _axes(picture: Picture) -> Iterator[Mark | Label]:
    unit, name = picture.unit
    for value in ticks(picture.top_bytes / unit):
        y = _y(value * unit, picture)
        yield Mark("grid", ((_LEFT, y), (WIDTH - _RIGHT, y)))
        yield Label("tick", _LEFT - 8, y + 4, f"{value:g}")
    for size in ticks(picture.most, whole=True):
        yield Label("tick", _x(size, picture), HEIGHT - _BOTTOM + 18, f"{size:g}", "middle")
    yield Label("axis", WIDTH - _RIGHT, HEIGHT - 6, "samples in a micro-batch")
    yield Label("axis", _LEFT - 8, _TOP - 4, name)


def _limits(picture: Picture) -> Iterator[Mark | Label]:
    ys = [_y(limit.room_bytes, picture) for limit in picture.limits]
    for limit, y in zip(picture.limits, ys, strict=True):
        yield Mark("limit", ((_LEFT, y), (WIDTH - _RIGHT, y)), limit.line)
    # After all lines: a label moved to make room for another may cover one.
    bottom = HEIGHT - _BOTTOM
    for limit, height in zip(picture.limits, apart([bottom - y for y in ys], _LINE), strict=True):
        yield Label("room", _LEFT + 6, bottom - height - 5, limit.label, "start", limit.line)


def _line(number: int, line: Line, picture: Picture) -> Iterator[Mark]:
    curve = line.first

    def point(size: float, height: float) -> tuple[float, float]:
        return _x(size, picture), _y(height, picture)

    kind, sign = ("measured", "tried") if curve.is_measured else ("predicted", "gone")
    yield Mark(kind, tuple(point(*one) for one in curve.line), number, line.label)
    for size, height in curve.fitted:
        yield Mark(sign, (point(size, height),), number, f"{size} samples: {format_bytes(height)}")
    for size in curve.failed:
        yield Mark("failed", (point(size, curve.room_bytes),), number, f"{size} do not fit", 5)
    for name, chosen in line.plans:
        # A measured plan is drawn around one predicted at the same place.
        yield Mark("plan", (point(*chosen),), number, name, 12 if curve.is_measured else 8)


def _x(size: float, picture: Picture) -> float:
    return round(_LEFT + size / picture.most * (WIDTH - _LEFT - _RIGHT), 1)


def _y(height: float, picture: Picture) -> float:
    plane = HEIGHT - _TOP - _BOTTOM
    # Points outside the picture are drawn at its edge.
    return round(HEIGHT - _BOTTOM - min(1.0, height / (picture.top_bytes * 1.06)) * plane, 1)


def _element(one: Mark | Label) -> str:
    colour = "--ink" if one.line is None else f"--c{one.line % COLOURS}"
    how = f'class="{one.kind}" style="--c: var({colour})"'
    if isinstance(one, Label):
        return f'<text {how} x="{one.x}" y="{one.y:.1f}" text-anchor="{one.anchor}">{escape(one.text)}</text>'
    if one.kind in ("grid", "limit", "measured", "predicted"):
        tag, where = "polyline", f'points="{" ".join(f"{x},{y}" for x, y in one.points)}"'
    else:
        tag, where = _sign(one)
    return f"<{tag} {how} {where}>{f'<title>{escape(one.name)}</title>' if one.name else ''}</{tag}>"


def _sign(mark: Mark) -> tuple[str, str]:
    ((x, y),), half = mark.points, mark.half
    if mark.kind == "failed":
        return "path", f'd="M{x - half} {y - half}l{2 * half} {2 * half}m0 -{2 * half}l-{2 * half} {2 * half}"'
    if mark.kind == "plan":
        return "path", f'd="M{x} {y - half}l{half} {half}l-{half} {half}l-{half} -{half}z"'
    return "circle", f'cx="{x}" cy="{y}" r="{half}"'
