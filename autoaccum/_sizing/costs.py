"""What micro-batches cost in time, by their samples and widths: fitted to those that were measured. Pure arithmetic."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

# Ranges of widths, and of numbers of samples, differ by this factor.
_RANGE = math.sqrt(2.0)
# A term, or a width beyond which all cost the same, is believed where it takes so much of the squared deviation away.
_MORE, _BEYOND = 0.1, 0.9
# The squared deviation of a micro-batch, relative to its seconds, that no such width has to explain.
_NEAR = 0.1
# The most samples, the widest, and the longest time, that a checkpoint may state.
_MOST = 1 << 62

Measured = tuple[int, int, float]  # a micro-batch: its samples, their width, and its seconds


class Cost(NamedTuple):
    """The cost of samples as a function of their width; in seconds, or in elements where nothing was measured.

    Attributes:
        linear: Times the width.
        quadratic: Times its square.
        fixed: Of each micro-batch.
        widest: All that are wider cost the same, as where a collator truncates them.
    """

    linear: float
    quadratic: float
    fixed: float = 0.0
    widest: float = math.inf

    def of(self, width: int) -> float:
        """Return the cost of a sample of this width, above 0, beside that of a micro-batch."""
        known = min(width, self.widest)
        return self.linear * known + self.quadratic * known * known

    def cheapest(self, widths: Sequence[int], limits: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of micro-batches that cost least together: padding against what each costs anyway.

        None is of one sample, which BatchNorm refuses, where another way is left.

        Args:
            widths: Those of samples, the widest first, to which others with it are padded.
            limits: How many samples from each on may go together.
        """
        costs = list(map(self.of, widths))
        least, sizes, alone = np.zeros(len(costs) + 1), [0] * len(costs), 1e3 * (self.fixed * len(costs) + sum(costs))
        for start in reversed(range(len(costs))):
            numbers = np.arange(1, min(limits[start], len(costs) - start) + 1)
            each = self.fixed + costs[start] * numbers + least[start + numbers] + alone * (numbers == 1)
            sizes[start], least[start] = 1 + int(each.argmin()), each.min()
        found: list[int] = []
        while (start := sum(found)) < len(costs):
            found.append(sizes[start])
        return tuple(found)


# As good as any where nothing is known, and the same on all ranks.
BY_ELEMENTS = Cost(1.0, 0.0)


class Costs:
    """The seconds of micro-batches.

    Of those of about as many samples about as wide, the fastest counts: others have waited for something else.
    """

    def __init__(self) -> None:
        self._fastest: dict[tuple[int, int], Measured] = {}
        self._is_warm = False

    def note(self, samples: int, width: int, elapsed_s: float) -> None:
        """Record a micro-batch of samples so wide; not the first of all, which initialises libraries."""
        if self._is_warm:
            self._keep((samples, width, elapsed_s))
        self._is_warm = True

    def _keep(self, one: Measured) -> None:
        if min(one[:2]) < 1 or not 0.0 < one[2] < math.inf:  # which no clock can have measured
            return
        kept = round(math.log(one[1], _RANGE)), round(math.log(one[0], _RANGE))
        self._fastest[kept] = min(self._fastest.get(kept, one), one, key=lambda each: each[2] / each[0] / each[1])

    def measured(self) -> tuple[Measured, ...]:
        """Return the micro-batches that were measured."""
        return tuple(self._fastest[kept] for kept in sorted(self._fastest))

    @classmethod
    def of_state(cls, state: object) -> Costs:
        """Return the costs that `measured` has stated; without values that no training can have measured."""
        costs = cls()
        for row in state if isinstance(state, list | tuple) else ():
            is_one = isinstance(row, list | tuple) and [type(one) for one in row] == [int, int, float]
            if is_one and max(row[:2]) < _MOST:
                costs._keep((row[0], row[1], row[2]))
        return costs


@lru_cache(maxsize=8)
def fitted(measured: tuple[Measured, ...]) -> Cost:
    """Return the costs nearest to measured ones, none below 0, by relative deviation."""
    if not measured:
        return BY_ELEMENTS
    best, found = _nearest(measured, math.inf)
    if best > _NEAR * len(measured):
        for widest in sorted({width for _, width, _ in measured})[:-1]:
            deviation, other = _nearest(measured, widest)
            if deviation < (1.0 - _BEYOND) * best:
                best, found = deviation, other
    return found


def _nearest(measured: tuple[Measured, ...], widest: float) -> tuple[float, Cost]:
    """Return the squared deviation of the nearest costs, and these; of as near ones, those of fewest terms."""
    samples, widths, seconds = np.array(measured).T
    widths = np.minimum(widths, widest)
    terms = np.stack([samples * widths, samples * widths**2, np.ones(len(samples))]) / seconds
    best, found = math.inf, BY_ELEMENTS
    for some in ([0], [1], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        factors, *_ = np.linalg.lstsq(terms[some].T, np.ones(len(samples)))
        deviation = float(((factors @ terms[some] - 1.0) ** 2).sum())
        if factors.min() >= 0.0 and deviation < (1.0 - _MORE) * best - 1e-12:
            each = dict(zip(some, factors.tolist(), strict=True))
            best, found = deviation, Cost(each.get(0, 0.0), each.get(1, 0.0), each.get(2, 0.0), widest)
    return best, found
