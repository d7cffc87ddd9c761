"""The report's pictures, as HTML and SVG without a script: they follow the width of the screen, and its light or dark.

Areas and lines are SVG that is stretched; words are HTML around it, so that they are never distorted. A label that does
not fit into what it names wraps to a line that is hidden; it is shown where the pointer rests and in the list below.
Colours were chosen by search: no two look alike to anybody, colour-blind or not (tests/report/test_page.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from html import escape
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from autoaccum._arguments import counted
from autoaccum._estimate.footprint import KINDS
from autoaccum._estimate.owners import LOSS, MODEL
from autoaccum._memory.limits import format_bytes
from autoaccum._report.records import DOES_NOT_FIT, FITS, TIGHT
from autoaccum._report.wording import OUTSIDE, parts_of, verdicts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from autoaccum._estimate.footprint import Footprint, ModuleMemory
    from autoaccum._report.records import Measured, Predicted, ReportContents
    from autoaccum._report.wording import Verdict

# Classes of the style.
ANSWERS = {FITS: "fits", TIGHT: "tight", DOES_NOT_FIT: "fails"}
_CLASSES = {OUTSIDE: "k-outside", "peak": "k-outside", "optimizer state": "k-optimizer"}
# Smaller shares have no room for a label: of the width of a bar, and of the height of the tree.
_NAMED, _NAMED_IN_TREE = 0.05, 0.04
# A module that is not drawn by itself holds less than this share; deeper modules count to those around them.
_LEAST, _LEVELS = 0.006, 4
# Of all that is held, from which on a picture by module shows modules by colour, as all are of one kind.
_ONE_KIND = 0.9
_COLOURS = 8  # of modules and of lines, in html_page.css
# Numbers below a picture of sizes, beside 0.
_TICKS = 4


def pictures_of(report: ReportContents) -> Iterator[str]:
    """Yield every picture that there is something to show in, in reading order."""
    yield _bars(verdicts_of(report))
    traced = next(((place, step) for place in report.places if (step := place.footprint) is not None), None)
    if traced is not None:
        place, step = traced
        where = f"{place.name}, {counted(step.size, 'sample')}"
        yield _by_module(step, where)
        yield _over_the_step(step, where)
    if lines := [place for place in report.places if place.curve]:
        yield _over_the_size(lines)


def _figure(title: str, body: str, caption: str, legend: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="{style}"></i>{escape(text)}</li>' for style, text in legend)
    return (
        f'<figure><h2>{escape(title)}</h2>\n{body}\n<ul class="legend">{items}</ul>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _bars(verdicts: Sequence[Verdict]) -> str:
    """Draw what the plan's step holds in each place, of the memory that it may use there."""
    # The text of a single one is in the headline.
    texts = [""] if len(verdicts) == 1 else [f" {escape(one.text)}<br>" for one in verdicts]
    bars = "".join(f"{_name_of(one, text)}{_bar(one.found)}" for one, text in zip(verdicts, texts, strict=True))
    steps = [step for one in verdicts if (step := one.found.footprint) is not None]
    kinds = dict.fromkeys(kind for step in steps for kind, size in parts_of(step).items() if size > 0)
    alone = parts_of(steps[0]) if len(verdicts) == len(steps) == 1 else {}
    legend = [(_class(kind), f"{kind} {format_bytes(alone[kind])}" if alone else kind) for kind in kinds]
    legend.append(("k-free", "free"))
    if "<em" in bars:
        legend.append(("k-limit", "what may be used"))
    caption = (
        "The peak of a step of the plan's largest micro-batch. Each bar has a scale of its own: its whole length is "
        "what may be used there. Activations are what the forward pass keeps for the backward pass."
    )
    return _figure("Where it fits, and what takes the memory", bars, caption, legend)


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


@dataclass
class _Node:
    """A module with all modules inside it."""

    path: str
    held: Counter[str] = field(default_factory=Counter)
    inside: dict[str, _Node] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.held.values())


def _tree_of(modules: Sequence[ModuleMemory]) -> _Node:
    top = _Node("")
    for one in modules:
        parts = one.module.split(".") if one.module else ["outside modules"]
        if one.module and parts[0] not in (LOSS, MODEL):
            parts = [MODEL, *parts]
        node = top
        node.held.update(one.bytes_by_kind)
        for part in parts[: _LEVELS + 1]:
            path = f"{node.path}.{part}" if node.path not in ("", MODEL) else part
            node = node.inside.setdefault(part, _Node(path))
            node.held.update(one.bytes_by_kind)
    return top


