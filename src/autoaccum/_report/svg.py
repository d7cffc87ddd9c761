"""The picture of a report as SVG that stands in a page: memory over the micro-batch, drawn without any library.

Colours are CSS variables of the page (`--c0` to `--c5`, `--ink`, `--faint`), so that it is light or dark as that is.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from autoaccum._memory.limits import format_bytes
from autoaccum._report.curves import apart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._report.curves import Line, Picture

COLOURS = 6
_WIDTH, _HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 24, 44
# About so many lines across, at round numbers.
_TICKS = 5
# From one line of text to the next, in the picture's own units.
_LINE = 15


def svg_of(picture: Picture) -> str:
    """Return the picture as an `svg` element."""
    return "\n".join(_elements(picture))


def _elements(picture: Picture) -> Iterator[str]:
    names = "; ".join(line.label for line in picture.lines)
    yield (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Memory of a step over the micro-batch: '
        f'{escape(names)}">'
    )
    yield from _axes(picture)
    yield from _limits(picture)
    for index, line in enumerate(picture.lines):
        yield f'<g style="--c: var(--c{index % COLOURS})">'
        yield from _line(line, picture)
        yield "</g>"
    yield "</svg>"


def _axes(picture: Picture) -> Iterator[str]:
    unit, name = picture.unit
    for value in ticks(picture.top_bytes / unit):
        y = _y(value * unit, picture)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for size in ticks(picture.most, whole=True):
        yield (
            f'<text class="tick" x="{_x(size, picture)}" y="{_HEIGHT - _BOTTOM + 18}" '
            f'text-anchor="middle">{size:g}</text>'
        )
    labels = ((_WIDTH - _RIGHT, _HEIGHT - 6, "samples in a micro-batch"), (_LEFT - 8, _TOP - 4, name))
    for x, y, text in labels:
        yield f'<text class="axis" x="{x}" y="{y}" text-anchor="end">{text}</text>'


def _limits(picture: Picture) -> Iterator[str]:
    ys = [_y(limit.room_bytes, picture) for limit in picture.limits]
    bottom = _HEIGHT - _BOTTOM
    colours = ["--ink" if limit.line is None else f"--c{limit.line % COLOURS}" for limit in picture.limits]
    for y, colour in zip(ys, colours, strict=True):
        line = f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<g style="--c: var({colour})">{line}</g>'
    # After all lines: a label that makes room for another may stand on one.
    heights = apart([bottom - y for y in ys], _LINE)
    for limit, height, colour in zip(picture.limits, heights, colours, strict=True):
        text = f'<text class="room" x="{_LEFT + 6}" y="{bottom - height - 5:.1f}">{escape(limit.label)}</text>'
        yield f'<g style="--c: var({colour})">{text}</g>'


def _line(line: Line, picture: Picture) -> Iterator[str]:
    curve = line.first
    points = " ".join(f"{_x(size, picture)},{_y(height, picture)}" for size, height in curve.line)
    yield f'<polyline class="{"measured" if curve.is_measured else "predicted"}" points="{points}"/>'
    for size, height in curve.fitted:
        told = f"{size} samples: {format_bytes(height)}"
        yield (
            f'<circle class="{"tried" if curve.is_measured else "gone"}" cx="{_x(size, picture)}" '
            f'cy="{_y(height, picture)}" r="4"><title>{told}</title></circle>'
        )
    for size in curve.failed:
        x, y = _x(size, picture), _y(curve.room_bytes, picture)
        yield f'<path class="failed" d="M{x - 5} {y - 5}l10 10m0 -10l-10 10"><title>{size} do not fit</title></path>'
    # A measured plan goes around one that is predicted at the same place.
    half = 12 if curve.is_measured else 8
    for name, (size, height) in line.plans:
        path = f"M{_x(size, picture)} {_y(height, picture) - half}l{half} {half}l-{half} {half}l-{half} -{half}z"
        yield f'<path class="plan" d="{path}"><title>{escape(name)}</title></path>'


def ticks(top: float, *, whole: bool = False) -> Sequence[float]:
    """Return about five round numbers from 0 up to `top`."""
    rough = top / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    if whole:
        step = max(1.0, round(step))
    return [index * step for index in range(int(top / step) + 1)]


def _x(size: float, picture: Picture) -> float:
    return round(_LEFT + size / picture.most * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(height: float, picture: Picture) -> float:
    plane = _HEIGHT - _TOP - _BOTTOM
    # What lies beyond what is shown is drawn at the edge, not outside.
    return round(_HEIGHT - _BOTTOM - min(1.0, height / (picture.top_bytes * 1.06)) * plane, 1)
