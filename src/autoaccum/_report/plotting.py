"""The report as a picture file: a report in, memory over the micro-batch out, drawn by matplotlib.

matplotlib is an extra (`pip install 'autoaccum[report]'`) and is imported only here. Its global state is left alone.
"""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

from autoaccum._report.curves import apart, picture_of
from autoaccum._report.files import beside
from autoaccum._report.wording import title_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from autoaccum._report.curves import Line, Picture
    from autoaccum._report.records import Findings

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # type: ignore[assignment,misc]

# From one line of text to the next, as a share of the axis.
_LINE = 0.055
# Letters in a line of the legend, of which two stand beside each other.
_LABEL = 50
# Told apart by people who see few colours too (Okabe and Ito 2008), dark enough for thin lines on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def plot(report: Findings, path: Path) -> None:
    """Draw the report into a file, which is whole or not there.

    Args:
        report: The report.
        path: Its ending says which kind of file.

    Raises:
        InvalidInputError: matplotlib is not there, does not write such files, or the file cannot be written.
    """
    check_plot(path)
    figure = Figure(figsize=(8, 5), layout="constrained")
    _draw(figure.add_subplot(), picture_of(report), title_of(report))
    with beside(path) as unfinished:
        figure.savefig(unfinished, dpi=150)


def check_plot(path: Path) -> None:
    """Refuse a file that could not be drawn.

    Raises:
        InvalidInputError: matplotlib is not there, or does not write such files.
    """
    if Figure is None:
        raise InvalidInputError(
            "a plot needs matplotlib, which is not installed; pip install 'autoaccum[report]', or take --html, which "
            "needs nothing"
        )
    kinds = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise InvalidInputError(
            f"{str(path)!r} ends in no kind of picture that matplotlib writes; end it in one of .{', .'.join(kinds)}"
        )


def _draw(axes: Any, picture: Picture, title: str) -> None:
    unit, name = picture.unit
    for index, line in enumerate(picture.lines):
        _draw_line(axes, line, COLOURS[index % len(COLOURS)], unit)
    _draw_limits(axes, picture)
    axes.set(title=title, xlabel="samples in a micro-batch", ylabel=f"memory of a step ({name})")
    axes.set_xlim(0, picture.most)
    axes.set_ylim(0, _top(picture))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")


def _draw_limits(axes: Any, picture: Picture) -> None:
    unit, _ = picture.unit
    rooms = [limit.room_bytes / unit for limit in picture.limits]
    heights = apart(rooms, _LINE * _top(picture))
    for limit, room, height in zip(picture.limits, rooms, heights, strict=True):
        colour = "black" if limit.line is None else COLOURS[limit.line % len(COLOURS)]
        axes.axhline(room, color=colour, linewidth=1, linestyle=":")
        # On paper of its own: a label that makes room for another may stand on a line.
        paper = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.3}
        axes.annotate(
            limit.label,
            (0, height),
            xytext=(4, 2),
            textcoords="offset points",
            color=colour,
            fontsize="small",
            verticalalignment="bottom",
            bbox=paper,
        )


def _top(picture: Picture) -> float:
    """Return where the axis of memory ends, in its unit: with place for a label above the highest line."""
    return picture.top_bytes / picture.unit[0] * 1.08


def _draw_line(axes: Any, line: Line, colour: str, unit: int) -> None:
    curve, label = line.first, fill(line.label, _LABEL)
    sizes, heights = _scaled(curve.line, unit)
    axes.plot(sizes, heights, "-" if curve.is_measured else "--", color=colour, linewidth=1.5, label=label)
    filling = colour if curve.is_measured else "white"
    sizes, heights = _scaled(curve.fitted, unit)
    axes.plot(sizes, heights, "o", color=colour, markersize=5, markerfacecolor=filling)
    room = curve.room_bytes / unit
    if curve.failed:
        axes.plot(curve.failed, [room] * len(curve.failed), "x", color=colour, markersize=7, label="does not fit")
    # A measured plan goes around one that is predicted at the same place.
    width = 12 if curve.is_measured else 9
    for name, (size, height) in line.plans:
        told = fill(name, _LABEL)
        axes.plot(size, height / unit, "D", color=colour, markersize=width, markerfacecolor="none", label=told)


def _scaled(points: Sequence[tuple[int, int]], unit: int) -> tuple[list[int], list[float]]:
    return [size for size, _ in points], [height / unit for _, height in points]