def _cells(node: _Node, level: int, start: int, colour: int | None, whole: int) -> Iterator[str]:
    """Yield the modules inside one, each followed by what is inside it; a module's own memory comes last."""
    for number, inside in enumerate(sorted(node.inside.values(), key=lambda one: -one.bytes)):
        shown = inside
        while len(shown.inside) == 1 and (only := next(iter(shown.inside.values()))).held == shown.held:
            shown = only  # a container of one module says nothing of its own
        if shown.bytes < _LEAST * whole:
            continue
        main = max(shown.held, key=lambda kind: shown.held[kind])
        # Where all is of one kind, the modules of the second level have colours.
        own = colour if colour is None or level != 1 else number % _COLOURS
        style = _class(main) if own is None else f"c{own}"
        share = shown.bytes / whole
        by_kind = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in shown.held.items())
        caption = escape(f"{shown.path}: {format_bytes(shown.bytes)}, {share:.0%} ({by_kind})")
        name = escape(shown.path.removeprefix(f"{node.path}.").strip("()"))
        label = f"<b>{name}</b> <b>{format_bytes(shown.bytes)}</b>"
        place = f"left:{level / (_LEVELS + 1):.2%};top:{start / whole:.3%};height:{share:.3%}"
        label = label if share >= _NAMED_IN_TREE else ""
        yield f'<span class="{style}" style="{place}" title="{caption}">{label}</span>'
        yield from _cells(shown, level + 1, start, own, whole)
        start += shown.bytes


def _by_module(step: Footprint, where: str) -> str:
    top = _tree_of(step.modules)
    whole = max(1, top.bytes)
    is_one_kind = max(top.held.values(), default=0) >= _ONE_KIND * whole
    cells = "".join(_cells(top, 0, 0, 0 if is_one_kind else None, whole))
    legend = [] if is_one_kind else [(_class(kind), kind) for kind in KINDS if top.held.get(kind)]
    caption = (
        "From left to right, modules and the modules inside them. A module is as high as what it holds at the peak; "
        f"its colour {'tells it from its neighbours' if is_one_kind else 'is what most of that is'}."
    )
    return _figure(f"What takes the memory, by module: {where}", f'<div class="tree">{cells}</div>', caption, legend)


def _over_the_step(step: Footprint, where: str) -> str:
    points, peak = step.points, max(step.points, key=attrgetter("held_bytes"))
    top, last = max(1, peak.held_bytes), max(1, points[-1].event)
    kinds = [kind for kind in KINDS if any(kind in one.bytes_by_kind for one in points)]
    below = [0] * len(points)
    areas = []
    ends = [*(one.event for one in points[1:]), last]
    for kind in kinds:
        above = [low + one.bytes_by_kind.get(kind, 0) for low, one in zip(below, points, strict=True)]
        # Steps: what is held stays until the next point.
        over = [point for one, end, y in zip(points, ends, above, strict=True) for point in ((one.event, y), (end, y))]
        under = [point for one, end, y in zip(points, ends, below, strict=True) for point in ((one.event, y), (end, y))]
        areas.append(f'<polygon class="{_class(kind)}" points="{_points([*over, *under[::-1]], last, top)}"/>')
        below = above
    starts = {one.phase if one.phase != "before" else "forward": one.event for one in reversed(points)}
    marks = "".join(
        f'<b class="phase" style="left:min({event / last:.2%}, 100% - 4.5rem)">{escape(phase)}</b>'
        for phase, event in sorted(starts.items(), key=itemgetter(1))
    )
    at = peak.event / last
    caption = f"peak {format_bytes(step.peak_bytes)}, in {step.phase}"
    held = step.bytes_by_kind
    legend = [(_class(kind), f"{kind} {format_bytes(held[kind])} at the peak") for kind in kinds]
    body = (
        f'<div class="plot">{_svg(areas)}<em style="left:{at:.2%}"></em>'
        f'<strong style="left:min({at:.2%}, 100% - 13rem)">{escape(caption)}</strong>{marks}</div>'
    )
    caption = "From left to right, one allocation or free after the other."
    return _figure(f"Memory over one step: {where}", body, caption, legend)


def _over_the_size(places: Sequence[Measured | Predicted]) -> str:
    """Draw memory over the micro-batch in each place, with its limit and its plan."""
    # What lies far above the plans and the limits would flatten the rest; lines end at the edge.
    most = max(min(place.curve[-1][0], 2 * max(1, place.micro_batch)) for place in places)
    highest = max(place.peak_bytes or place.curve[-1][1] for place in places)
    top = int(max([highest, *(place.room_bytes for place in places if place.room_bytes <= 3 * highest)]) * 1.05) or 1
    shapes, marks, legend = [], [], []
    for number, place in enumerate(places):
        style = f"c{number % _COLOURS}"
        dashed = " dashed" if place.is_predicted else ""
        shapes.append(f'<polyline class="{style}{dashed}" points="{_points(place.curve, most, top)}"/>')
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
    sizes = sorted({most * tick // _TICKS for tick in range(_TICKS + 1)})
    ticks = "".join(f'<b style="left:{size / most:.2%}">{size}</b>' for size in sizes)
    scale = f"<small>{format_bytes(top)}</small>"
    caption = (
        "From left to right, samples in a micro-batch. Dots are the plans, dotted lines what may be used, dashed lines "
        "predictions."
    )
    body = f'<div class="plot">{_svg(shapes)}{"".join(marks)}{scale}{ticks}</div>'
    return _figure("Memory over the micro-batch", body, caption, legend)


def _points(points: Iterable[tuple[float, float]], width: float, height: float) -> str:
    """Return points of a drawing of 1000 x 1000 whose origin is at the bottom left."""
    return " ".join(f"{1000 * x / width:.1f},{1000 - 1000 * y / height:.1f}" for x, y in points)


def _svg(shapes: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>'
