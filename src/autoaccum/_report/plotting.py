"""Draws the report's picture to a file (.png, .svg, .pdf) with matplotlib, from the marks of `_report/svg.py`.

matplotlib is an extra (`pip install 'autoaccum[report]'`) and is imported only here. Its global state is not changed.
"""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Any

from autoaccum._report.curves import picture_of
from autoaccum._report.svg import HEIGHT, WIDTH, Label, drawing_of
from autoaccum._report.wording import title_of
from autoaccum._system.user_files import beside
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from autoaccum._report.records import Findings
    from autoaccum._report.svg import Mark

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # type: ignore[assignment,misc]

# Characters per line of the legend, which has two columns.
_LABEL = 50
# Distinguishable with colour-blindness (Okabe and Ito 2008), and dark enough for thin lines on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_STYLES: dict[str, dict[str, Any]] = {
    "grid": {"linewidth": 0.6, "alpha": 0.2},
    "limit": {"linewidth": 1, "linestyle": ":"},
    "measured": {"linewidth": 1.5},
    "predicted": {"linewidth": 1.5, "linestyle": "--"},
    "tried": {"marker": "o", "linestyle": ""},
    "gone": {"marker": "o", "linestyle": "", "markerfacecolor": "white"},
    "failed": {"marker": "x", "linestyle": "", "markersize": 7},
    "plan": {"marker": "D", "linestyle": "", "markerfacecolor": "none"},
}
_IN_LEGEND = ("measured", "predicted", "failed", "plan")
_ALIGNED = {"start": "left", "middle": "center", "end": "right"}
# A limit's label may cover a line.
_PAPER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.3}


def plot(report: Findings, path: Path) -> None:
    """Draw the report to a file, whose suffix sets the format; on failure the file is unchanged.

    Raises:
        InvalidInputError: matplotlib is missing or does not support the format, or the file cannot be written.
    """
    check_plot(path)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title_of(report), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    for one in drawing_of(picture_of(report)):
        _add(axes, one)
    handles, names = axes.get_legend_handles_labels()
    legend = dict(zip(names, handles, strict=True))  # several crosses share one entry
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    with beside(path) as unfinished:
        figure.savefig(unfinished, dpi=150)


def check_plot(path: Path) -> None:
    """Raise if the file could not be drawn.

    Raises:
        InvalidInputError: matplotlib is missing, or does not support the format.
    """
    if Figure is None:
        raise InvalidInputError(
            "a plot needs matplotlib, which is not installed; pip install 'autoaccum[report]', or use --html, whose "
            "page has the same picture without it"
        )
    kinds = FigureCanvasAgg(Figure()).get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise InvalidInputError(
            f"matplotlib cannot write the format of {str(path)!r}; end its name in one of .{', .'.join(kinds)}"
        )


def _add(axes: Any, one: Mark | Label) -> None:
    colour = "black" if one.line is None else _COLOURS[one.line % len(_COLOURS)]
    if isinstance(one, Label):
        paper = _PAPER if one.kind == "room" else None
        aligned = _ALIGNED[one.anchor]
        axes.text(one.x, one.y, one.text, color=colour, fontsize="small", horizontalalignment=aligned, bbox=paper)
        return
    name = "does not fit" if one.kind == "failed" else fill(one.name, _LABEL)
    style = {"markersize": 1.2 * one.half, "label": name if one.kind in _IN_LEGEND else None} | _STYLES[one.kind]
    axes.plot([x for x, _ in one.points], [y for _, y in one.points], color=colour, **style)
