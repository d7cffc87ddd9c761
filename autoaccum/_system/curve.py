"""Draws the curve of a training, such as its loss by step, as a chart of Altair."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import altair as alt

from autoaccum._system.drawing import LIGHT, Drawing, clean, drawn, said

if TYPE_CHECKING:
    from collections.abc import Sequence

# In pixels.
_WIDTH, _HEIGHT = 620, 220
# More points than that are not seen apart.
_MOST_POINTS = 600
# Points are marked, with their numbers for the pointer, where there are few.
_FEW = 60


def curve_of(name: str, points: Sequence[tuple[float, float]], of_x: str) -> Drawing | None:
    """Draw a curve through points, in the order of x; None if fewer than two of them are finite.

    Args:
        name: What the curve shows.
        points: Its points.
        of_x: What the horizontal axis shows.
    """
    finite = [point for point in points if all(map(math.isfinite, point))]
    if len(finite) < 2:  # noqa: PLR2004 - the ends of a line
        return None
    shown = _fewer(finite)
    rows = [{"x": x, "y": y, "told": said(f"{of_x} {x:g}: {name} {y:.4g}")} for x, y in shown]
    data = alt.Data(values=rows)  # type: ignore[no-untyped-call]
    x = alt.X("x:Q", title=clean(of_x), scale=alt.Scale(domain=[shown[0][0], shown[-1][0]], nice=False, zero=False))
    y = alt.Y("y:Q", title=clean(name), scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    if all(float(at).is_integer() for at, _ in shown):
        x = x.axis(tickMinStep=1, format="d")
    marks = alt.Chart(data).mark_point(
        color=LIGHT["line0"], fill=LIGHT["ground"], size=40, opacity=1 if len(shown) <= _FEW else 0
    )
    chart = alt.layer(
        alt.Chart(data).mark_line(color=LIGHT["line0"], strokeWidth=2).encode(x, y),
        marks.encode(x, y, description="told:N"),
    )
    (first, begin), (last, end) = shown[0], shown[-1]
    return drawn(
        chart.properties(width=_WIDTH, height=_HEIGHT),
        f"{name[0].upper()}{name[1:]} by {of_x}",
        ""
        if len(shown) == len(finite)
        else f"Each point is the mean of {math.ceil(len(finite) / len(shown))} neighbours.",
        f"{name} by {of_x}: {begin:.4g} at {first:g}, {end:.4g} at {last:g}.",
    )


def _fewer(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the means of neighbours that would be drawn at one place."""
    each = math.ceil(len(points) / _MOST_POINTS)
    groups = [points[at : at + each] for at in range(0, len(points), each)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
