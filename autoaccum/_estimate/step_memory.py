"""Condenses the timeline of a traced step to what a report shows: some points, and who holds memory at the peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autoaccum._estimate.allocation_trace import Timeline

# What memory is held for, in the order in which pictures stack it: what stays for the whole training first.
KINDS = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations", "loss", "workspace", "temporary")
# More points than that are not seen apart in a picture.
_POINTS = 160
# Groups of tensors named at the peak.
_NAMED = 12


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """A point of the timeline of a step's memory.

    Attributes:
        event: How many allocations and frees of the step came before it.
        phase: "before", "forward", "backward" or "optimizer".
    """

    event: int
    phase: str
    bytes_by_kind: Mapping[str, int]

    @property
    def held_bytes(self) -> int:
        """What tensors hold in all."""
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """What one module holds at the peak by kind, without the modules inside it.

    Attributes:
        module: Its path; "(model)" for the model itself, "(loss)" for the loss, "" for what belongs to none.
    """

    module: str
    bytes_by_kind: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AliveMemory:
    """Tensors that one operator made for one module, or that were there before, alive at the peak.

    Attributes:
        module: As in `ModuleMemory`.
        operator: What allocated them; "" if they were there before the step.
        tensors: How many they are.
    """

    kind: str
    module: str
    operator: str
    tensors: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of one training step as traced, in bytes of tensors as they are (an allocator rounds and caches).

    Kinds are those of `KINDS`: "activations" is what the forward pass keeps for the backward pass, "loss" what is made
    to compute the loss and its gradient, "workspace" what kernels and libraries ask for, and buckets or gathered
    weights of several ranks, "temporary" all else that the step makes.

    Attributes:
        size: Samples in the micro-batch.
        points: Some points, in order; of those in between, none held more than its neighbours here.
        peak: The index of the one with the most memory.
        modules: What each module holds then, in the order of the model.
        alive: The largest groups of tensors alive then, largest first.
    """

    size: int
    points: tuple[TimelinePoint, ...]
    peak: int
    modules: tuple[ModuleMemory, ...]
    alive: tuple[AliveMemory, ...]

    @property
    def at_peak(self) -> TimelinePoint:
        """The point with the most memory."""
        return self.points[self.peak]


def condensed(timeline: Timeline) -> StepMemory:
    """Condense a timeline. Each point is the one with the most memory among its neighbours, and the peak is one."""
    kinds = timeline.kinds()
    points = _points(timeline, kinds)
    peak = max(range(len(points)), key=lambda index: points[index].held_bytes)
    modules: dict[str, Counter[str]] = {}
    groups: dict[tuple[str, str, str], list[int]] = {}
    for number in timeline.peak().alive:
        storage = timeline.storages[number]
        modules.setdefault(storage.module, Counter())[kinds[number]] += storage.size_bytes
        groups.setdefault((kinds[number], storage.module, storage.operator), []).append(storage.size_bytes)
    alive = [AliveMemory(*group, tensors=len(sizes), held_bytes=sum(sizes)) for group, sizes in groups.items()]
    return StepMemory(
        timeline.size,
        tuple(points),
        peak,
        tuple(ModuleMemory(module, _in_order(held)) for module, held in modules.items()),
        tuple(sorted(alive, key=lambda one: -one.held_bytes)[:_NAMED]),
    )


def _points(timeline: Timeline, kinds: list[str]) -> list[TimelinePoint]:
    begins = timeline.phases[1][0] if len(timeline.phases) > 1 else 0
    each = max(1, -(-(len(timeline.events) - begins) // _POINTS))
    held: Counter[str] = Counter()
    live = most = 0
    points: list[TimelinePoint] = []
    for index, event in enumerate(timeline.events):
        number = ~event if event < 0 else event
        size_bytes = timeline.storages[number].size_bytes * (-1 if event < 0 else 1)
        held[kinds[number]] += size_bytes
        live += size_bytes
        if index + 1 < begins:
            continue
        at = index + 1 - begins
        # The first point is the one before the step.
        is_next = at <= 1 or (at - 1) % each == 0
        if is_next or live > most:
            most = live
            one = TimelinePoint(at, timeline.phase_at(index), _in_order(held))
            points[len(points) if is_next else -1 :] = [one]
    return points or [TimelinePoint(0, "before", {})]


def _in_order(held: Mapping[str, int]) -> dict[str, int]:
    return {kind: held[kind] for kind in KINDS if held.get(kind)}


def snapshot_of(timeline: Timeline) -> dict[str, Any]:
    """Return a step as `torch.cuda.memory._snapshot` would, for PyTorch's viewer (https://pytorch.org/memory_viz).

    The module and the operator are in place of a stack.
    """
    entries: list[dict[str, Any]] = []
    ends, address = {}, 1 << 40
    for event in timeline.events:
        number = event if event >= 0 else ~event
        storage = timeline.storages[number]
        if event >= 0:
            ends[number] = address  # every storage has an address of its own
            address += storage.size_bytes + 512
        names = (storage.operator or storage.category.value, storage.module or "outside modules")
        entry = {
            "addr": ends[number],
            "size": storage.size_bytes,
            "stream": 0,
            "frames": [{"filename": "", "line": 0, "name": name} for name in names],
        }
        actions = ("alloc",) if event >= 0 else ("free_requested", "free_completed")
        entries += [entry | {"action": action} for action in actions]
    return {"segments": [], "device_traces": [entries], "allocator_settings": {}}
