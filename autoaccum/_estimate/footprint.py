"""What a training step holds: at its peak by kind, module and operator, and from its begin to its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autoaccum._estimate.allocation_trace import Timeline

# What memory is held for, in the order in which tables and pictures list it: what stays for the whole training first.
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
        kind: What they are held for, one of `KINDS`.
        module: As in `ModuleMemory`.
        operator: What allocated them; "" if they were there before the step.
        tensors: How many they are.
        held_bytes: What they take together.
    """

    kind: str
    module: str
    operator: str
    tensors: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one training step at its peak. The parts by kind add up to `peak_bytes`.

    Attributes:
        size: Samples in the micro-batch.
        phase: The phase with the peak: "forward", "backward" or "optimizer".
        peak_bytes: Bytes of tensors at the peak, as rounded by the device's allocator.
        reserved_bytes: What the device holds by then, with the model: of a prediction, the segments that the allocator
            has reserved; of a measurement, what was measured.
        parameters_bytes: Weights.
        buffers_bytes: Buffers.
        gradients_bytes: Gradients of parameters.
        optimizer_bytes: The optimizer's state.
        inputs_bytes: The micro-batch, and on a GPU the next one being transferred.
        activations_bytes: Tensors that the forward pass keeps for the backward pass.
        loss_bytes: What the loss keeps and makes.
        workspace_bytes: What kernels allocate beside their results.
        temporary_bytes: Everything else: temporary tensors of operators, rounding.
        alive: The largest groups of tensors at the peak, largest first.
        modules: What each module holds then, in the order of the model.
        points: Some points of the step, in order; of those in between, none held more than its neighbours here. Equal
            footprints may differ in them: the step's last tensors are freed when Python does.
    """

    size: int
    phase: str
    peak_bytes: int
    reserved_bytes: int
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    inputs_bytes: int
    activations_bytes: int
    loss_bytes: int
    workspace_bytes: int
    temporary_bytes: int
    alive: tuple[AliveMemory, ...] = ()
    modules: tuple[ModuleMemory, ...] = ()
    points: tuple[TimelinePoint, ...] = field(default=(), compare=False)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """The parts by kind, in order."""
        return {kind: getattr(self, f"{kind}_bytes") for kind in KINDS}

    @property
    def outside_bytes(self) -> int:
        """What the device holds outside tensors: in the allocator's cache or the heap; below 0 if it holds less."""
        return self.reserved_bytes - self.peak_bytes


def footprint_of(timeline: Timeline, peak_bytes: int = 0, reserved_bytes: int = 0) -> Footprint:
    """Return the footprint of a step.

    Args:
        timeline: The step.
        peak_bytes: What its tensors take as an allocator rounds them; not below their own sum.
        reserved_bytes: What the allocator has reserved; not below `peak_bytes`.
    """
    peak, kinds = timeline.peak(), timeline.kinds()
    held: Counter[str] = Counter()
    modules: dict[str, Counter[str]] = {}
    groups: dict[tuple[str, str, str], list[int]] = {}
    for number in peak.alive:
        storage, kind = timeline.storages[number], kinds[number]
        held[kind] += storage.size_bytes
        modules.setdefault(storage.module, Counter())[kind] += storage.size_bytes
        groups.setdefault((kind, storage.module, storage.operator), []).append(storage.size_bytes)
    peak_bytes = max(peak.live_bytes, peak_bytes)
    held["temporary"] += peak_bytes - peak.live_bytes
    alive = [AliveMemory(*group, tensors=len(sizes), held_bytes=sum(sizes)) for group, sizes in groups.items()]
    return Footprint(
        timeline.size,
        timeline.phase_at(peak.index),
        peak_bytes,
        max(peak_bytes, reserved_bytes),
        **{f"{kind}_bytes": held[kind] for kind in KINDS},
        alive=tuple(sorted(alive, key=lambda one: -one.held_bytes)[:_NAMED]),
        modules=tuple(ModuleMemory(module, _in_order(of_module)) for module, of_module in modules.items()),
        points=tuple(_points(timeline, kinds)),
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
