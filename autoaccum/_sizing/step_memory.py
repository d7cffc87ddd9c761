"""Records how the memory of a training step goes by, and who holds it at its peak.

`_estimate/moments.py` creates these records from a traced step; the report shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# What memory is held for, in the order in which pictures stack it: what stays for the whole training first.
KINDS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer",
    "inputs",
    "activations",
    "loss",
    "workspace",
    "temporary",
)


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step.

    Attributes:
        event: How many allocations and frees of the step came before it.
        phase: "before", "forward", "backward" or "optimizer".
        bytes_by_kind: What tensors hold, by kind; kinds that hold nothing are left out.
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
    """What belongs to one module at the peak, without the modules inside it.

    Attributes:
        module: Its path; "(model)" for the model itself, "(loss)" for the loss, "" for what belongs to none.
        bytes_by_kind: What it holds, by kind.
    """

    module: str
    bytes_by_kind: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AliveMemory:
    """Tensors that one operator made for one module, or that were there before, alive at the peak.

    Attributes:
        kind: What they are held for.
        module: As in `ModuleMemory`.
        operator: What allocated them; "" if they were there before the step.
        tensors: How many they are.
        held_bytes: What they hold together.
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
        moments: Some moments, in order; of those in between, none held more than its neighbours here.
        peak: The index of the one with the most memory.
        modules: What each module holds then, in the order of the model.
        alive: The largest groups of tensors alive then, largest first.
    """

    size: int
    moments: tuple[Moment, ...]
    peak: int
    modules: tuple[ModuleMemory, ...]
    alive: tuple[AliveMemory, ...]

    @property
    def at_peak(self) -> Moment:
        """The moment with the most memory."""
        return self.moments[self.peak]
