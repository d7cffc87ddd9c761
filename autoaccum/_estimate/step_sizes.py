"""Timelines of a step of any size, from as few traced ones as possible.

Two sizes are traced. If every storage of theirs is fixed or proportional to the samples, any other size follows
exactly. If not, sizes are traced where they are asked for, at most between two powers of two, so that the timeline of a
size does not depend on which others were asked for. A real step cannot be run at every size: it is extrapolated.
"""

from __future__ import annotations

from collections import Counter
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from autoaccum._estimate.allocation_trace import Storage, Timeline, between

if TYPE_CHECKING:
    from collections.abc import Callable


class TracedSizes:
    """Traces sizes on request.

    Args:
        run: Traces a size.
        low: The smaller size to trace at once.
        high: The larger one; the same as `low` to trace only one.
    """

    def __init__(self, run: Callable[[int], Timeline], low: int, high: int) -> None:
        self._run = run
        self._low, self._high = low, high
        self._known = {size: run(size) for size in sorted({low, high})}

    def __call__(self, size: int) -> Timeline:
        """Return the timeline of a size."""
        if size not in self._known:
            self._known[size] = self._derived(size) or self._traced(size)
        return self._known[size]

    def rough(self, size: int) -> Timeline | None:
        """Return about the timeline of a size that would have to be traced; None if it need not be, or is unlike."""
        low, high = self._known[self._low], self._known[self._high]
        if size in self._known or low is high or between(low, high, size) is not None:
            return None
        return between(low, high, size, bends=True)

    def _derived(self, size: int) -> Timeline | None:
        exact = between(self._known[self._low], self._known[self._high], size) if self._low < self._high else None
        least = 1 << (size.bit_length() - 1)
        if exact is not None or least == size:
            return exact
        return between(self(least), self(2 * least), size, bends=True)

    def _traced(self, size: int) -> Timeline:
        low, high = self._low, self._high
        try:
            return self._run(size)
        except Exception:
            # The model refuses this size, as batch statistics refuse one sample. The next power of two takes more.
            if size < high:
                return self(min(high, 1 << size.bit_length()))
            if low == high:
                raise
            return scaled(self._known[low], self._known[high], size)


def extrapolated(low: Timeline, high: Timeline) -> Callable[[int], Timeline]:
    """Return a function that extrapolates two steps to any size."""
    known = {low.size: low, high.size: high}
    return lambda size: known.get(size) or between(low, high, size) or scaled(low, high, size)


def scaled(low: Timeline, high: Timeline, size: int) -> Timeline:
    """Extrapolate a step whose operators, or storages, depend on the samples or on their values.

    The two steps are aligned by their operators. A storage that has a counterpart grows with the samples as it did
    between the two. One without came with the additional samples (a loop over samples, or other values): if it was made
    before the backward pass and was alive together with others like it, as many are added for each further sample; if
    not, it takes turns with them. Every storage is alive when it was in the larger step, so the peak grows along a
    line, as what tensors hold does.

    Args:
        low: The step of one size.
        high: The step of a larger size.
        size: The size to extrapolate to.
    """
    share = (size - low.size) / (high.size - low.size)
    counterparts, together = _aligned(low, high), (_alive_together(low), _alive_together(high))
    before_backward = _before_backward(high)
    storages = []
    for number, storage in enumerate(high.storages):
        size_bytes = storage.size_bytes
        if number in counterparts:
            begun = low.storages[counterparts[number]].size_bytes
            size_bytes = max(0, begun + round((size_bytes - begun) * share))
        elif number in before_backward and together[1][_form(storage)] > together[0][_form(storage)]:
            size_bytes = round(size_bytes * max(0, share))
        storages.append(Storage(size_bytes, storage.category, storage.operator, storage.module))
    return Timeline(size, storages, high.events, high.phases)


def _form(storage: Storage) -> tuple[str, int]:
    return storage.operator, storage.size_bytes


def _aligned(low: Timeline, high: Timeline) -> dict[int, int]:
    """Return the numbers of the larger step's storages that have a counterpart in the smaller one, and its number."""
    one, other = ([(storage.operator, storage.category) for storage in timeline.storages] for timeline in (low, high))
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    return {
        match.b + offset: match.a + offset for match in matcher.get_matching_blocks() for offset in range(match.size)
    }


def _alive_together(timeline: Timeline) -> Counter[tuple[str, int]]:
    """Return how many storages of one operator and size are alive at once, at most."""
    alive: Counter[tuple[str, int]] = Counter()
    most: Counter[tuple[str, int]] = Counter()
    for event in timeline.events:
        form = _form(timeline.storages[event if event >= 0 else ~event])
        alive[form] += 1 if event >= 0 else -1
        most[form] = max(most[form], alive[form])
    return most


def _before_backward(timeline: Timeline) -> set[int]:
    """Return the numbers of storages that are allocated before the first backward pass begins."""
    begins = next((start for start, name in timeline.phases if name == "backward"), len(timeline.events))
    return {event for event in timeline.events[:begins] if event >= 0}
