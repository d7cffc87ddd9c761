"""Writes the errors for what does not fit: what was asked, what was found, and what the caller can do.

A remedy that is an argument is named only if the function that the user has called takes it (`Options.names`).
Free memory is mentioned only where little is left: why it does not suffice is not known otherwise.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._data.nesting import shapes_of_sample
from autoaccum._data.splits import is_default
from autoaccum._engine.optimizers import name_of
from autoaccum._engine.out_of_memory import Phase
from autoaccum._memory.limits import describe_room
from autoaccum._oom import clear_traceback_frames
from autoaccum._saving.savings import ways_left
from autoaccum.errors import DoesNotFitError

if TYPE_CHECKING:
    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._memory.base import MemoryBackend

# In so many characters, the phase and the device's own message say how much was asked for.
_QUOTED = 110
_MOST_SHAPES = 90  # characters
# Three lines of 120 characters, less what their ends leave free.
_MOST = 345
# What oneDNN says of lack of memory, and of an operator that it does not have on this processor in this type.
_UNSUPPORTED = "could not create a primitive descriptor"

ONE_SAMPLE = "one sample"

# In these, nothing is kept for a backward pass.
_OF_THE_OPTIMIZER = (Phase.RESERVE, Phase.UNSCALE, Phase.CLIP, Phase.OPTIMIZER)
_OVER_THE_WINDOW = (Phase.FORWARD, Phase.BACKWARD)
# Optimizers that keep two numbers for each parameter.
_OF_TWO_STATES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)


def sample_of(window: Window, index: int) -> str:
    """Return which sample of a window it is, in words, with the shapes of its tensors."""
    if index >= window.samples:  # another process has it
        return ONE_SAMPLE
    try:
        batch = window.cut(index, index + 1)
    except Exception as error:  # noqa: BLE001 - a collator that fails, by lack of memory or else, must not hide the error
        clear_traceback_frames(error)
        return window.named(index) or ONE_SAMPLE
    return described(batch, window.named(index), has_rows=is_default(window.split))


def described(batch: Any, name: str | None = None, *, has_rows: bool = True) -> str:
    """Return a batch of one sample in words, with its name; samples run along the first dimension if it `has_rows`."""
    shapes = shapes_of_sample(batch, has_rows=has_rows)
    if not shapes:
        return name or ONE_SAMPLE
    shown = len(shapes)
    while shown > 1 and len(", ".join(shapes[:shown])) > _MOST_SHAPES:
        shown -= 1
    more = len(shapes) - shown
    listed = f"{', '.join(shapes[:shown])} and {more} more" if more else _joined(shapes, "and")
    of_shapes = f"of shape{'s' if len(shapes) > 1 else ''} {listed}"
    return f"a sample {of_shapes}" if name is None else f"{name}, {of_shapes},"


def sample_does_not_fit(
    step: GradientStep, said: str, *, sample: str = ONE_SAMPLE, phase: str | None = None, is_whole: bool = False
) -> DoesNotFitError:
    """Return the error for a sample that does not fit alone."""
    remedies = [*_limit(step), *_precision(step, said), *["fewer samples in a window"] * is_whole]
    if phase == Phase.EVALUATE:
        remedies += ["smaller inputs"]
    else:
        remedies += [*_savings(step), "smaller inputs", *_less_state(step)]
    where = "" if phase is None else f"in {Phase(phase).text}: "
    return refusal(step.memory, f"{sample} does not fit", where + said, remedies)


def whole_does_not_fit(
    step: GradientStep, said: str, phase: str, tries: int, what: str | None = None
) -> DoesNotFitError:
    """Return the error for something that takes the same memory in micro-batches of any size."""
    limit = _limit(step)
    if phase in _OF_THE_OPTIMIZER:
        remedies = [*limit, *_less_state(step), "an optimizer with foreach=False", "a smaller model"]
    elif phase == Phase.WEIGH:
        says = ["loss_reduction='mean' or 'sum'"] if "loss_reduction" in step.options.names else []
        remedies = [*says, *limit, *_precision(step, said), *_savings(step), "smaller inputs"]
    elif phase in (*_OVER_THE_WINDOW, Phase.EVALUATE):
        unit = "batch" if phase == Phase.EVALUATE else "window"
        remedies = [f"fewer samples in a {unit}", *limit, *_precision(step, said)]
    else:
        remedies = [*limit, *["smaller buffers"] * (phase == Phase.SAVE), "a smaller model"]
    if what is None:
        what = "the loss over the whole window" if phase in _OVER_THE_WINDOW else Phase(phase).text
    times = "even with no activations alive" if phase in _OF_THE_OPTIMIZER else f"in {tries} attempts"
    error = refusal(step.memory, f"{what} does not fit, {times},", said, remedies)
    error.saving_helps = phase not in _OF_THE_OPTIMIZER
    return error


def _limit(step: GradientStep) -> list[str]:
    is_set = step.memory.limit_bytes is not None and "memory_limit" in step.options.names
    return ["a higher memory_limit"] if is_set else []


def _precision(step: GradientStep, said: str) -> list[str]:
    """A precision of less activations, or one for which there are operators."""
    name = step.precision.name
    if name == "fp32":
        return ["precision='bf16'"] if "precision" in step.options.names else []
    return [f"float32, since this processor may have no such operator in {name}"] * (_UNSUPPORTED in said)


def _savings(step: GradientStep) -> list[str]:
    ways = ways_left(step.objective.modules, step.memory)
    if "save_memory" in step.options.names and not step.is_sharded:  # which it does not go with
        return [f"save_memory={way!r}" for way in ways]
    return ["activation checkpointing"] if "checkpoint" in ways else []


def _less_state(step: GradientStep) -> list[str]:
    if not isinstance(step.optimizer, _OF_TWO_STATES):
        return []
    return [f"an optimizer with less state than {name_of(step.optimizer)}"]


def refusal(memory: MemoryBackend, what: str, said: str, remedies: list[str]) -> DoesNotFitError:
    """Compose an error of at most three lines, for which the room, and then the last remedies, are left out."""
    room, found = describe_room(memory), textwrap.shorten(said, _QUOTED, placeholder=" ...")
    where = f"{what} on {memory.name}{f' under {room}' if memory.limit_bytes is not None else ''}"
    forms = [f"{where} ({found}; {room})"] if room and memory.limit_bytes is None else []
    forms.append(f"{where} ({found})")
    shown = range(len(remedies), 0, -1)
    texts = [f"{form}; try {_joined(remedies[:number], 'or')}" for number in shown for form in forms]
    return DoesNotFitError(next((text for text in texts if len(text) <= _MOST), texts[-1]))


def _joined(parts: list[str], word: str) -> str:
    if len(parts) < 3:  # noqa: PLR2004 - a comma separates three
        return f" {word} ".join(parts)
    return f"{', '.join(parts[:-1])}, {word} {parts[-1]}"
