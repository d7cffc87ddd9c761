"""Finds changes that would reduce the memory of a step, by tracing the step again with one change, or all of them.

Used if not even one sample fits, if windows are cut into many micro-batches, or if the loss alone holds a large part.
Nothing is measured: the memory of a changed step is predicted and compared with the prediction for the unchanged step.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._engine.savings import AUTO, CHECKPOINT, CHUNKED, OFFLOAD, check_memory, check_place
from autoaccum._engine.savings import saving as in_force
from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.gpus import known_gpus
from autoaccum._memory.simulated import Simulated
from autoaccum._oom import first_line, let_go
from autoaccum._report.records import Predicted, Remedy
from autoaccum._system.own_code import raised_here
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.fake_step import Adapt
    from autoaccum._estimate.gpus import GPU
    from autoaccum._estimate.trace import Estimate, Traced
    from autoaccum._report.capacity import Asked
    from autoaccum._report.records import Measured
    from autoaccum._system.notices import Notices

# With this many micro-batches per window or more, a cut is worth improving; or if the loss holds this share.
MANY_MICRO_BATCHES = 8
_LARGE_LOSS = 0.25

# Optimizers with two state values per parameter that have 8-bit versions (bitsandbytes keeps one
# float32 scale for each of its blocks of 256 numbers: https://huggingface.co/docs/bitsandbytes, 8-bit optimizers).
_TWO_NUMBERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
_BITS8_BYTES = 1 + 4 / 256
_OFFLOADED = "offloaded activations"
# Decides which tensors are moved to the host, and has no memory of its own.
_ANY_GPU = Simulated(2**50, torch.device("cuda", 0))


@dataclass(frozen=True)
class Place:
    """Where a step should fit.

    Attributes:
        kind: "cpu" or "cuda".
        gpu: The GPU; None for a device at hand.
        room_bytes: The memory a step may use there.
        unlimited_bytes: The same without the user's memory limit; None if there is no limit.
        holds_model: Whether that includes the model.
        precision: The precision of the step.
        half: Whether the device supports bf16, and therefore TF32.
        failed: The smallest size that was tried there and did not fit; None if there is none.
    """

    kind: str
    gpu: GPU | None
    room_bytes: int
    unlimited_bytes: int | None
    holds_model: bool
    precision: str
    half: bool
    failed: int | None = None

    @classmethod
    def of(cls, found: Measured | Predicted) -> Place:
        """Return the place in which this was found."""
        if isinstance(found, Predicted):
            gpu, room = found.gpu, found.room_bytes
            unlimited = gpu.free_bytes if room < gpu.free_bytes else None
            return cls("cuda", gpu, room, unlimited, True, found.precision, gpu.bf16)
        device = found.device
        return cls(
            kind=device.device.partition(":")[0],
            gpu=None,
            room_bytes=device.room_bytes,
            unlimited_bytes=None if device.limit_bytes is None else max(device.free_bytes, device.room_bytes),
            holds_model=device.holds_model,
            precision=found.precision or "fp32",
            half=computes_bf16(device.device),
            failed=1 if found.micro_batch == 0 else found.smallest_failed,
        )

    def largest(self, estimate: Estimate, most: int, *, safely: bool = False) -> int:
        """Return the largest micro-batch up to `most` that is predicted to fit; 0 if none is.

        Args:
            estimate: The memory of steps.
            most: The largest size of interest.
            safely: Whether it fits in spite of the prediction's uncertainty.
        """
        room_bytes = self.room_bytes + self._model_bytes(estimate)
        return estimate.largest(estimate.safe_bytes(room_bytes) if safely else room_bytes, most)

    def as_tried(self, estimate: Estimate) -> Place:
        """Return the place with its room reduced, so that the step is not predicted to fit at sizes that failed."""
        if self.failed is None:
            return self
        needed = estimate.reserved_bytes(self.failed) - self._model_bytes(estimate)
        return replace(self, room_bytes=min(self.room_bytes, needed - 1))

    def _model_bytes(self, estimate: Estimate) -> int:
        first = estimate.footprints[0]
        return 0 if self.holds_model else first.parameters_bytes + first.buffers_bytes


@dataclass(frozen=True)
class _Change:
    """A change of the step, or several.

    Attributes:
        name: Its name.
        how: How to make it.
        cost: Its disadvantage.
        precision: The precision of the step; empty if it does not change it.
        adapts: What it changes in the model.
        of_timeline: What it changes in a traced step; None if nothing.
        memory: What `fit` takes as `memory` for it; empty if it is another change.
    """

    name: str
    how: str
    cost: str
    precision: str = ""
    adapts: tuple[Adapt, ...] = ()
    of_timeline: Callable[[Timeline], Timeline] | None = None
    memory: tuple[str, ...] = ()


class Remedies:
    """Traces changed steps.

    Args:
        asked: The question about the job.
        place: Where it should fit.
        unchanged: The step as it is, traced for that place.
        trace: `trace_step` with the parts of the job bound; takes the arguments that a remedy changes.
        model: The model, only inspected.
        optimizer: The optimizer, only inspected.
        gpus: The GPUs that were asked about; a larger one is looked for among them first.

    Attributes:
        failed: Changes with which the user's model raises an error, and the error.
    """

    def __init__(
        self,
        asked: Asked,
        place: Place,
        unchanged: Estimate,
        trace: Callable[..., Traced],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        gpus: Sequence[GPU] = (),
    ) -> None:
        self._asked = asked
        self._gpus = gpus
        self._trace = trace
        self._model = model
        self._optimizer = optimizer
        self._unchanged = unchanged.traced
        self._as_it_is = unchanged
        self._place = place.as_tried(self._as_it_is)
        self._before = self._place.largest(self._as_it_is, asked.most)
        self.failed: list[str] = []

    def all(self) -> tuple[Remedy, ...]:
        """Return the remedies, most effective first."""
        changes = list(self._changes())
        found = [self._tried(change) for change in changes]
        # What is kept on the host need not be computed again.
        others = [one for one in changes if one.name != _OFFLOADED]
        suffices = any(one is not None and one.safe_micro_batch == self._asked.most for one in found)
        if len(others) > 1 and not suffices:
            found.append(self._tried(_all_of(others)))
        found += [self._remedy(*one) for one in self._elsewhere()]
        helpful = [one for one in found if one is not None]
        return tuple(sorted(helpful, key=lambda one: (-(one.micro_batch or 0), one.peak_bytes or 0)))

    def _remedy(self, change: _Change, estimate: Estimate, place: Place) -> Remedy | None:
        """Return a change with what would fit then; None if it does not help."""
        largest = place.largest(estimate, self._asked.most)
        size = largest or self._as_it_is.footprints[0].size
        peak = estimate.reserved_bytes(size)
        if largest < self._before or (
            largest == self._before and (largest == 0 or peak >= self._as_it_is.reserved_bytes(size))
        ):
            return None
        safe = min(largest, place.largest(estimate, self._asked.most, safely=True))
        return Remedy(change.name, change.how, peak, largest, change.cost, safe, change.memory)

    def _elsewhere(self) -> Iterator[tuple[_Change, Estimate, Place]]:
        """Yield places with more memory for the step as it is."""
        if self._place.unlimited_bytes is not None:
            place = replace(self._place, room_bytes=self._place.unlimited_bytes)
            cost = "the memory that the limit keeps free"
            yield _Change("a higher memory limit", "at most, no memory_limit", cost), self._as_it_is, place
        elif self._place.gpu is not None:
            yield from self._larger(self._place.gpu)

    def _changes(self) -> Iterator[_Change]:
        place = self._place
        for name, memory, cost in (
            ("activation checkpointing", CHECKPOINT, "a second forward pass"),
            ("loss in chunks", CHUNKED, "logits are computed once more"),
        ):
            with saves(memory)(self._model) as way:
                pass
            if way:
                how = f"memory={memory!r}" + (f", or torch.utils.checkpoint: {way}" if memory == CHECKPOINT else "")
                yield _Change(name, how, cost, adapts=(saves(memory),), memory=(memory,))
        if place.kind == "cuda":
            how, cost = f"memory={OFFLOAD!r}, or torch.autograd.graph.save_on_cpu", "copies to the host and back"
            yield _Change(_OFFLOADED, how, cost, adapts=(saves(OFFLOAD),), memory=(OFFLOAD,))
            if isinstance(self._optimizer, _TWO_NUMBERS):
                how = "torchao.optim.AdamW8bit or bitsandbytes.optim.AdamW8bit"
                in_8_bits = partial(_in_8_bits, next(self._model.parameters()).dtype.itemsize)
                yield _Change("8-bit optimizer", how, "its state is rounded to 8 bits", of_timeline=in_8_bits)
        if place.half and place.precision == "fp32":
            cost = "activations have 8 significant bits"
            yield _Change("bf16", "precision='bf16'", cost, "bf16")

    def _tried(self, change: _Change) -> Remedy | None:
        """Trace the changed step; None if it does not help, or the user's model fails with it."""
        try:
            traced = self._traced(precision=change.precision) if change.precision else self._unchanged
            traced = traced.adapted(change.adapts) if change.adapts else traced
            traced = traced.changed(change.of_timeline) if change.of_timeline else traced
            return self._remedy(change, traced.estimate(self._place.gpu), self._place)
        except Exception as error:
            # An input, or a tensor that the model makes, may not match the rest. Our own errors are bugs.
            if raised_here(error) and not isinstance(error, InvalidInputError):
                raise
            self.failed.append(f"{change.name} ({type(error).__name__}: {first_line(error)})")
            let_go(error)
            return None

    def _traced(self, **changed: Any) -> Traced:
        options = {
            "batch": self._asked.batch,
            "precision": self._place.precision,
            "kind": self._place.kind,
            "sizes": sorted({1, self._asked.most}),
            "tensor_float": self._place.half,
            "gpu": self._place.gpu,
        }
        return self._trace(**options | changed)

    def _larger(self, here: GPU) -> Iterator[tuple[_Change, Estimate, Place]]:
        """Yield the smallest GPU that does not need many micro-batches, among those asked about if one is there."""
        traced = {self._place.half: [self._unchanged]}
        enough = -(-self._asked.target_batch // MANY_MICRO_BATCHES)
        for gpus, which in ((self._gpus, ", the smallest asked about that suffices"), (known_gpus(), "")):
            for gpu in sorted(gpus, key=lambda one: one.free_bytes):
                if gpu.free_bytes <= here.free_bytes or (self._place.precision == "bf16" and not gpu.bf16):
                    continue
                known = traced.setdefault(gpu.tensor_float, [])
                fitting = next((one for one in known if one.holds_for(gpu)), None)
                if fitting is None:
                    fitting = self._traced(tensor_float=gpu.tensor_float, gpu=gpu)
                    known.append(fitting)
                estimate = fitting.estimate(gpu)
                if estimate.fits(enough, estimate.safe_bytes(gpu.free_bytes)):
                    place = replace(self._place, gpu=gpu, room_bytes=gpu.free_bytes)
                    yield _Change("a larger GPU", f"such as {gpu.name}{which}", "the GPU"), estimate, place
                    return


def _all_of(changes: Sequence[_Change]) -> _Change:
    """Return several changes as one; at most one of them changes the timeline."""
    return _Change(
        " + ".join(one.name for one in changes),
        "; ".join(one.how for one in changes),
        "; ".join(one.cost for one in changes),
        "".join(one.precision for one in changes),
        tuple(adapt for one in changes for adapt in one.adapts),
        next((one.of_timeline for one in changes if one.of_timeline), None),
        tuple(name for one in changes for name in one.memory) if all(one.memory for one in changes) else (),
    )


def computes_bf16(device: str) -> bool:
    """Whether a device at hand supports bf16; NVIDIA GPUs do from Ampere on."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)


def are_due(found: Measured | Predicted, target_batch: int) -> bool:
    """Whether to look for remedies: windows are cut into many micro-batches, or the loss holds a large part."""
    largest = found.safe_micro_batch
    if largest >= target_batch:
        return False
    held = {} if found.step_memory is None else found.step_memory.at_peak.bytes_by_kind
    is_large_loss = held.get("loss", 0) >= _LARGE_LOSS * max(1, sum(held.values()))
    return largest * MANY_MICRO_BATCHES <= target_batch or is_large_loss


def _in_8_bits(element_bytes: int, timeline: Timeline) -> Timeline:
    """Return a step whose optimizer keeps one byte, and a share of a scale, for each number of its state."""
    storages = [
        replace(one, size_bytes=int(one.size_bytes / element_bytes * _BITS8_BYTES))
        if one.category is Category.OPTIMIZER
        else one
        for one in timeline.storages
    ]
    return replace(timeline, storages=storages)


def names_in(memory: Sequence[str] | str | None, notices: Notices) -> tuple[str, ...]:
    """Return what saves memory from the start, by names of `fit`'s argument.

    None for "auto", which is said.

    Raises:
        InvalidInputError: A name is unknown.
    """
    names = check_memory(memory, _ANY_GPU)
    if AUTO in names:
        notices.say(
            "memory='auto': the report is of steps without it; fit finds what saves memory in its first windows"
        )
        return ()
    return names


def saving(names: Sequence[str]) -> list[Adapt]:
    """Return what changes a model so that it saves memory in these ways, or refuses them."""

    def checked(model: nn.Module) -> ExitStack:
        for name in names:
            check_place(name, [model])
        return ExitStack()

    return [checked, *map(saves, names)] if names else []


def saves(name: str) -> Adapt:
    """Return what changes a model so that it saves memory in one way, which says how."""
    return lambda model: in_force(name, [model], _ANY_GPU)
