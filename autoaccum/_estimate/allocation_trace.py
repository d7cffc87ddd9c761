"""The timeline of one training step: storages allocated and freed, in order, and their peak.

`_estimate/tracer.py` records it, `_estimate/cuda_allocator.py` replays it on a GPU's allocator. Pure arithmetic: no
torch, no device, no rounding.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise


class Category(Enum):
    """What a storage holds; those allocated within the step are distinguished by lifetime."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    INPUTS = "inputs"
    MADE = "made"
    LOSS = "loss"
    WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage of a timeline.

    Attributes:
        size_bytes: Its size.
        category: What it holds.
        operator: The operator that allocated it; "" if it existed before the step.
        module: The path of the module that it belongs to, or for which the operator ran; "" if for none.
    """

    size_bytes: int
    category: Category
    operator: str = ""
    module: str = ""


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of a timeline with the most bytes alive.

    Attributes:
        index: The index of the event before it.
        live_bytes: Bytes alive then.
        alive: The numbers of the storages alive then, in the order of allocation.
    """

    index: int
    live_bytes: int
    alive: tuple[int, ...]


@dataclass(slots=True)
class Timeline:
    """One training step of one size.

    Attributes:
        size: Samples in its micro-batch.
        storages: Every storage, by number.
        events: The number of a storage where it is allocated; its complement (`~number`, negative) where it is freed.
        phases: The index of each phase's first event, and its name. The first is "before".
    """

    size: int
    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=lambda: [(0, "before")])

    def phase_at(self, index: int) -> str:
        """Return the phase of an event."""
        return self.phases[bisect_right(self.phases, index, key=lambda phase: phase[0]) - 1][1]

    def peak(self) -> Peak:
        """Return the first moment with the most bytes alive."""
        live = best = 0
        at = -1
        for index, event in enumerate(self.events):
            if event < 0:
                live -= self.storages[~event].size_bytes
            else:
                live += self.storages[event].size_bytes
                if live > best:
                    best, at = live, index
        return Peak(at, best, self.alive_at(at))

    def alive_at(self, index: int) -> tuple[int, ...]:
        """Return the numbers of the storages alive after an event, in the order of allocation."""
        alive: dict[int, None] = {}
        for event in self.events[: index + 1]:
            if event < 0:
                del alive[~event]
            else:
                alive[event] = None
        return tuple(alive)

    def with_held(self, size_bytes: int) -> Timeline:
        """Return the timeline with one more storage that is alive throughout."""
        number = len(self.storages)
        storages = [*self.storages, Storage(size_bytes, Category.WORKSPACE)]
        phases = [self.phases[0], *((start + 1, name) for start, name in self.phases[1:])]
        return Timeline(self.size, storages, [number, *self.events], phases)

    def kept_for_backward(self) -> set[int]:
        """Return the numbers of storages allocated in a forward pass that outlived it."""
        kept: set[int] = set()
        for (start, name), (stop, _) in pairwise([*self.phases, (len(self.events), "end")]):
            if name == "forward":
                of_phase = self.events[start:stop]
                kept |= {event for event in of_phase if event >= 0} - {~event for event in of_phase if event < 0}
        return kept

    def kinds(self) -> list[str]:
        """Return what each storage is held for: its category, or by its lifetime "activations" or "temporary"."""
        kept = self.kept_for_backward()
        return [
            ("activations" if number in kept else "temporary") if one.category is Category.MADE else one.category.value
            for number, one in enumerate(self.storages)
        ]


def between(low: Timeline, high: Timeline, size: int) -> Timeline | None:
    """Derive the timeline of another size, if every storage is fixed or proportional to the samples.

    Args:
        low: The step of one size.
        high: The same step of a larger size.
        size: The size to derive.

    Returns:
        The timeline; None if the two steps run different operators, or a storage is neither fixed nor proportional.
    """
    if low.events != high.events or low.phases != high.phases or len(low.storages) != len(high.storages):
        return None
    storages: list[Storage] = []
    for one, other in zip(low.storages, high.storages, strict=True):
        rise = other.size_bytes - one.size_bytes
        is_alike = one.operator == other.operator and one.category is other.category
        is_proportional = one.size_bytes * high.size == other.size_bytes * low.size
        if rise and not (is_alike and is_proportional):
            return None
        size_bytes = one.size_bytes + rise * (size - low.size) // (high.size - low.size)
        storages.append(replace(one, size_bytes=size_bytes) if rise else one)
    return Timeline(size, storages, high.events, high.phases)
