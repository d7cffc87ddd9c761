"""What a sample costs in time, by its width: fitted to the micro-batches that were measured. Pure arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

# Ranges of widths differ by this factor.
_RANGE = math.sqrt(2.0)
# Widths that are so nearly in proportion tell nothing of the square: the determinant over the product of the diagonal.
_ALIKE = 1e-3
# The widest sample, and the longest time, that a checkpoint may state.
_MOST = 1 << 62

Measured = tuple[int, float]  # the width of a sample, and its seconds


class Cost(NamedTuple):
    """The cost of a sample as a function of its width; in seconds, or in elements where nothing was measured."""

    linear: float
    quadratic: float

    def of(self, width: int) -> float:
        """Return the cost of a sample of this width, above 0."""
        return self.linear * width + self.quadratic * width * width


# As good as any where nothing is known, and the same on all ranks.
BY_ELEMENTS = Cost(1.0, 0.0)


class Costs:
    """The seconds of samples, by their width.

    Of each range of widths, the fastest micro-batch counts: others have waited for something else.
    """

    def __init__(self) -> None:
        self._fastest: dict[int, Measured] = {}
        self._is_warm = False

    def note(self, samples: int, width: int, elapsed_s: float) -> None:
        """Record a micro-batch of samples so wide; not the first of all, which initialises libraries."""
        if self._is_warm:
            self._keep(width, elapsed_s / samples)
        self._is_warm = True

    def _keep(self, width: int, each: float) -> None:
        if width < 1 or not 0.0 < each < math.inf:  # which no clock can have measured
            return
        kept = round(math.log(width, _RANGE))
        before = self._fastest.get(kept)
        if before is None or each * before[0] < before[1] * width:  # by their elements
            self._fastest[kept] = width, each

    def measured(self) -> tuple[Measured, ...]:
        """Return the widths that were measured, with the seconds of a sample."""
        return tuple(self._fastest[kept] for kept in sorted(self._fastest))

    @classmethod
    def of_state(cls, state: object) -> Costs:
        """Return the costs that `measured` has stated; without values that no training can have measured."""
        costs = cls()
        for row in state if isinstance(state, list | tuple) else ():
            if isinstance(row, list | tuple) and [type(one) for one in row] == [int, float] and 0 < row[0] < _MOST:
                costs._keep(row[0], row[1])
        return costs


def fitted(measured: Iterable[Measured]) -> Cost:
    """Return the linear and the quadratic cost nearest to measured ones, neither below 0, by relative deviation."""
    pairs = [(width / seconds, width * width / seconds) for width, seconds in measured]
    # 1 = linear * x + quadratic * y for each pair, by least squares.
    x, y = (sum(pair[at] for pair in pairs) for at in (0, 1))
    xx, xy, yy = (sum(a[one] * a[other] for a in pairs) for one, other in ((0, 0), (0, 1), (1, 1)))
    determinant = xx * yy - xy * xy
    if not pairs:
        return BY_ELEMENTS
    if determinant > _ALIKE * xx * yy:
        linear, quadratic = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
        if linear >= 0.0 and quadratic >= 0.0:
            return Cost(linear, quadratic)
        if linear < 0.0:
            return Cost(0.0, y / yy)
    return Cost(x / xx, 0.0)
