"""Rehearses a plan on the device: measures its peak and the time of an optimizer step, and warns of risks.

Like a trial, it restores parameters, buffers, gradients, optimizer state and random state bit for bit.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autoaccum._data.batches import Window, count
from autoaccum._engine.probing import Trials, without_moving_weights
from autoaccum._memory.limits import format_bytes
from autoaccum._oom import clear_traceback_frames, is_oom, is_too_large
from autoaccum._report.records import Pace
from autoaccum._sizing.planner import balanced
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._records import Plan, Trial

# Timed runs; the fastest counts, because the first warms up and other load only slows.
_TIMED = 2


class Rehearsal(NamedTuple):
    """The trial of the plan's largest micro-batch, the time of an optimizer step, and what may go wrong."""

    trial: Trial
    pace: Pace
    warnings: tuple[str, ...]


def rehearse(step: TrainingStep, batch: Any, plan: Plan, limit_bytes: int | None) -> Rehearsal | None:
    """Rehearse a plan.

    Args:
        step: The training step.
        batch: Samples, repeated to make larger batches.
        plan: A plan whose largest micro-batch was tried and fits.
        limit_bytes: The limit, as the memory backend counts; None for no limit.

    Returns:
        The findings; None if memory ran out, which the trials should rule out.
    """
    trials = Trials(step, batch)
    try:
        with step.memory.limited(limit_bytes):
            # Gradients and state first: made in memory that a larger size leaves, they would hold all of it.
            _run(trials, min(plan.micro_batch, 2))
            step.memory.release()
            trial = _run(trials, plan.micro_batch)
            pace = _timed(step, trials, trial, plan)
            return Rehearsal(trial, pace, (*_untouched(step), *_doubts_of_loss(step, batch, plan)))
    except Exception as error:
        if not (is_oom(error) or is_too_large(error)):
            raise
        clear_traceback_frames(error)
        return None
    finally:
        trials.end()
        step.memory.release()


def _run(trials: Trials, size: int) -> Trial:
    trial = trials.run(size)
    if not trial.fits:
        raise torch.OutOfMemoryError(f"a micro-batch of {size} fitted a moment ago and no longer does")
    return trial


def _timed(step: TrainingStep, trials: Trials, trial: Trial, plan: Plan) -> Pace:
    memory, seconds = step.memory, []
    memory.ensure((trial.peak_bytes or 0) - (trials.held_bytes or 0))
    for _ in range(_TIMED):
        memory.synchronize()
        started = time.perf_counter()
        trials.one_micro_batch(trial.size)
        memory.synchronize()
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    with without_moving_weights(step.optimizer):
        step.optimizer_steps.make()
    memory.synchronize()
    optimizer_s = time.perf_counter() - started
    # The time of smaller micro-batches is assumed proportional to their size.
    step_s = min(seconds) * plan.target_batch / trial.size + optimizer_s
    return Pace(min(seconds), optimizer_s, step_s, plan.target_batch / step_s)


def _untouched(step: TrainingStep) -> list[str]:
    """Return a warning of parameters without a gradient, if there are any."""
    untouched = [parameter for parameter in step.parameters if parameter.requires_grad and parameter.grad is None]
    if not untouched:
        return []
    size = format_bytes(sum(parameter.nbytes for parameter in untouched))
    text = (
        f"{len(untouched)} parameters ({size}) require a gradient and got none from this batch; if a later batch gives "
        "them one, their gradients and optimizer state need additional memory"
    )
    return [text]


def _doubts_of_loss(step: TrainingStep, batch: Any, plan: Plan) -> list[str]:
    """Infer the loss's reduction as the first window does, and warn if the gradient may differ from the whole's."""
    samples = count(batch, step.objective.split)
    if plan.accum_steps == 1 or samples == 1:
        return []
    warnings = []
    sizes = balanced(samples, min(plan.micro_batch, samples - 1))
    try:
        window = Window([batch], step.objective.split)
        if step.objective.needs_check(window, sizes, is_part=False, is_due=True):
            step.objective.check(window, step.transfer.place, step.savepoint, step.precision.autocast, step.parameters)
    except InvalidInputError as error:
        warnings.append(str(error))
    except Exception as error:
        if not (is_oom(error) or is_too_large(error)):
            raise
        clear_traceback_frames(error)
        return []
    return [*warnings, *step.objective.knowledge.said.texts]
