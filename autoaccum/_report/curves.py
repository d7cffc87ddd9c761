"""The lines and points of the report's picture, memory against micro-batch size. Nothing here draws.

Micro-batch sizes are in samples, memory is in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from autoaccum._memory.limits import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._report.records import Findings, Measured, Predicted

# Lines extend to this many times the largest size, so that their end is visible.
_BEYOND = 1.15
# A limit above this many times everything else is not shown: it would flatten the rest.
_IN_SIGHT = 3
# Lines closer than this share of the picture's height everywhere are merged, because one would hide the other.
_TOLD_APART = 0.01
# The most places named at a shared limit; more do not fit on one line.
_NAMED = 4
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class Curve:
    """Memory against micro-batch size in one place.

    Attributes:
        name: The place.
        line: Points of (samples, bytes) along the line; may be empty.
        fitted: Points that were tried or traced.
        failed: Sizes that were tried and did not fit.
        room_bytes: The memory a step may use there.
        chosen: The plan's largest micro-batch and its memory; None without a plan.
        is_measured: Whether the points were measured.
    """

    name: str
    line: tuple[tuple[int, int], ...]
    fitted: tuple[tuple[int, int], ...]
    failed: tuple[int, ...]
    room_bytes: int
    chosen: tuple[int, int] | None
    is_measured: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A line as drawn: the curve of one place, or of several that coincide."""

    curves: tuple[Curve, ...]

    @property
    def first(self) -> Curve:
        """The curve that is drawn."""
        return self.curves[0]

    @property
    def label(self) -> str:
        """The places, and whether their line is measured or predicted."""
        names = ", ".join(dict.fromkeys(curve.name for curve in self.curves))
        return f"{names}, {'measured' if self.first.is_measured else 'predicted'}"

    @property
    def plans(self) -> tuple[tuple[tuple[str, ...], tuple[int, int]], ...]:
        """The places and the point of each plan; plans of the same size are merged."""
        same: dict[int, list[Curve]] = {}
        for curve in self.curves:
            if curve.chosen is not None:
                same.setdefault(curve.chosen[0], []).append(curve)
        return tuple(
            (tuple(dict.fromkeys(curve.name for curve in those)), point)
            for those in same.values()
            if (point := those[0].chosen) is not None
        )


@dataclass(frozen=True, slots=True)
class Limit:
    """The memory a step may use, in one place or in several with the same limit.

    Attributes:
        names: The places.
        room_bytes: The limit.
        line: The index of the line it limits; None if it limits several.
    """

    names: tuple[str, ...]
    room_bytes: int
    line: int | None

    @property
    def label(self) -> str:
        """The places and the limit."""
        return f"{some_of(self.names, _NAMED)}: {format_bytes(self.room_bytes)}"


@dataclass(frozen=True, slots=True)
class Picture:
    """All curves and the extent of the axes.

    Attributes:
        curves: One for each place, the measured one first.
        most: The largest size to show.
        top_bytes: The most memory to show.
    """

    curves: tuple[Curve, ...]
    most: int
    top_bytes: int

    @property
    def unit(self) -> tuple[int, str]:
        """The unit of the memory axis: its size in bytes, and its name."""
        return unit_of(self.top_bytes)

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines to draw, in the order of their first curves."""
        lines: list[list[Curve]] = []
        for curve in self.curves:
            near = (line for line in lines if _hide(line[0], curve, self.top_bytes * _TOLD_APART))
            if (line := next(near, None)) is None:
                lines.append([curve])
            else:
                line.append(curve)
        return tuple(Line(tuple(line)) for line in lines)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits to show, highest first; those with the same text are merged."""
        line_of = {id(curve): number for number, line in enumerate(self.lines) for curve in line.curves}
        same: dict[str, list[Curve]] = {}
        for curve in self.curves:
            if self.shows(curve.room_bytes):
                same.setdefault(format_bytes(curve.room_bytes), []).append(curve)
        limits = (
            Limit(
                tuple(dict.fromkeys(curve.name for curve in those)),
                max(curve.room_bytes for curve in those),
                line_of[id(those[0])] if len({line_of[id(curve)] for curve in those}) == 1 else None,
            )
            for those in same.values()
        )
        return tuple(sorted(limits, key=lambda limit: -limit.room_bytes))

    def shows(self, room_bytes: int) -> bool:
        """Whether a limit is low enough to show."""
        return room_bytes <= self.top_bytes


