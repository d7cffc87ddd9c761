"""Writes the errors for what does not fit: what was asked, what was found, and what the caller can do.

In comes what failed and the step that it failed in, out comes the error to raise. A remedy that is an argument is named
only if the function that the user has called takes it (`Options.names`). Free memory is mentioned only where
little is left: why it does not suffice is not known otherwise.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._data.nesting import shapes_of_sample
from autoaccum._data.splits import is_default
from autoaccum._engine.fallback import ways_left
from autoaccum._engine.forward_backward import TrainingStep
from autoaccum._engine.optimizer_list import name_of
from autoaccum._engine.phases import Phase
from autoaccum._memory.limits import describe_room
from autoaccum._oom import let_go
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import GradientStep

# Three lines of 120 characters, less what their ends leave free.
_MOST = 345
# In so many characters, the phase and the device's own message say how much was asked for.
_LEAST_SAID = 110
_MOST_SHAPES = 90
# What oneDNN says of lack of memory, and of an operator that it does not have on this processor in this type.
_UNSUPPORTED = "could not create a primitive descriptor"

ONE_SAMPLE = "one sample"

_DURING = {
    Phase.WEIGH: "while it is found out what the loss runs over",
    Phase.TRANSFER: "on the way to the device",
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "in the backward pass",
    Phase.RESERVE: "in the optimizer's step",
    Phase.OPTIMIZER: "in the optimizer's step",
    Phase.EVALUATE: "in an evaluation",
    Phase.ELSEWHERE: "on another rank",
}
# What does not depend on the size of micro-batches.
_AT_ONCE = {
    Phase.SET_ASIDE: "a copy of what a window that fails is put back to",
    Phase.WEIGH: "finding out what the loss runs over",
    Phase.FORWARD: "the loss over the whole window",
    Phase.BACKWARD: "the loss over the whole window",
    Phase.RESERVE: "the optimizer's step",
    Phase.ADD: "adding the gradient to earlier ones",
    Phase.REDUCE: "adding up the gradient over all ranks",
    Phase.UNSCALE: "unscaling the gradient",
    Phase.CLIP: "clipping the gradient",
    Phase.OPTIMIZER: "the optimizer's step",
}
# In these, nothing is kept for a backward pass.
_OF_THE_OPTIMIZER = (Phase.RESERVE, Phase.UNSCALE, Phase.CLIP, Phase.OPTIMIZER)
_OVER_THE_WINDOW = (Phase.FORWARD, Phase.BACKWARD)


def sample_of(window: Window, index: int) -> str:
    """Return which sample of a window it is, in words, with the shapes of its tensors.

    Args:
        window: The window.
        index: The sample's index in it.
    """
    if index >= window.samples:  # another process has it
        return ONE_SAMPLE
    try:
        batch = window.cut(index, index + 1)
    except Exception as error:  # noqa: BLE001 - a collator that fails, by lack of memory or else, must not hide the error
        let_go(error)
        return window.named(index) or ONE_SAMPLE
    return described(batch, window.named(index), has_rows=is_default(window.split))


def described(batch: Any, name: str | None = None, *, has_rows: bool = True) -> str:
    """Return a batch of one sample in words.

    Args:
        batch: The batch.
        name: The name of the sample; None if it has none.
        has_rows: Whether samples run along the first dimension, which is then left out of shapes.
    """
    shapes = shapes_of_sample(batch, has_rows=has_rows)
    if not shapes:
        return name or ONE_SAMPLE
    of_shapes = f"of shape{'s' if len(shapes) > 1 else ''} {_listed(shapes)}"
    return f"a sample {of_shapes}" if name is None else f"{name}, {of_shapes},"


def abridged(said: str) -> str:
    """Return what a device said, in few enough characters to be quoted."""
    return textwrap.shorten(said, _LEAST_SAID, placeholder=" ...")


def _listed(shapes: list[str]) -> str:
    """Return shapes in words, as many as there is room for."""
    shown = len(shapes)
    while shown > 1 and len(", ".join(shapes[:shown])) > _MOST_SHAPES:
        shown -= 1
    if shown < len(shapes):
        return f"{', '.join(shapes[:shown])} and {len(shapes) - shown} more"
    return _joined(shapes, "and")


def sample_does_not_fit(
    step: GradientStep, said: str, *, sample: str = ONE_SAMPLE, phase: str | None = None, is_whole: bool = False
) -> DoesNotFitError:
    """Return the error for a sample that does not fit alone.

    Args:
        step: The training step.
        said: What the device said.
        sample: The sample, in words.
        phase: In which phase that was; None if it is not known.
        is_whole: Whether the loss takes all samples of a window at once.
    """
    remedies = [*_limit(step), *_precision(step, said)]
    if is_whole:
        remedies.append("fewer samples in a window")
    if phase != Phase.EVALUATE:
        remedies += _savings(step)
    remedies.append("smaller inputs")
    if phase != Phase.EVALUATE:
        remedies += _less_state(step)
    where = _DURING.get(Phase(phase), f"in the {phase} step") if phase is not None else ""
    found = ": ".join(part for part in (where, said) if part)
    return DoesNotFitError(_composed(step, f"{sample} does not fit", found, remedies))


def whole_does_not_fit(
    step: GradientStep, said: str, phase: str, tries: int, what: str | None = None
) -> DoesNotFitError:
    """Return the error for something that takes the same memory in micro-batches of any size.

    Args:
        step: The training step.
        said: What the device said.
        phase: In which phase that was.
        tries: How often it was tried.
        what: What it was, in words; None for what the phase is for.
    """
    if phase in _OF_THE_OPTIMIZER:
        remedies = [*_limit(step), *_less_state(step), "an optimizer with foreach=False", "a smaller model"]
    elif phase == Phase.WEIGH:
        says = ["loss_reduction='mean' or 'sum'"] if "loss_reduction" in step.options.names else []
        remedies = [*says, *_limit(step), *_precision(step, said), *_savings(step), "smaller inputs"]
    elif phase in (*_OVER_THE_WINDOW, Phase.EVALUATE):
        batch = "batch for evaluation" if phase == Phase.EVALUATE else "window"
        remedies = [f"fewer samples in a {batch}", *_limit(step), *_precision(step, said)]
    else:
        remedies = [*_limit(step), "a smaller model"]
    what = what or _AT_ONCE.get(Phase(phase), f"the {phase} step")
    times = " even with no activations alive" if phase in _OF_THE_OPTIMIZER else f" in {tries} attempts"
    error = DoesNotFitError(_composed(step, f"{what} does not fit", said, remedies, times))
    error.saving_helps = phase not in _OF_THE_OPTIMIZER
    return error


def input_has_moved() -> InvalidInputError:
    """Return the error for samples that were changed in place, so that they cannot be processed again."""
    return InvalidInputError(
        "memory ran out after the model had changed its input in place, so the samples cannot be processed again from "
        "the same data; let the model work on a copy (inputs.clone())"
    )


def short_window(options: frozenset[str]) -> str:
    """Return how to leave out a last window that is shorter than others, in words."""
    if "drop_last" in options:
        return "drop_last=True leaves a short last window out"
    return "drop_last=True of autoaccum.windows, or of the DataLoader, leaves a short last one out"


def other_sizes(options: frozenset[str]) -> str:
    """Return how to avoid a last micro-batch of one sample, in words."""
    ways = ["strategy='balanced'"] if "strategy" in options else []
    ways.append("a larger micro_batch" if "micro_batch" in options else "a plan of other micro-batches")
    return _joined([*ways, "samples of one shape"], "or")


# --- remedies ---------------------------------------------------------------------------------------------------------


def _limit(step: GradientStep) -> list[str]:
    is_set = step.memory.limit_bytes is not None and "memory_limit" in step.options.names
    return ["a higher memory_limit"] if is_set else []


def _precision(step: GradientStep, said: str) -> list[str]:
    if "precision" not in step.options.names:
        return []
    name = step.precision.name
    if name == "fp32":
        return ["precision='bf16'"]
    if _UNSUPPORTED not in said:
        return []
    halved = isinstance(step, TrainingStep) and step.updates.weights is not None
    instead = "float32 weights (weights=None)" if halved else "precision='fp32'"
    return [f"{instead}, since this processor may have no such operator in {name}"]


def _savings(step: GradientStep) -> list[str]:
    ways = ways_left(step.objective.modules, step.memory)
    if "memory" in step.options.names and not step.is_sharded:  # which it does not go with
        return [f"memory={way!r}" for way in ways]
    return ["activation checkpointing"] if "checkpoint" in ways else []


def _less_state(step: GradientStep) -> list[str]:
    """An optimizer with less state, if the one in use keeps two numbers for each parameter as Adam does."""
    kinds = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
    if not isinstance(step, TrainingStep) or not isinstance(step.optimizer, kinds):
        return []
    return [f"an optimizer with less state than {name_of(step.optimizer)}"]


# --- sentences --------------------------------------------------------------------------------------------------------


def _composed(step: GradientStep, what: str, said: str, remedies: Iterable[str], times: str = "") -> str:
    """Return a text of at most three lines: the last remedies go first, and then what the device said is shortened."""
    left, memory = list(remedies), step.memory
    room = describe_room(memory)
    head = f"{what} on {memory.name}"
    if memory.limit_bytes is not None:
        head += f" under {room}"
        room = ""
    head += times

    def of(found: str) -> str:
        return f"{head}{f' ({found})' if found else ''}; try {_joined(left, 'or')}"

    while len(left) > 1 and len(of("")) + min(len(said), _LEAST_SAID) > _MOST:
        left.pop()
    said = textwrap.shorten(said, max(_MOST - len(of("")), _LEAST_SAID), placeholder=" ...")
    found = "; ".join(part for part in (said, room) if part)
    return of(found) if len(of(found)) <= _MOST else of(said)


def _joined(parts: list[str], word: str) -> str:
    if len(parts) < 3:  # noqa: PLR2004 - a comma separates three
        return f" {word} ".join(parts)
    return f"{', '.join(parts[:-1])}, {word} {parts[-1]}"
