"""Cuts samples of unlike cost, the most expensive first. Pure arithmetic, no torch.

A micro-batch costs as much as its first sample for each of its samples: shorter ones are padded to its length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Halvings of the interval in which the smallest cost of a cut is searched.
_HALVINGS = 20


def cut_by_cost(costs: Sequence[float], most: float, *, largest: int | None = None, fills: bool = False) -> list[int]:
    """Return the sizes of the fewest micro-batches that cost at most `most` each, or hold one sample.

    Args:
        costs: By sample, descending.
        most: The most that a micro-batch may cost.
        largest: The most samples in a micro-batch; None for no cap.
        fills: Whether to fill each micro-batch before the next; otherwise their costs are as even as possible.
    """
    sizes = _filled(costs, most, largest)
    if fills or len(sizes) == 1:
        return sizes
    low, high = min(sum(costs) / len(sizes), most), most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        evener = _filled(costs, middle, largest)
        if len(evener) == len(sizes):
            sizes, high = evener, middle
        else:
            low = middle
    return sizes


def _filled(costs: Sequence[float], most: float, largest: int | None) -> list[int]:
    sizes, start = [], 0
    while start < len(costs):
        size = max(1, min(len(costs) - start, int(most / costs[start])))
        sizes.append(size if largest is None else min(size, largest))
        start += sizes[-1]
    return sizes
