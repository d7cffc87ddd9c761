"""Finds changes that would reduce the memory of a step, by tracing the step again with one change, or all of them.

Used if not even one sample fits, if windows are cut into many micro-batches, or if the loss alone holds a large part.
Nothing is measured: the memory of a changed step is predicted and compared with the prediction for the unchanged step.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from autoaccum._estimate.allocation_trace import Category
from autoaccum._memory.simulated import Simulated
from autoaccum._oom import first_line, let_go
from autoaccum._report.records import Predicted, Remedy
from autoaccum._saving.savings import AUTO, CHECKPOINT, CHUNKED, OFFLOAD, check_place, check_savings, in_force
from autoaccum._system.own_code import raised_here
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.fake_step import Adapt
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
class _Change:
    """A change of the step, or several.

    Attributes:
        name: Its name.
        how: How to make it.
        cost: Its disadvantage.
        save_memory: What `fit` takes as `save_memory` for it; empty if it is another change.
        precision: The precision of the step; empty if it does not change it.
        of_timeline: What it changes in a traced step; None if nothing.
    """

    name: str
    how: str
    cost: str
    save_memory: tuple[str, ...] = ()
    precision: str = ""
    of_timeline: Callable[[Timeline], Timeline] | None = None


class Remedies:
    """Traces changed steps.

    Args:
        asked: The question about the job.
        found: What was found in the place where it should fit better.
        unchanged: The step as it is, traced for that place.
        trace: Traces the step in another precision.
        model: The model, only inspected.
        optimizer: The optimizer, only inspected.

    Attributes:
        failed: Changes with which the user's model raises an error, and the error.
    """

    def __init__(
        self,
        asked: Asked,
        found: Measured | Predicted,
        unchanged: Estimate,
        trace: Callable[[str], Traced],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._most = asked.most
        self._found = found
        self._trace = trace
        self._model = model
        self._optimizer = optimizer
        self._unchanged = unchanged
        self._room_bytes = _room_of(found, unchanged)
        self._before = unchanged.largest(self._room_bytes, asked.most)
        self.failed: list[str] = []

    def all(self) -> tuple[Remedy, ...]:
        """Return the remedies, most effective first."""
        changes = list(self._changes())
        found = [self._tried(change) for change in changes]
        # What is kept on the host need not be computed again.
        others = [one for one in changes if one.name != _OFFLOADED]
        suffices = any(one is not None and one.safe_micro_batch == self._most for one in found)
        if len(others) > 1 and not suffices:
            found.append(self._tried(_all_of(others)))
        helpful = [one for one in found if one is not None]
        return tuple(sorted(helpful, key=lambda one: (-one.micro_batch, one.peak_bytes)))

    def _changes(self) -> Iterator[_Change]:
        for name, memory, cost in (
            ("activation checkpointing", CHECKPOINT, "a second forward pass"),
            ("loss in chunks", CHUNKED, "logits are computed once more"),
        ):
            with adapt_of(memory)(self._model) as way:
                pass
            if way:
                how = f"save_memory={memory!r}" + (
                    f", or torch.utils.checkpoint: {way}" if memory == CHECKPOINT else ""
                )
                yield _Change(name, how, cost, (memory,))
        if kernels_of(self._found) == "cuda":
            how, cost = f"save_memory={OFFLOAD!r}, or torch.autograd.graph.save_on_cpu", "copies to the host and back"
            yield _Change(_OFFLOADED, how, cost, (OFFLOAD,))
            if isinstance(self._optimizer, _TWO_NUMBERS):
                how = "torchao.optim.AdamW8bit or bitsandbytes.optim.AdamW8bit"
                in_8_bits = partial(_in_8_bits, next(self._model.parameters()).dtype.itemsize)
                yield _Change("8-bit optimizer", how, "its state is rounded to 8 bits", of_timeline=in_8_bits)
        if computes_bf16(self._found) and self._found.precision == "fp32":
            cost = "activations have 8 significant bits"
            yield _Change("bf16", "precision='bf16'", cost, precision="bf16")

    def _tried(self, change: _Change) -> Remedy | None:
        """Trace the changed step; None if it does not help, or the user's model fails with it."""
        try:
            traced = self._trace(change.precision) if change.precision else self._unchanged.traced
            traced = traced.adapted([adapt_of(name) for name in change.save_memory]) if change.save_memory else traced
            traced = traced.changed(change.of_timeline) if change.of_timeline else traced
            return self._remedy(change, traced.estimate(self._unchanged.gpu))
        except Exception as error:
            # An input, or a tensor that the model makes, may not match the rest. Our own errors are bugs.
            if raised_here(error) and not isinstance(error, InvalidInputError):
                raise
            self.failed.append(f"{change.name} ({type(error).__name__}: {first_line(error)})")
            let_go(error)
            return None

    def _remedy(self, change: _Change, estimate: Estimate) -> Remedy | None:
        """Return a change with what would fit then; None if it does not help."""
        largest = estimate.largest(self._room_bytes, self._most)
        size = largest or self._unchanged.footprints[0].size
        peak = estimate.at(size, self._room_bytes).reserved_bytes
        takes_no_less = largest == 0 or peak >= self._unchanged.at(size, self._room_bytes).reserved_bytes
        if largest < self._before or (largest == self._before and takes_no_less):
            return None
        safe = min(largest, estimate.largest(estimate.safe_bytes(self._room_bytes), self._most))
        by_fit_alone = () if change.precision or change.of_timeline else change.save_memory
        return Remedy(change.name, change.how, peak, largest, change.cost, safe, by_fit_alone)


