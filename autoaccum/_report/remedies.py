"""What saves memory in a step, by names of `save_memory`: in the report's own step, or traced once to be suggested.

Suggested if not even one sample fits, if windows are cut into many micro-batches, or if the loss alone holds a large
part. Nothing is measured: the step is traced again with the change.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from autoaccum._memory.simulated import Simulated
from autoaccum._oom import clear_traceback_frames, first_line
from autoaccum._report.records import Predicted, Remedy
from autoaccum._saving.savings import AUTO, OFFLOAD, check_place, check_savings, in_force, ways_left
from autoaccum._system.own_code import raised_here
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from autoaccum._estimate.fake_step import Adapt
    from autoaccum._estimate.trace import Estimate
    from autoaccum._report.capacity import Question
    from autoaccum._report.records import Measured
    from autoaccum._system.notices import Notices

# With this many micro-batches per window or more, a cut is worth improving; or if the loss holds this share.
MANY_MICRO_BATCHES = 8
_LARGE_LOSS = 0.25
# Decides which tensors are moved to the host, and has no memory of its own.
_ANY_GPU = Simulated(2**50, torch.device("cuda", 0))


def suggested(
    asked: Question, found: Measured | Predicted, unchanged: Estimate, model: nn.Module, names: Sequence[str] = ()
) -> tuple[tuple[Remedy, ...], list[str]]:
    """Return what saves memory, the most effective first, and the names with which the user's model fails, and why.

    Args:
        asked: The question about the job.
        found: What was found in the place where the step should fit better.
        unchanged: The step as it is, traced for that place.
        model: The model, only inspected.
        names: What saves memory in the step as it is.
    """
    helpful, failed = [], []
    kinds = {name.partition(":")[0] for name in names}
    for name in ways_left([model], _ANY_GPU):
        if name in kinds or (name == OFFLOAD and kernels_of(found) != "cuda"):
            continue
        asked_for = (*names, name) if names else name
        try:
            estimate = unchanged.traced.adapted([_adapt_of(name)]).estimate(unchanged.gpu)
            remedy = _remedy(asked_for, asked.most, _room_of(found, unchanged), unchanged, estimate)
        except Exception as error:
            # A tensor that the model makes may not match the rest. Our own errors are bugs.
            if raised_here(error) and not isinstance(error, InvalidInputError):
                raise
            failed.append(f"save_memory={asked_for!r} ({type(error).__name__}: {first_line(error)})")
            clear_traceback_frames(error)
        else:
            helpful += [remedy] if remedy is not None else []
    return tuple(sorted(helpful, key=lambda one: (-one.micro_batch, one.peak_bytes))), failed


def _remedy(
    save_memory: str | tuple[str, ...], most: int, room_bytes: int, unchanged: Estimate, estimate: Estimate
) -> Remedy | None:
    """Return what would fit with a change; None if it does not help."""
    before, largest = unchanged.largest(room_bytes, most), estimate.largest(room_bytes, most)
    size = largest or unchanged.footprints[0].size
    peak = estimate.at(size, room_bytes).reserved_bytes
    takes_no_less = largest == 0 or peak >= unchanged.at(size, room_bytes).reserved_bytes
    if largest < before or (largest == before and takes_no_less):
        return None
    safe = min(largest, estimate.largest(estimate.safe_bytes(room_bytes), most))
    return Remedy(save_memory, peak, largest, safe)


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


def kernels_of(found: Measured | Predicted) -> str:
    """Return the kind of device, such as "cpu" or "cuda"."""
    return "cuda" if isinstance(found, Predicted) else found.device.device.partition(":")[0]


def are_due(found: Measured | Predicted, target_batch: int) -> bool:
    """Whether to look for remedies: windows are cut into many micro-batches, or the loss holds a large part."""
    largest = found.safe_micro_batch
    if largest >= target_batch:
        return False
    step = found.footprint
    is_large_loss = step is not None and step.loss_bytes >= _LARGE_LOSS * step.peak_bytes
    return largest * MANY_MICRO_BATCHES <= target_batch or is_large_loss


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

    return [checked, *map(_adapt_of, names)] if names else []


def _adapt_of(name: str) -> Adapt:
    """Return what changes a model so that it saves memory in one way."""
    return lambda model: in_force(name, [model], _ANY_GPU)
