"""The report's pictures as charts of Altair.

Where it fits, what takes the memory of a step (by kind, by module, over the step), and memory over the micro-batch.
Every mark has a text for the pointer, and says by a label or its form what its colour says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import altair as alt

from autoaccum._estimate.moments import KINDS
from autoaccum._memory.limits import format_bytes
from autoaccum._report.curves import apart, picture_of, some_of, unit_of
from autoaccum._report.drawing import KIND_COLOURS, LIGHT, LINES, ON_KIND, clean, drawn, said
from autoaccum._report.module_tree import cells_of
from autoaccum._report.records import DOES_NOT_FIT, FITS, TIGHT
from autoaccum._report.wording import format_seconds, places_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from autoaccum._estimate.moments import Moment, StepMemory
    from autoaccum._report.curves import Line, Picture
    from autoaccum._report.drawing import Drawing
    from autoaccum._report.records import Findings
    from autoaccum._report.wording import Place

# In pixels.
_WIDTH, _ROW, _HEIGHT, _LINE = 620, 46, 300, 16
# Of bars beside names and behind them.
_BAR = 480
_TREE_HEIGHT, _SMALL = 440, 11
_LETTER = 6.5
# Of a bar: less is named nowhere but in the legend, and where the pointer rests.
_SHOWS = 0.01
# Bars end there: what takes more of a device's memory is not shown to scale.
_MOST_USED = 1.5
_NAMES = alt.Axis(ticks=False, domain=False, grid=False, labelColor=LIGHT["text"], labelPadding=8)
_UNUSED = "reserved, unused"
# Of a picture's width: what is named on its right begins before there.
_FROM_THE_LEFT = 0.8
# Words that may cover a line.
_HALO: dict[str, Any] = {"stroke": LIGHT["ground"], "strokeWidth": 3}
_ANSWERS = {FITS: "good", TIGHT: "care", DOES_NOT_FIT: "bad"}


def charts_of(report: Findings) -> Iterator[Drawing]:
    """Yield all pictures that there is something to show in, in reading order."""
    places = places_of(report)
    yield _fitting(places)
    if held := [(place, kinds) for place in places if (kinds := _kinds(place))]:
        yield _by_kind(held)
    if (traced := next((place for place in places if place.found.step_memory), None)) is not None:
        step = traced.found.step_memory
        assert step is not None
        yield _by_module(traced, step)
        yield _over_the_step(traced, step)
    yield memory_by_size(report)


def memory_by_size(report: Findings) -> Drawing:
    """Draw memory against micro-batch size: limits, trials, plans and predictions."""
    picture = picture_of(report)
    unit, name = picture.unit
    top = picture.top_bytes * 1.06 / unit
    x = alt.X(
        "size:Q",
        title="samples in a micro-batch",
        scale=_scale(picture.most),
        axis=alt.Axis(tickMinStep=1, tickCount=8),
    )
    y = alt.Y("height:Q", title=f"memory of a step ({name})", scale=_scale(top), axis=alt.Axis(tickCount=6))
    layers: list[Any] = [_names_of_lines(picture)] if len(picture.lines) > 1 else []
    ys = [limit.room_bytes / unit for limit in picture.limits]
    step = top / _HEIGHT * _LINE
    for limit, height, label_at in zip(picture.limits, ys, apart(ys, step), strict=True):
        colour = LIGHT["text"] if limit.line is None else _colour(limit.line)
        rule = {"height": height, "told": said(f"limit of {limit.label}")}
        label = {"size": 0, "height": label_at, "label": clean(f"limit {limit.label}")}
        layers += [
            _chart([rule])
            .mark_rule(color=colour, strokeDash=[2, 3], strokeWidth=1.5)
            .encode(y=y, description="told:N"),
            _words([label], colour, dx=4, dy=-2, baseline="bottom", **_HALO).encode(x, y),
        ]
    for number, line in enumerate(picture.lines):
        layers += _line(number, line, picture, x, y)
    kinds = "Solid lines are measured, dashed ones predicted" if report.measured and report.predicted else ""
    signs = "diamonds are the plans, crosses sizes that did not fit, dotted lines the limits"
    names = "; ".join(line.label for line in picture.lines)
    return drawn(
        alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT),
        "Memory over the micro-batch",
        f"{kinds}; {signs}." if kinds else f"{signs[0].upper()}{signs[1:]}.",
        f"Memory of a step against micro-batch size: {names}. Limits: "
        f"{'; '.join(limit.label for limit in picture.limits) or 'beyond the picture'}.",
    )


def _names_of_lines(picture: Picture) -> Any:
    """Return a layer that draws nothing but the legend."""
    names = [clean(line.label) for line in picture.lines]
    dashes = [_dash(line) for line in picture.lines]
    colours = [_colour(number) for number in range(len(names))]
    rows = [{"name": name, "size": 0, "height": 0} for name in names]
    legend = alt.Legend(columns=1, symbolType="stroke", symbolSize=500, symbolStrokeWidth=2)
    return _chart(rows).mark_line().encode(
        alt.X("size:Q"), alt.Y("height:Q"),
        color=alt.Color("name:N", title=None, legend=legend, scale=alt.Scale(domain=names, range=colours)),
        strokeDash=alt.StrokeDash("name:N", title=None, legend=legend, scale=alt.Scale(domain=names, range=dashes)),
    )  # fmt: skip


def _dash(line: Line) -> list[int]:
    return [1, 0] if line.first.is_measured else [6, 4]


def _line(number: int, line: Line, picture: Picture, x: alt.X, y: alt.Y) -> Iterator[Any]:
    unit, _ = picture.unit
    curve, colour = line.first, _colour(number)

    def at(size: float, height: float, told: str) -> dict[str, Any]:
        return {"size": size, "height": min(height, picture.top_bytes) / unit, "told": said(told)}

    yield (
        _chart([at(*point, line.label) for point in curve.line])
        .mark_line(color=colour, strokeWidth=2, strokeDash=_dash(line))
        .encode(x, y, description="told:N")
    )
    points = [at(size, height, f"{size} samples: {format_bytes(height)}") for size, height in curve.fitted]
    fill = colour if curve.is_measured else LIGHT["ground"]
    yield _chart(points).mark_point(
        color=colour, fill=fill, size=45, strokeWidth=1.5, opacity=1
    ).encode(x, y, description="told:N")  # fmt: skip
    failed = [at(size, curve.room_bytes, f"{size} samples do not fit") for size in curve.failed]
    yield _chart(failed).mark_point(
        shape="M-1,-1L1,1M1,-1L-1,1", color=colour, size=80, strokeWidth=2, opacity=1
    ).encode(x, y, description="told:N")  # fmt: skip
    plans = [
        at(size, held, f"{', '.join(names)}: the plan, {size} at once: {format_bytes(held)}")
        | {"label": clean(f"plan {size}" + (f", {some_of(names, 1)}" if len(picture.curves) > 1 else ""))}
        for names, (size, held) in line.plans
    ]
    yield _chart(plans).mark_point(
        shape="diamond", color=colour, size=260 if curve.is_measured else 170, strokeWidth=2, opacity=1
    ).encode(x, y, description="told:N")  # fmt: skip
    # Lines rise, so there is room below them on the right, and above them on the left.
    low = [plan for plan in plans if plan["size"] <= picture.most * _FROM_THE_LEFT]
    high = [plan for plan in plans if plan not in low]
    yield _words(low, colour, dx=10, dy=12, **_HALO).encode(x, y)
    yield _words(high, colour, align="right", dx=-10, dy=-10, **_HALO).encode(x, y)


def _fitting(places: Sequence[Place]) -> Drawing:
    """Draw the places side by side: the verdict, the share of the memory that the plan takes, and what is left."""
    rows = _rows(places)
    bars: list[dict[str, Any]] = []
    words: list[dict[str, Any]] = []
    for place, row in zip(places, rows, strict=True):
        found = place.found
        answer, colour = place.verdict.answer, _ANSWERS[place.verdict.answer]
        peak, told = found.peak_bytes, f"{place.name}: {place.verdict.text}"
        share = 0.0 if peak is None else peak / max(1, place.room_bytes)
        if peak is not None:
            bars.append({
                "place": row, "share": min(share, _MOST_USED), "colour": LIGHT[colour],
                "told": said(f"{told}. A step takes {format_bytes(peak)} of {format_bytes(place.room_bytes)}"),
            })  # fmt: skip
        words.append({"place": row, "label": clean(f"{answer}: {_told(place)}"), "colour": LIGHT[colour], "share": 0})
    most = max([1.0, *(bar["share"] for bar in bars)])
    x = alt.X(
        "share:Q",
        title="share of the memory a step may use",
        scale=_scale(most),
        axis=alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 1]),
    )
    y = alt.Y("place:N", title=None, sort=None, axis=_NAMES)
    colours = alt.Color("colour:N", scale=None)
    whole = [{"place": row, "share": 1, "told": said(f"limit {format_bytes(place.room_bytes)}")}
             for row, place in zip(rows, places, strict=True)]  # fmt: skip
    chart = alt.layer(
        _chart(whole).mark_bar(color=LIGHT["band"], stroke=LIGHT["quiet"], height=14, yOffset=9)
        .encode(x, y, description="told:N"),
        _chart(bars).mark_bar(height=14, yOffset=9).encode(x, y, color=colours, description="told:N"),
        _chart([{"share": 1}]).mark_rule(color=LIGHT["text"], strokeWidth=2).encode(x="share:Q"),
        _words(words, LIGHT["text"], dy=-9, fontWeight=600).encode(x, y, color=colours),
    )  # fmt: skip
    return drawn(
        chart.properties(width=_BAR, height=_ROW * len(places)),
        "Where it fits",
        "Bars are the largest micro-batch of the plan, against all memory that a step may use there (100%).",
        " ".join(f"{place.name} {place.verdict.answer}: {_told(place)}." for place in places),
    )


def _told(place: Place) -> str:
    found = place.found
    if found.plan is None:
        peak = found.peak_bytes
        lacking = 0 if peak is None else peak - place.room_bytes
        return f"not even the smallest micro-batch{f', {format_bytes(lacking)} too little' if lacking > 0 else ''}"
    left = found.headroom_bytes
    parts = [_cut(found.plan.micro_batches), "" if left is None else f"{format_bytes(left)} left"]
    if (pace := place.pace) is not None:
        parts.append(f"{format_seconds(pace.update_s)} an update")
    return ", ".join(filter(None, parts))


def _cut(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return f"{sizes[0]} at once"
    return f"{sum(sizes)} in {len(sizes)} micro-batches of {sizes[0]}{'' if sizes[-1] == sizes[0] else ' or fewer'}"


def _kinds(place: Place) -> dict[str, int]:
    """Return what the step of the plan holds at its peak, by kind: as traced, or else as counted by part."""
    found = place.found
    footprint = found.footprint
    if found.step_memory is not None:
        held = dict(found.step_memory.at_peak.bytes_by_kind)
    elif footprint is not None:
        held = {kind: getattr(footprint, f"{kind}_bytes", 0) for kind in KINDS}
    else:
        return {}
    # The host's allocator is not known: what a process has there beside tensors is much else.
    if footprint is not None and place.is_card:
        held[_UNUSED] = max(0, footprint.reserved_bytes - sum(held.values()))
    return {kind: size for kind, size in held.items() if size}


def _by_kind(held: Sequence[tuple[Place, Mapping[str, int]]]) -> Drawing:
    rows = _rows([place for place, _ in held])
    unit, unit_name = unit_of(max(sum(kinds.values()) for _, kinds in held))
    top = max(sum(kinds.values()) for _, kinds in held) / unit
    boxes: list[dict[str, Any]] = []
    words: list[dict[str, Any]] = []
    totals: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for row, (place, kinds) in zip(rows, held, strict=True):
        start, whole, further = 0, sum(kinds.values()), []
        for kind in KIND_COLOURS:
            if not (size := kinds.get(kind, 0)):
                continue
            told = f"{place.name}: {kind} {format_bytes(size)}, {size / whole:.0%}"
            box = {"place": row, "start": start / unit, "end": (start + size) / unit, "kind": kind, "told": said(told)}
            boxes.append(box)
            wide = size / unit / top * (_BAR)
            label = next((text for text in (f"{kind} {format_bytes(size)}", kind) if len(text) * _LETTER < wide), "")
            words.append({"place": row, "middle": (start + size / 2) / unit, "label": label, "colour": ON_KIND[kind]})
            if format_bytes(size) not in label and size >= whole * _SHOWS:
                further.append(f"{kind} {format_bytes(size)}")
            start += size
        rest.append({"place": row, "middle": 0, "label": " · ".join(further)})
        totals.append({"place": row, "middle": start / unit, "label": f"{format_bytes(start)}"})
    y = alt.Y("place:N", title=None, sort=None, axis=_NAMES)
    x = alt.X("start:Q", title=f"held at the peak of a step ({unit_name})", scale=_scale(top))
    chart = alt.layer(
        _words(rest, LIGHT["quiet"], dy=14, **_HALO).encode(alt.X("middle:Q"), y),
        _chart(boxes)
        .mark_bar(stroke=LIGHT["ground"], strokeWidth=1, height=24, yOffset=-7)
        .encode(x, y, x2="end:Q", color=_colour_of_kinds({box["kind"] for box in boxes}), description="told:N"),
        _words(words, LIGHT["text"], align="center", dy=-7).encode(
            alt.X("middle:Q"), y, color=alt.Color("colour:N", scale=None)
        ),
        _words(totals, LIGHT["text"], dx=6, dy=-7, fontWeight=600).encode(alt.X("middle:Q"), y),
    )
    described = "; ".join(
        f"{place.name}: " + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds.items())
        for place, kinds in held
    )
    return drawn(
        chart.properties(width=_BAR, height=_ROW * len(held)),
        "What takes the memory, by kind",
        "The peak of a step of the plan's largest micro-batch. Activations are what the forward pass keeps for the "
        "backward pass.",
        f"{described}.",
    )


def _by_module(place: Place, step: StepMemory) -> Drawing:
    """Draw the tree of modules as an icicle: each beside the one that it is inside, as high as what it holds."""
    cells = cells_of(step.modules)
    whole = max(1, sum(cell.held_bytes for cell in cells if cell.level == 0))
    levels = max((cell.level for cell in cells), default=0) + 1
    wide = _WIDTH / levels
    boxes: list[dict[str, Any]] = []
    words: list[dict[str, Any]] = []
    for cell in cells:
        start, size = cell.start / whole, cell.held_bytes / whole
        by_kind = ", ".join(f"{kind} {format_bytes(held)}" for kind, held in cell.bytes_by_kind.items())
        told = f"{cell.path}: {format_bytes(cell.held_bytes)}, {size:.0%} ({by_kind})"
        where = {"left": cell.level, "right": cell.level + 1, "low": start, "high": start + size}
        boxes.append(where | {"kind": cell.main_kind, "told": said(told)})
        if size * _TREE_HEIGHT >= _SMALL:
            words.append({
                "left": cell.level, "low": start + size / 2, "colour": ON_KIND[cell.main_kind],
                "label": clean(f"{cell.label}: {format_bytes(cell.held_bytes)}"),
            })  # fmt: skip
    x = alt.X("left:Q", axis=None, scale=_scale(levels))
    y = alt.Y("low:Q", axis=None, scale=alt.Scale(domain=[1, 0], nice=False))
    chart = alt.layer(
        _chart(boxes)
        .mark_rect(stroke=LIGHT["ground"], strokeWidth=1)
        .encode(
            x, y, x2="right:Q", y2="high:Q", color=_colour_of_kinds({box["kind"] for box in boxes}),
            description="told:N",
        ),
        _words(words, LIGHT["text"], dx=5, limit=wide - 10, fontSize=11).encode(
            x, y, color=alt.Color("colour:N", scale=None)
        ),
    )  # fmt: skip
    top = sorted(cells, key=lambda cell: -cell.held_bytes)[:12]
    return drawn(
        chart.properties(width=_WIDTH, height=_TREE_HEIGHT),
        f"What takes the memory, by module: {_one(place, step)}",
        "From left to right, modules and the modules inside them. A module's height is what it holds at the peak, its "
        "colour what most of that is.",
        "; ".join(f"{cell.path}: {format_bytes(cell.held_bytes)}" for cell in top) + ".",
    )


def _over_the_step(place: Place, step: StepMemory) -> Drawing:
    moments = step.moments
    peak = step.at_peak
    unit, unit_name = unit_of(peak.held_bytes)
    kinds = [kind for kind in KINDS if any(kind in one.bytes_by_kind for one in moments)]
    top, last = peak.held_bytes / unit * 1.18, max(1, moments[-1].event)
    areas = [
        {"event": one.event, "held": one.bytes_by_kind.get(kind, 0) / unit, "kind": kind, "order": order}
        for one in moments
        for order, kind in enumerate(kinds)
    ]
    ends = [*(one.event for one in moments[1:]), last]
    pointed = [
        {"event": one.event, "end": end, "held": top, "zero": 0, "told": said(_moment(one))}
        for one, end in zip(moments, ends, strict=True)
    ]
    x = alt.X(
        "event:Q", title="the step, one allocation or free after the other", scale=_scale(last),
        axis=alt.Axis(labels=False, ticks=False, grid=False),
    )  # fmt: skip
    y = alt.Y("held:Q", title=f"held by tensors ({unit_name})", scale=_scale(top))
    spans = _spans(moments, last)
    right = peak.event < last / 2
    labels = list(_labels(moments, kinds, unit, top, last))
    chart = alt.layer(
        _chart(areas)
        .mark_area(interpolate="step-after", stroke=LIGHT["ground"], strokeWidth=0.5)
        .encode(x, y.stack("zero"), color=_colour_of_kinds(set(kinds)), order="order:O"),
        _chart([{"event": start} for start, _, _ in spans[1:]])
        .mark_rule(color=LIGHT["quiet"], strokeDash=[4, 3])
        .encode(x),
        _words(
            [{"event": (start + end) / 2, "held": top, "label": name} for start, end, name in spans],
            LIGHT["quiet"], align="center", baseline="top", **_HALO,
        ).encode(x, y),
        _words([label for label in labels if not label["side"]], LIGHT["text"], align="center").encode(
            x, y, color=alt.Color("colour:N", scale=None)
        ),
        *(
            _words([label for label in labels if label["side"] == side], LIGHT["text"], dx=4 * dx, align=side, **_HALO)
            .encode(x, y)
            for side, dx in (("left", 1), ("right", -1))
        ),
        _chart([{"event": peak.event}]).mark_rule(color=LIGHT["text"], strokeWidth=1.5).encode(x),
        _chart([{"event": peak.event, "held": peak.held_bytes / unit}])
        .mark_point(color=LIGHT["text"], fill=LIGHT["ground"], size=70, strokeWidth=2, opacity=1)
        .encode(x, y),
        _words(
            [{"event": peak.event, "held": peak.held_bytes / unit, "label": f"peak {format_bytes(peak.held_bytes)}"}],
            LIGHT["text"], align="left" if right else "right", dx=8 if right else -8, dy=-10, fontWeight=600, **_HALO,
        ).encode(x, y),
        _chart(pointed)
        .mark_rect(fill=LIGHT["ground"], fillOpacity=0, strokeOpacity=0)
        .encode(x, alt.Y("zero:Q"), x2="end:Q", y2="held:Q", description="told:N"),
    )  # fmt: skip
    return drawn(
        chart.properties(width=_WIDTH, height=_HEIGHT),
        f"The memory of one step, over the step: {_one(place, step)}",
        "What is alive at the peak is listed below.",
        f"Memory of tensors during the forward pass, the backward pass and the optimizer's step. The peak is "
        f"{_moment(peak)}.",
    )


def _moment(one: Moment) -> str:
    held = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in one.bytes_by_kind.items())
    return f"{format_bytes(one.held_bytes)} in {_phase(one.phase)}: {held}"


def _phase(phase: str) -> str:
    return "forward" if phase == "before" else phase


def _spans(moments: Sequence[Moment], last: int) -> list[tuple[int, int, str]]:
    """Return where each phase begins and ends, and its name."""
    starts: list[tuple[int, str]] = []
    for one in moments:
        name = _phase(one.phase)
        if not starts or starts[-1][1] != name:
            starts.append((one.event, name))
    ends = [*(start for start, _ in starts[1:]), last]
    spans = [(start, end, name) for (start, name), end in zip(starts, ends, strict=True)]
    return [
        (start, end, name if (end - start) / last * _WIDTH > len(name) * _LETTER else "") for start, end, name in spans
    ]


def _labels(
    moments: Sequence[Moment], kinds: Sequence[str], unit: int, top: float, last: int
) -> Iterator[dict[str, Any]]:
    """Yield each kind's name where it is thickest: in it, or else beside it, away from the peak."""
    peak = max(moments, key=lambda one: one.held_bytes).event
    thin = _LINE / _HEIGHT * top * unit
    for kind in kinds:
        held = [one.bytes_by_kind.get(kind, 0) for one in moments]
        if max(held) < thin:
            continue
        least = max(thin, max(held) / 2)
        runs: list[list[int]] = [[]]
        for index, size in enumerate(held):
            # The rule at the peak would go through a name.
            if size < least or moments[index].event == peak:
                runs.append([])
            else:
                runs[-1].append(index)
        widest = max(runs, key=lambda run: moments[run[-1]].event - moments[run[0]].event if run else -1)
        start, end = (moments[widest[0]].event, moments[widest[-1]].event) if widest else (peak, peak)
        if (end - start) / last * _WIDTH < len(kind) * _LETTER + 8:
            index = max(range(len(held)), key=held.__getitem__)
            at, side = moments[index], "right" if moments[index].event < peak else "left"
            ends = at.event if side == "right" else moments[min(index + 1, len(moments) - 1)].event
        else:
            at = min((moments[index] for index in widest), key=lambda one: abs(one.event - (start + end) / 2))
            ends, side = at.event, ""
        below = sum(at.bytes_by_kind.get(other, 0) for other in kinds[: kinds.index(kind)])
        middle = (below + at.bytes_by_kind[kind] / 2) / unit
        yield {"event": ends, "held": middle, "label": kind, "colour": ON_KIND[kind], "side": side}