def _room_of(found: Measured | Predicted, unchanged: Estimate) -> int:
    """Return the memory that a step may use in a place, with the model; at sizes that failed there, it does not fit."""
    if isinstance(found, Predicted):
        return found.room_bytes
    of_model = 0
    if not found.device.holds_model:
        of_model = unchanged.footprints[0].parameters_bytes + unchanged.footprints[0].buffers_bytes
    failed = 1 if found.micro_batch == 0 else found.smallest_failed
    room_bytes = found.room_bytes + of_model
    return room_bytes if failed is None else min(room_bytes, unchanged.at(failed).reserved_bytes - 1)


def _all_of(changes: Sequence[_Change]) -> _Change:
    """Return several changes as one; at most one of them changes the timeline."""
    return _Change(
        " + ".join(one.name for one in changes),
        "; ".join(one.how for one in changes),
        "; ".join(one.cost for one in changes),
        tuple(name for one in changes for name in one.save_memory),
        "".join(one.precision for one in changes),
        next((one.of_timeline for one in changes if one.of_timeline), None),
    )


def kernels_of(found: Measured | Predicted) -> str:
    """Return the kind of device, such as "cpu" or "cuda"."""
    return "cuda" if isinstance(found, Predicted) else found.device.device.partition(":")[0]


def computes_bf16(found: Measured | Predicted) -> bool:
    """Whether a device supports bf16, and therefore TF32; NVIDIA GPUs do from Ampere on."""
    if isinstance(found, Predicted):
        return found.gpu.bf16
    if kernels_of(found) != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(torch.device(found.device.device)) >= (8, 0)


def are_due(found: Measured | Predicted, target_batch: int) -> bool:
    """Whether to look for remedies: windows are cut into many micro-batches, or the loss holds a large part."""
    largest = found.safe_micro_batch
    if largest >= target_batch:
        return False
    step = found.footprint
    is_large_loss = step is not None and step.loss_bytes >= _LARGE_LOSS * step.peak_bytes
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


def names_in(save_memory: Sequence[str] | str | None, notices: Notices) -> tuple[str, ...]:
    """Return what saves memory from the start, by names of `fit`'s argument.

    None for "auto", which is said.

    Raises:
        InvalidInputError: A name is unknown.
    """
    names = check_savings(save_memory, _ANY_GPU)
    if AUTO in names:
        notices.say(
            "save_memory='auto': the report is of steps without it; fit finds what saves memory in its first windows"
        )
        return ()
    return names


def adapts_of(names: Sequence[str]) -> list[Adapt]:
    """Return what changes a model so that it saves memory in these ways, or refuses them."""

    def checked(model: nn.Module) -> ExitStack:
        for name in names:
            check_place(name, [model])
        return ExitStack()

    return [checked, *map(adapt_of, names)] if names else []


def adapt_of(name: str) -> Adapt:
    """Return what changes a model so that it saves memory in one way, which says how."""
    return lambda model: in_force(name, [model], _ANY_GPU)
