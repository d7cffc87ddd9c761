"""Tells which failures smaller micro-batches can resolve, and what they have left behind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Self

from autoaccum._arguments import listed
from autoaccum._oom import clear_traceback_frames, first_line, is_device_lost, is_oom, is_too_large
from autoaccum._records import MemoryEvent
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Called on the first lack of memory, while the frames in which it happened still exist.
    Witness = Callable[..., None]

# Attempts at trying losses, each on half as many samples: it takes many small steps, and each can fail.
TRIES_TO_WEIGH = 4


def resolvable_oom(
    error: Exception,
    phase: Phase,
    size: int | None,
    witness: Witness | None,
    *,
    has_moved: bool = False,
    step: int | None = None,
    is_trial: bool = False,
) -> MemoryEvent | None:
    """Return what happened, once the error keeps nothing alive; None if smaller micro-batches cannot resolve it.

    Args:
        error: What was caught: lack of memory, or a kernel that refuses the size.
        phase: In which phase.
        size: The samples of the micro-batch; None where smaller ones would not help.
        witness: Sees the error first.
        has_moved: Whether the samples were changed in place since they were first used.
        step: The number of the optimizer step.
        is_trial: Whether the size was tried without need.

    Raises:
        InvalidInputError: The samples cannot be processed again.
    """
    if not (is_oom(error) or is_too_large(error)) or is_device_lost(error):
        return None
    if witness is not None:
        witness(error, phase=phase, size=size, step=step, is_trial=is_trial)
    if has_moved:
        raise InvalidInputError(
            "memory ran out after the model had changed its input in place, so the samples cannot be processed again "
            "from the same data; let the model work on a copy (inputs.clone())"
        ) from error
    event = MemoryEvent(phase.value, size, first_line(error))
    clear_traceback_frames(error)
    return event


def damage_text(names: Sequence[str]) -> str:
    """Return in words that tensors of these names were written and cannot be restored."""
    return (
        f"forward() or backward() had written {listed(names)}, which was not saved before and is not as it was: "
        "load it from a checkpoint"
    )


class Phase(StrEnum):
    """A phase of a window. Its value appears in `MemoryEvent.phase` and in reports, its `text` in errors."""

    text: str

    def __new__(cls, value: str, text: str = "") -> Self:
        phase = str.__new__(cls, value)
        phase._value_, phase.text = value, text
        return phase

    SAVE = "save", "the copy of buffers and random state that a retry needs"
    WEIGH = "weigh", "trying the loss on a few samples"  # also while sizes, and how losses are weighed, are chosen
    TRANSFER = "transfer", "the transfer to the device"  # also while memory for the micro-batch is checked
    FORWARD = "forward", "the forward pass"
    BACKWARD = "backward", "the backward pass"
    RESERVE = "reserve", "the optimizer's step"  # memory for it
    ADD = "add", "adding the gradient to earlier ones"
    REDUCE = "reduce", "adding up the gradient over all ranks"
    UNSCALE = "unscale", "unscaling the gradient"
    CLIP = "clip", "clipping the gradient"
    OPTIMIZER = "optimizer", "the optimizer's step"
    EVALUATE = "evaluate", "an evaluation"
    ELSEWHERE = "on another rank", "the step of another rank"


@dataclass(slots=True)
class Stage:
    """Where a training step is, shared by its parts: its phase, and in the window its micro-batch's first sample."""

    phase: Phase = Phase.TRANSFER
    start: int = 0
