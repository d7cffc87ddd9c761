"""Draws what the tutorial measured: memory over the micro-batch, and the losses of a run that was killed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from svg import framed, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIB = 2**20
HIGHEST = 140  # MiB
APART = 5  # samples: labels of nearer trials would overlap
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 540, 390, 76, 24, 28, 110


class Plot:
    """A picture with two axes.

    Args:
        across: The first and the last tick of the axis, the step between ticks, and its title.
        up: The same, from 0 on: the last tick, the step between ticks, and the title.
    """

    def __init__(self, across: tuple[int, int, int, str], up: tuple[float, float, str]) -> None:
        first, last, step, below = across
        highest, each, beside = up
        self._first, self._last, self._highest = first, last, highest
        self.parts: list[str] = []
        for tick in range(first, last + 1, step):
            self.line([(tick, 0), (tick, highest)], "grid")
            self.words(tick, 0, str(tick), "quiet middle", dy=20)
        for number in range(round(highest / each) + 1):
            self.line([(first, number * each), (last, number * each)], "grid")
            self.words(first, number * each, f"{number * each:g}", "quiet end", dx=-8, dy=5)
        self.parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 46, below, "step middle"))
        turned = f'<g transform="translate(26 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">'
        self.parts.append(f"{turned}{text(0, 0, beside, 'step middle')}</g>")

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point is in the picture."""
        right = LEFT + (x - self._first) / (self._last - self._first) * (WIDTH - LEFT - RIGHT)
        return round(right, 1), round(HEIGHT - BOTTOM - y / self._highest * (HEIGHT - TOP - BOTTOM), 1)

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        places = " ".join(f"{x:g},{y:g}" for x, y in (self.at(*point) for point in points))
        self.parts.append(f'<polyline class="{kind}" points="{places}"/>')

    def words(self, x: float, y: float, words: str, kind: str, dx: float = 0, dy: float = 0) -> None:
        """Write words beside a point."""
        right, down = self.at(x, y)
        self.parts.append(text(right + dx, down + dy, words, kind))

    def marks(self, points: Iterable[tuple[float, float]], shape: str) -> None:
        """Draw a mark at each point."""
        self.parts += [_mark(*self.at(*point), shape) for point in points]

    def legend(self, kinds: Sequence[tuple[str, str]]) -> None:
        """Tell below the picture what marks mean: pairs of a shape and words."""
        for number, (shape, words) in enumerate(kinds):
            x, y = LEFT + number * 190, HEIGHT - 30
            self.parts += [_mark(x + 8, y - 5, shape), text(x + 22, y, words, "quiet")]


def _mark(x: float, y: float, shape: str) -> str:
    return {
        "dot": f'<circle class="blue" cx="{x:g}" cy="{y:g}" r="5.5"/>',
        "cross": f'<path class="back" d="M{x - 5:g} {y - 5:g}l10 10m0 -10l-10 10"/>',
        "square": f'<rect class="back" x="{x - 6:g}" y="{y - 6:g}" width="12" height="12"/>',
        "ring": f'<circle class="blue-line" cx="{x:g}" cy="{y:g}" r="6"/>',
    }[shape]


def memory_by_size(report: dict[str, Any], target_batch: int) -> str:
    """Return the picture of a measured report: each trial's memory, the limit, and what the plan takes."""
    measured = report["measured"]
    limit, cut = measured["device"]["limit_bytes"] / MIB, measured["plan"]["micro_batches"]
    fitting = sorted((t["size"], t["peak_bytes"] / MIB) for t in measured["trials"] if t["fits"])
    per_sample, fixed = line_through(fitting)
    # Memory ran out before their peak, which is where the line says.
    failing = [(t["size"], fixed + t["size"] * per_sample) for t in measured["trials"] if not t["fits"]]
    plot = Plot((0, 140, 20, "micro-batch (samples)"), (HIGHEST, 20, "peak memory of a step (MiB)"))
    plot.line([(0, fixed), (140, min(HIGHEST, fixed + 140 * per_sample))], "line dashed")
    plot.line([(0, limit), (140, limit)], "back")
    plot.line([(max(cut), 0), (max(cut), HIGHEST)], "green-line dashed")
    plot.words(2, limit, f"limit {limit:.0f} MiB", "alarm", dy=-8)
    plot.words(max(cut), 8, f"plan: {target_batch} = {'+'.join(map(str, cut))}", "good end", dx=-6)
    plot.words(64, fixed + 64 * per_sample, "line through the trials", "quiet end", dx=-10)
    plot.marks(fitting, "dot")
    plot.marks(failing, "cross")
    apart = [one for one, after in pairwise([*fitting, (math.inf, 0)]) if after[0] - one[0] > APART]
    beside = [*((*one, 8) for one in (*apart[:-2], *failing)), *((*one, 18) for one in apart[-2:])]
    for size, peak, below in beside:
        plot.words(size, peak, str(size), "quiet", dx=10, dy=below)
    plot.legend([("dot", "trial that fits"), *[("cross", "trial that does not fit")] * bool(failing)])
    sizes = [str(size) for size, _ in fitting]
    told = (
        f"Peak memory of a training step against the micro-batch's samples. Trials of {', '.join(sizes[:-1])} and "
        f"{sizes[-1]} samples fit under the limit of {limit:.0f} MiB and lie on a line. The plan "
        f"takes {target_batch} in micro-batches of {cut}."
    )
    return framed(WIDTH, HEIGHT, "Memory over the micro-batch", told, plot.parts)


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the rise and the start of the line by least squares."""
    middle_x, middle_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    rise = sum((x - middle_x) * (y - middle_y) for x, y in points) / sum((x - middle_x) ** 2 for x, _ in points)
    return rise, middle_y - rise * middle_x


def losses(undisturbed: list[dict[str, Any]], attempts: list[list[dict[str, Any]]]) -> str:
    """Return the picture of a run that was killed and resumed, beside the one that was not."""
    whole, before, after = ([(one["step"], one["loss"]) for one in steps] for steps in (undisturbed, *attempts))
    # The process died after an optimizer step, before it was logged.
    kept, killed = after[0][0] - 1, before[-1][0] + 1
    highest = 0.5 * math.ceil(2.3 * max(loss for _, loss in whole))
    plot = Plot((1, whole[-1][0], 1, "optimizer step"), (highest, 0.5, "loss"))
    for step in (kept, killed):
        plot.line([(step, 0), (step, highest)], "line dashed")
    plot.line(whole, "line")
    plot.marks(before, "square")
    plot.marks(after, "ring")
    plot.words(1.2, 0.2, "line: a run never killed", "quiet")
    plot.words(kept, highest, "checkpoint", "step end", dx=-6, dy=14)
    plot.words(killed, highest, "killed", "alarm", dx=6, dy=14)
    plot.legend([("square", "logged before the kill"), ("ring", "after resuming from the checkpoint")])
    told = (
        f"The loss by optimizer step. The undisturbed run is a line from {whole[0][1]:.2f} to {whole[-1][1]:.2f}. The "
        f"killed run's steps 1 to {before[-1][0]} and the resumed run's steps {after[0][0]} to {after[-1][0]}, after "
        f"the checkpoint of step {kept}, lie on it."
    )
    return framed(WIDTH, HEIGHT, "Killed, and resumed", told, plot.parts)
