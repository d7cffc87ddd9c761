"""Makes pages of HTML that need no network, no script and no other file, from plain texts and numbers.

They follow the reader's light or dark setting (`html_page.css`). Every text is escaped here.
"""

from __future__ import annotations

import math
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# In the picture's own units, with y downwards.
_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 24, 44
# Approximate number of grid lines, at round numbers.
_TICKS = 5
# More points than that are not seen apart.
_MOST_POINTS = 600


def document_of(title: str, fragment: str, policy: str = "") -> str:
    """Return a complete document with a fragment of `article_of` as its body, under a content security policy."""
    security = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n' if policy else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{security}<title>{escape(title)}</title>\n</head>\n<body>\n{fragment}\n</body>\n</html>\n"
    )


def article_of(body: str, further_style: str = "") -> str:
    """Return an element with its own style, for notebooks."""
    style = resources.files("autoaccum._system").joinpath("html_page.css").read_text(encoding="utf-8")
    return f'<style>\n{style}{further_style}</style>\n<article class="autoaccum">\n{body}\n</article>'


def header_of(kind: str, title: str) -> str:
    """Return the head of an article."""
    return f'<header><p class="kind">{escape(kind)}</p><h1>{escape(title)}</h1></header>'


def table_of(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return a section with a table, whose columns after the first hold numbers if it has a header."""
    head = "".join(f'<th scope="col"{_number(place)}>{escape(name)}</th>' for place, name in enumerate(header))
    lines = [
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td{_number(1) if header else ''}>{escape(text)}</td>" for text in others)
        + "</tr>"
        for first, *others in rows
    ]
    kind, top = ("columns", f"<thead><tr>{head}</tr></thead>") if header else ("facts", "")
    return (
        f'<section><h2>{escape(title)}</h2><div class="wide"><table class="{kind}">{top}'
        f"<tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def curve_of(name: str, points: Sequence[tuple[float, float]], of_x: str) -> str:
    """Return a figure with a curve through points, in the order of x; empty if fewer than two of them are finite.

    Args:
        name: What the curve shows.
        points: Its points.
        of_x: What the horizontal axis shows.
    """
    finite = [point for point in points if all(map(math.isfinite, point))]
    if len(finite) < 2:  # noqa: PLR2004 - the ends of a line
        return ""
    # Of neighbours that are drawn at one place, the mean.
    each = math.ceil(len(finite) / _MOST_POINTS)
    groups = [finite[at : at + each] for at in range(0, len(finite), each)]
    drawn = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    if len(drawn) < 2:  # noqa: PLR2004
        drawn = finite
    elements = "\n".join(_elements(name, drawn, of_x))
    return (
        f'<figure><div class="wide">\n<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(name)} by '
        f'{escape(of_x)}">\n{elements}\n</svg>\n</div></figure>'
    )


def _number(place: int) -> str:
    return ' class="number"' if place else ""


def _elements(name: str, points: Sequence[tuple[float, float]], of_x: str) -> Iterator[str]:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2

    def left(x: float) -> float:
        return round(_LEFT + (x - xs[0]) / ((xs[-1] - xs[0]) or 1.0) * (_WIDTH - _LEFT - _RIGHT), 1)

    def top(y: float) -> float:
        return round(_HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM), 1)

    for value in _round_numbers(low, high):
        yield f'<polyline class="grid" points="{_LEFT},{top(value)} {_WIDTH - _RIGHT},{top(value)}"></polyline>'
        yield f'<text x="{_LEFT - 8}" y="{top(value) + 4}" text-anchor="end">{value:g}</text>'
    for value in (xs[0], xs[-1]):
        yield f'<text x="{left(value)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{escape(of_x)}</text>'
    yield f'<text x="{_LEFT}" y="{_TOP - 8}">{escape(name)}</text>'
    line = " ".join(f"{left(x)},{top(y)}" for x, y in points)
    yield f'<polyline class="measured" style="--c: var(--c0)" points="{line}"></polyline>'


def _round_numbers(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step)
    return [float(f"{index * step:.12g}") for index in range(first, math.floor(high / step) + 1)]
