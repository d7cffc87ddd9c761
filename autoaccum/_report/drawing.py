"""The report's pictures, as HTML and SVG without a script: they follow the width of the screen, and its light or dark.

Areas and lines are SVG that is stretched; words are HTML above it, so that they are never distorted. A label that does
not fit into what it names wraps to a line that is hidden; it is shown where the pointer rests and in the list below.
Colours were chosen by search: no two look alike to anybody, colour-blind or not (tests/report/test_page.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from autoaccum._estimate.step_memory import KINDS
from autoaccum._memory.limits import format_bytes
from autoaccum._report.wording import verdicts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from autoaccum._estimate.step_memory import ModuleMemory, StepMemory
    from autoaccum._report.records import Measured, Predicted, ReportContents
    from autoaccum._report.wording import Verdict

_UNUSED = "reserved, unused"
# A module that is not drawn by itself holds less than this share; deeper modules count to those around them.
_LEAST, _LEVELS = 0.006, 4
_LOSS, _MODEL = "(loss)", "(model)"
# Of all that is held, from which on a picture by module shows modules by colour, as all are of one kind.
_ONE_KIND = 0.9
# Smaller shares have no room for a label: of the width of a bar, and of the height of the tree.
_NAMED_IN_BAR, _NAMED_IN_TREE = 0.05, 0.04
_COLOURS = 8  # of modules and of lines, in html_page.css
_ANSWERS = {"fits": "fits", "tight": "tight", "does not fit": "fails"}


def pictures_of(report: ReportContents) -> Iterator[str]:
    """Yield every picture that there is something to show in, in reading order."""
    places = report.places
    bars = "".join(map(_fitting, verdicts_of(report)))
    yield _figure("Where it fits", bars, "The plan's step, of all memory that it may use.")
    if held := [(place, kinds) for place in places if (kinds := _kinds_of(place))]:
        yield _by_kind(held)
    traced = next(((place, step) for place in places if (step := place.step_memory) is not None), None)
    if traced is not None:
        place, step = traced
        where = f"{place.name}, {step.size} sample{'' if step.size == 1 else 's'}"
        yield _by_module(step, where)
        yield _over_the_step(step, where)
    if lines := [place for place in places if place.curve]:
        yield _over_the_size(lines)


def _figure(title: str, body: str, caption: str, legend: Iterable[tuple[str, str]] = ()) -> str:
    items = "".join(f'<li><i class="{style}"></i>{escape(text)}</li>' for style, text in legend)
    listed = f'<ul class="legend">{items}</ul>' if items else ""
    return f"<figure><h2>{escape(title)}</h2>\n{body}\n{listed}<figcaption>{escape(caption)}</figcaption></figure>"


def _box(style: str, share: float, text: str, caption: str) -> str:
    """Return a part of a bar, as wide as its share."""
    label = escape(text) if share >= _NAMED_IN_BAR else ""
    return f'<span class="{style}" style="width:{share:.3%}" title="{escape(caption)}">{label}</span>'


def _fitting(verdict: Verdict) -> str:
    found, answer = verdict.found, _ANSWERS[verdict.answer]
    peak = found.peak_bytes or 0
    whole = max(peak, found.room_bytes, 1)
    left = found.headroom_bytes
    label = f"{format_bytes(peak)} of {format_bytes(found.room_bytes)}"
    room = "" if left is None else f"{format_bytes(abs(left))} {'left' if left >= 0 else 'too little'}"
    return (
        f'<p class="name {answer}"><b>{escape(verdict.place)} {escape(verdict.answer)}</b> {escape(room)}</p>'
        f'<div class="bar {answer}">{_box("answer", peak / whole, label, f"a step takes {label}")}'
        f'<em style="left:{found.room_bytes / whole:.3%}"></em></div>'
    )


def _kinds_of(place: Measured | Predicted) -> dict[str, int]:
    """Return what the step of the plan holds at its peak, by kind: as traced, or else as counted by part."""
    footprint, step = place.footprint, place.step_memory
    if step is not None:
        held = dict(step.at_peak.bytes_by_kind)
    elif footprint is not None:
        held = {kind: getattr(footprint, f"{kind}_bytes", 0) for kind in KINDS}
    else:
        return {}
    # The host's allocator is not known: what a process has there beside tensors is much else.
    if footprint is not None and place.is_gpu:
        held[_UNUSED] = max(0, footprint.reserved_bytes - sum(held.values()))
    return {kind: size for kind, size in held.items() if size}


def _by_kind(held: Sequence[tuple[Measured | Predicted, Mapping[str, int]]]) -> str:
    most = max(sum(kinds.values()) for _, kinds in held)
    rows = []
    for place, kinds in held:
        whole = sum(kinds.values())
        boxes = "".join(
            _box(_style(kind), size / most, kind.partition(",")[0], f"{kind}: {format_bytes(size)}, {size / whole:.0%}")
            for kind, size in kinds.items()
        )
        rows.append(
            f'<p class="name"><b>{escape(place.name)}</b> {format_bytes(whole)}</p><div class="bar">{boxes}</div>'
        )
    of_first = held[0][1]
    alone = len(held) == 1
    legend = [
        (_style(kind), f"{kind} {format_bytes(of_first[kind])}" if alone else kind)
        for kind in dict.fromkeys(kind for _, kinds in held for kind in kinds)
    ]
    caption = (
        "The peak of a step of the plan's largest micro-batch. Activations are what the forward pass keeps for the "
        "backward pass."
    )
    return _figure("What takes the memory, by kind", "".join(rows), caption, legend)


def _style(kind: str) -> str:
    return f"k-{kind.partition(',')[0]}"


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
        if one.module and parts[0] not in (_LOSS, _MODEL):
            parts = [_MODEL, *parts]
        node = top
        node.held.update(one.bytes_by_kind)
        for part in parts[: _LEVELS + 1]:
            path = f"{node.path}.{part}" if node.path not in ("", _MODEL) else part
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
        style = _style(main) if own is None else f"c{own}"
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


def _by_module(step: StepMemory, where: str) -> str:
    top = _tree_of(step.modules)
    whole = max(1, top.bytes)
    is_one_kind = max(top.held.values(), default=0) >= _ONE_KIND * whole
    cells = "".join(_cells(top, 0, 0, 0 if is_one_kind else None, whole))
    legend = [] if is_one_kind else [(_style(kind), kind) for kind in KINDS if top.held.get(kind)]
    caption = (
        "From left to right, modules and the modules inside them. A module is as high as what it holds at the peak; "
        f"its colour {'tells it from its neighbours' if is_one_kind else 'is what most of that is'}."
    )
    return _figure(f"What takes the memory, by module: {where}", f'<div class="tree">{cells}</div>', caption, legend)


def _over_the_step(step: StepMemory, where: str) -> str:
    points, peak = step.points, step.at_peak
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
        areas.append(f'<polygon class="{_style(kind)}" points="{_points([*over, *under[::-1]], last, top)}"/>')
        below = above
    starts = {one.phase if one.phase != "before" else "forward": one.event for one in reversed(points)}
    marks = "".join(
        f'<b style="left:min({event / last:.2%}, 100% - 4.5rem)">{escape(phase)}</b>'
        for phase, event in sorted(starts.items(), key=_second)
    )
    at = peak.event / last
    caption = f"peak {format_bytes(peak.held_bytes)}, in {peak.phase}"
    legend = [(_style(kind), f"{kind} {format_bytes(peak.bytes_by_kind.get(kind, 0))} at the peak") for kind in kinds]
    body = (
        f'<div class="plot">{_svg("".join(areas))}<em style="left:{at:.2%}"></em>'
        f'<strong style="left:min({at:.2%}, 100% - 13rem)">{escape(caption)}</strong>{marks}</div>'
    )
    caption = "From left to right, one allocation or free after the other. What is alive at the peak is listed below."
    return _figure(f"The memory of one step, over the step: {where}", body, caption, legend)


def _second(pair: tuple[str, int]) -> int:
    return pair[1]


def _over_the_size(places: Sequence[Measured | Predicted]) -> str:
    """Draw memory over the micro-batch in each place, with its limit and its plan."""
    most = max(size for place in places for size, _ in place.curve)
    highest = max(held for place in places for _, held in place.curve)
    # A limit far above everything would flatten the rest.
    shown = [place.room_bytes for place in places if place.room_bytes <= 3 * highest]
    top = int(max([highest, *shown]) * 1.05) or 1
    shapes, marks, legend = [], [], []
    for number, place in enumerate(places):
        style = f"c{number % _COLOURS}"
        dashed = " dashed" if place.is_predicted else ""
        shapes.append(f'<polyline class="{style}{dashed}" points="{_points(place.curve, most, top)}"/>')
        limit = f"limit {format_bytes(place.room_bytes)}"
        if place.room_bytes <= top:
            ends = [(0, place.room_bytes), (most, place.room_bytes)]
            shapes.append(f'<polyline class="{style} limit" points="{_points(ends, most, top)}"/>')
        caption = f"{place.name}, {'predicted' if place.is_predicted else 'measured'}: {limit}"
        if place.plan is not None and (peak := place.peak_bytes) is not None:
            size = place.plan.micro_batch
            point = f"left:{min(1.0, size / most):.2%};bottom:{peak / top:.2%}"
            caption += f"; the plan's {size} take {format_bytes(peak)}"
            marks.append(f'<i class="{style}" style="{point}" title="{escape(caption)}"></i>')
        legend.append((style, caption))
    scale = f'<small class="top">{format_bytes(top)}</small><small class="end">{most} samples</small>'
    caption = "Dotted lines are limits, dots the plans, dashed lines predicted."
    body = f'<div class="plot">{_svg("".join(shapes))}{"".join(marks)}{scale}</div>'
    return _figure("Memory over the micro-batch", body, caption, legend)


def _points(points: Iterable[tuple[float, float]], width: float, height: float) -> str:
    """Return points of a drawing of 1000 x 1000 whose origin is at the bottom left."""
    return " ".join(f"{1000 * x / width:.1f},{1000 - 1000 * y / height:.1f}" for x, y in points)


def _svg(shapes: str) -> str:
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>'