def some_of(names: Sequence[str], most: int) -> str:
    """Return the first names, and how many more there are."""
    further = len(names) - most
    return f"{', '.join(names[:most])}{f' and {further} more' if further > 0 else ''}"


def unit_of(most_bytes: int) -> tuple[int, str]:
    """Return the unit of an axis that ends at a size: its own size in bytes, and its name."""
    return next(((size, name) for size, name in _UNITS if most_bytes >= size), (1, "B"))


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Return label heights, highest first, moved to be at least `least` apart and not below 0."""
    lowered: list[float] = []
    for height in heights:
        lowered.append(min(height, lowered[-1] - least) if lowered else height)
    raised: list[float] = []
    for height in reversed(lowered):
        raised.append(max(height, raised[-1] + least) if raised else max(0.0, height))
    return raised[::-1]


def picture_of(report: Findings) -> Picture:
    """Return the content of the report's picture."""
    # Sizes traced beyond what fits would squeeze the rest.
    sizes = [max(one.micro_batch, one.footprint.size) for one in report.predicted]
    sizes += [] if report.measured is None else [trial.size for trial in report.measured.trials]
    most = max(2, int(max(sizes, default=1) * _BEYOND))
    curves = [] if report.measured is None else [_of_measured(report.measured, most)]
    curves += [_of_predicted(one, most) for one in report.predicted]
    points = [height for curve in curves for _, height in (*curve.line, *curve.fitted)]
    highest = max(points, default=0)
    rooms = [curve.room_bytes for curve in curves if curve.room_bytes <= highest * _IN_SIGHT or curve.failed]
    return Picture(tuple(curves), most, max([highest, *rooms, 1]))


def _hide(one: Curve, other: Curve, least: float) -> bool:
    """Whether two predicted lines are less than `least` bytes apart everywhere; False for measured lines."""
    if one.is_measured or other.is_measured:
        return False
    sizes = {size for curve in (one, other) for size, _ in curve.line}
    return all(abs(_height(one.line, size) - _height(other.line, size)) < least for size in sizes)


def _height(line: Sequence[tuple[int, int]], size: int) -> float:
    """Return the height of a line at a size."""
    for (left, low), (right, high) in pairwise(line):
        if size <= right:
            return low + (high - low) * (size - left) / (right - left)
    return line[-1][1]


def _of_measured(measured: Measured, most: int) -> Curve:
    line: tuple[tuple[int, int], ...] = ()
    if measured.fixed_bytes is not None and measured.bytes_per_sample is not None:
        line = ((0, measured.fixed_bytes), (most, measured.fixed_bytes + most * measured.bytes_per_sample))
    chosen = None
    if measured.plan is not None and measured.peak_bytes is not None:
        chosen = (measured.plan.micro_batch, measured.peak_bytes)
    return Curve(
        measured.device.name,
        line,
        tuple(sorted((trial.size, trial.peak_bytes) for trial in measured.trials if trial.peak_bytes is not None)),
        tuple(sorted(trial.size for trial in measured.trials if not trial.fits)),
        measured.device.room_bytes,
        chosen,
        is_measured=True,
    )


def _of_predicted(one: Predicted, most: int) -> Curve:
    estimate = one.estimate
    points = dict(sorted((of.size, of.reserved_bytes) for of in (*estimate.footprints, one.footprint)))
    traced = tuple(points.items())
    end = (most, estimate.reserved_bytes(most) if most > traced[-1][0] else int(_height(traced, most)))
    known = tuple(point for point in traced if point[0] < most)
    chosen = None if one.plan is None else (one.plan.micro_batch, one.footprint.reserved_bytes)
    return Curve(one.card.name, (*known, end), known, (), one.room_bytes, chosen, is_measured=False)
