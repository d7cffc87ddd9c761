"""The report's pictures, as HTML and SVG without a script: they follow the width of the screen, and its light or dark.

Areas and lines are SVG that is stretched; words are HTML around it, so that they are never distorted. A label that does
not fit into what it names wraps to a line that is hidden; it is shown where the pointer rests and in the list below.
Colours were chosen by search: no two look alike to anybody, colour-blind or not (tests/report/test_page.py).
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from autoaccum._memory.limits import format_bytes
from autoaccum._report.records import DOES_NOT_FIT, FITS, TIGHT
from autoaccum._report.wording import OUTSIDE, parts_of, verdicts_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autoaccum._report.records import Measured, Predicted, ReportContents
    from autoaccum._report.wording import Verdict

# Classes of the style.
ANSWERS = {FITS: "fits", TIGHT: "tight", DOES_NOT_FIT: "fails"}
_CLASSES = {OUTSIDE: "k-outside", "peak": "k-outside", "optimizer state": "k-optimizer"}
# Smaller shares of a bar have no room for a label, or are not seen.
_NAMED, _SEEN = 0.05, 0.002
_COLOURS = 8  # of lines, in html_page.css
# Numbers below a picture of sizes, beside 0.
_TICKS = 4


def _figure(title: str, body: str, caption: str, legend: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="{style}"></i>{escape(text)}</li>' for style, text in legend)
    return (
        f'<figure><h2>{escape(title)}</h2>\n{body}\n<ul class="legend">{items}</ul>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def bars(report: ReportContents) -> str:
    """Draw what the plan's step holds in each place, of the memory that it may use there."""
    verdicts = verdicts_of(report)
    # The text of a single one is in the headline.
    texts = [""] if len(verdicts) == 1 else [f" {escape(one.text)}<br>" for one in verdicts]
    drawn = "".join(f"{_name_of(one, text)}{_bar(one.found)}" for one, text in zip(verdicts, texts, strict=True))
    steps = [step for one in verdicts if (step := one.found.footprint) is not None]
    seen = {kind for step in steps for kind, size in parts_of(step).items() if size >= _SEEN * step.reserved_bytes}
    kinds = [kind for kind in parts_of(steps[0]) if kind in seen] if steps else []
    alone = parts_of(steps[0]) if len(verdicts) == len(steps) == 1 else {}
    legend = [(_class(kind), f"{kind} {format_bytes(alone[kind])}" if alone else kind) for kind in kinds]
    legend.append(("k-free", "free"))
    if "<em" in drawn:
        legend.append(("k-limit", "what may be used"))
    caption = (
        "The peak of a step of the plan's largest micro-batch. Each bar has a scale of its own: its whole length is "
        "what may be used there. Activations are what the forward pass keeps for the backward pass."
    )
    return _figure("Where it fits, and what takes the memory", drawn, caption, legend)


def _name_of(verdict: Verdict, text: str) -> str:
    found, room = verdict.found, format_bytes(verdict.found.room_bytes)
    taken = room if found.peak_bytes is None else f"{format_bytes(found.peak_bytes)} of {room}"
    limited = " (the memory limit)" if found.is_limited else ""
    name = f"<b>{escape(found.name)} {escape(verdict.answer)}</b>"
    return f'<p class="name {ANSWERS[verdict.answer]}">{name}{text} {taken}{limited}</p>'


def _bar(found: Measured | Predicted) -> str:
    step, peak = found.footprint, found.peak_bytes
    parts = {"peak": peak or 0} if step is None else parts_of(step)
    shown = {kind: size for kind, size in parts.items() if size > 0}
    whole = sum(shown.values())
    # On the host the model is there before, and is no part of what is limited.
    limit = max(1, found.room_bytes + whole - (whole if peak is None else peak))
    boxes = "".join(_box(kind, size, max(whole, limit)) for kind, size in shown.items())
    tick = f'<em style="left:{limit / whole:.3%}" title="what may be used"></em>' if limit < whole else ""
    return f'<div class="bar">{boxes}{tick}</div>'


def _box(kind: str, size: int, whole: int) -> str:
    """Return a part of a bar, as wide as its share."""
    label = f"<b>{escape(kind)}</b>" if size >= _NAMED * whole else ""
    title = f"{escape(kind)}: {format_bytes(size)}"
    return f'<span class="{_class(kind)}" style="width:{size / whole:.3%}" title="{title}">{label}</span>'


def _class(kind: str) -> str:
    return _CLASSES.get(kind, f"k-{kind}")


def curves(report: ReportContents) -> str:
    """Draw memory over the micro-batch in each place, with its limit and its plan; "" where nothing is known of it."""
    places = [place for place in report.places if place.curve]
    if not places:
        return ""
    # What lies far above the plans and the limits would flatten the rest; lines end at the edge.
    most = max(min(place.curve[-1][0], 2 * max(1, place.micro_batch)) for place in places)
    highest = max(place.peak_bytes or place.curve[-1][1] for place in places)
    top = int(max([highest, *(place.room_bytes for place in places if place.room_bytes <= 3 * highest)]) * 1.05) or 1
    shapes, marks, legend = [], [], []
    lines = []
    for number, place in enumerate(places):
        style = f"c{number % _COLOURS}"
        dashed = " dashed" if place.is_predicted else ""
        # Up to what fits: those of like devices lie on each other, and the shortest comes last.
        curve = [point for point in place.curve if point[0] <= max(place.micro_batch, place.curve[0][0])]
        line = f'<polyline class="{style}{dashed}" points="{_points(curve, most, top)}"/>'
        lines.append((-curve[-1][0], line))
        room = f"may use {format_bytes(place.room_bytes)}"
        if place.room_bytes <= top:
            ends = [(0, place.room_bytes), (most, place.room_bytes)]
            shapes.append(f'<polyline class="{style} limit" points="{_points(ends, most, top)}"/>')
        caption = f"{place.name}, {'predicted' if place.is_predicted else 'measured'}: {room}"
        if place.plan is not None and (peak := place.peak_bytes) is not None:
            size = place.plan.micro_batch
            point = f"left:{min(1.0, size / most):.2%};bottom:{peak / top:.2%}"
            caption += f"; the plan's {size} take {format_bytes(peak)}"
            marks.append(f'<i class="{style}" style="{point}" title="{escape(caption)}"></i>')
        legend.append((style, caption))
    shapes += [line for _, line in sorted(lines)]
    sizes = sorted({most * tick // _TICKS for tick in range(_TICKS + 1)})
    ticks = "".join(f'<b style="left:{size / most:.2%}">{size}</b>' for size in sizes)
    scale = f"<small>{format_bytes(top)}</small>"
    caption = (
        "From left to right, samples in a micro-batch, as far as they fit. Dots are the plans; dotted lines, what may "
        "be used; dashed lines, predictions."
    )
    body = f'<div class="plot">{_svg(shapes)}{"".join(marks)}{scale}{ticks}</div>'
    return _figure("Memory over the micro-batch", body, caption, legend)


def _points(points: Iterable[tuple[float, float]], width: float, height: float) -> str:
    """Return points of a drawing of 1000 x 1000 whose origin is at the bottom left."""
    return " ".join(f"{1000 * x / width:.1f},{1000 - 1000 * y / height:.1f}" for x, y in points)


def _svg(shapes: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>'
