"""What a training step holds at its peak: by kind, and its largest tensors by module and operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoaccum._estimate.allocation_trace import Timeline

# What memory is held for, in the order in which tables and pictures list it: what stays for the whole training first.
KINDS = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations", "loss", "workspace", "temporary")
# Groups of tensors named at the peak.
_NAMED = 12


@dataclass(frozen=True, slots=True)
class AliveMemory:
    """Tensors that one operator made for one module, or that were there before, alive at the peak.

    Attributes:
        kind: What they are held for, one of `KINDS`.
        module: The path of one; "(model)" for the model itself, "(loss)" for the loss, "" for what belongs to none.
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
    groups: dict[tuple[str, str, str], list[int]] = {}
    for number in peak.alive:
        storage, kind = timeline.storages[number], kinds[number]
        held[kind] += storage.size_bytes
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
    )