def _one(place: Place, step: StepMemory) -> str:
    return f"{place.name}, {step.size} sample{'' if step.size == 1 else 's'}"


def _rows(places: Sequence[Place]) -> list[str]:
    """Return a name for each place that no other has."""
    names = [clean(place.name) for place in places]
    return [name if name not in names[:at] else f"{name} ({at + 1})" for at, name in enumerate(names)]


def _colour(number: int) -> str:
    return LIGHT[f"line{number % LINES}"]


def _colour_of_kinds(kinds: set[str]) -> alt.Color:
    names = [kind for kind in KIND_COLOURS if kind in kinds]
    scale = alt.Scale(domain=names, range=[KIND_COLOURS[kind] for kind in names])
    return alt.Color("kind:N", title=None, scale=scale, sort=None, legend=alt.Legend(columns=5))


def _chart(values: list[dict[str, Any]]) -> alt.Chart:
    return alt.Chart(alt.Data(values=values))  # type: ignore[no-untyped-call]


def _words(values: list[dict[str, Any]], colour: str, **mark: Any) -> Any:
    return _chart(values).mark_text(**{"align": "left", "color": colour} | mark).encode(text="label:N")


def _scale(most: float) -> alt.Scale:
    return alt.Scale(domain=[0, most], nice=False, zero=True)
