"""Rehearses a plan on the device: measures memory by part and the time of an optimizer step, and warns of risks.

Like a trial, it restores parameters, buffers, gradients, optimizer state and random state bit for bit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import Window, count
from autoaccum._data.nesting import plain_parts
from autoaccum._engine.probing import Trials, without_moving_weights
from autoaccum._estimate.trace import Footprint
from autoaccum._memory._storages import gradient_bytes
from autoaccum._memory.limits import format_bytes
from autoaccum._oom import is_oom, is_too_large, let_go
from autoaccum._report.records import Pace
from autoaccum._sizing.planner import balanced
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._records import Plan

# Timed runs; the fastest counts, because the first warms up and other load only slows.
_TIMED = 2


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The findings of a rehearsal.

    Attributes:
        footprint: The memory by part, including the model; None if the device does not count peaks.
        pace: The time of an optimizer step.
        warnings: What may go wrong.
    """

    footprint: Footprint | None
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
            return _Stage(step, batch, plan, trials).play()
    except Exception as error:
        if not (is_oom(error) or is_too_large(error)):
            raise
        let_go(error)
        return None
    finally:
        trials.end()
        step.memory.release()


class _Stage:
    """One rehearsal, under the limit."""

    def __init__(self, step: TrainingStep, batch: Any, plan: Plan, trials: Trials) -> None:
        self._step = step
        self._batch = batch
        self._plan = plan
        self._trials = trials
        self._warnings: list[str] = []

    def play(self) -> Rehearsal:
        step, size = self._step, self._plan.micro_batch
        # Gradients and state first: made in memory that a larger size leaves, they would hold all of it.
        self._run(min(size, 2))
        step.memory.release()
        peak = self._run(size)
        growing = self._trials.growing_bytes.get(size)
        pace, allocated = self._timed(size, peak)
        footprint = None if peak is None else self._footprint(size, peak, growing or peak, allocated)
        self._warn_of_untouched()
        self._warn_of_loss()
        return Rehearsal(footprint, pace, tuple(self._warnings))

    def _run(self, size: int) -> int | None:
        trial = self._trials.run(size)
        if not trial.fits:
            raise torch.OutOfMemoryError(f"a micro-batch of {size} fitted a moment ago and no longer does")
        return trial.peak_bytes

    def _timed(self, size: int, peak: int | None) -> tuple[Pace, int | None]:
        """Return the pace, and on a GPU the peak memory held by tensors."""
        step, memory = self._step, self._step.memory
        memory.ensure((peak or 0) - (self._trials.held_bytes or 0))
        memory.reset_peak()
        seconds = []
        for _ in range(_TIMED):
            memory.synchronize()
            started = time.perf_counter()
            self._trials.one_micro_batch(size)
            memory.synchronize()
            seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        with without_moving_weights(step.optimizer):
            step.optimizer_steps.make()
        memory.synchronize()
        optimizer_s = time.perf_counter() - started
        is_cuda = memory.device.type == "cuda"
        allocated = torch.cuda.max_memory_allocated(memory.device) if is_cuda else None
        # The time of smaller micro-batches is assumed proportional to their size.
        step_s = min(seconds) * self._plan.target_batch / size + optimizer_s
        return Pace(min(seconds), optimizer_s, step_s, self._plan.target_batch / step_s), allocated

    def _footprint(self, size: int, peak: int, growing: int, allocated: int | None) -> Footprint:
        step = self._step
        on_gpu = step.memory.device.type != "cpu"
        tensors = [*step.parameters, *_buffers(step.objective.modules)]
        parameters = sum(tensor.nbytes for tensor in step.parameters)
        buffers = sum(tensor.nbytes for tensor in tensors) - parameters
        gradients = gradient_bytes(step.parameters)
        state = _state_bytes(step.optimizer)
        # On a GPU the next micro-batch is transferred while the current one runs.
        window = Window([self._batch], self._step.objective.split)
        one_bytes = sum(tensor.nbytes for tensor in window.tensors()) // window.samples
        inputs = size * one_bytes * (2 if on_gpu else 1)
        reserved = peak if on_gpu else peak + parameters + buffers
        in_optimizer_step = peak > growing
        highest = reserved if allocated is None else min(allocated, reserved)
        rest = highest - parameters - buffers - gradients - state - inputs
        # All that grows with the samples, but in an optimizer step, where no activations are left.
        activations = 0 if in_optimizer_step else max(0, rest)
        temporary = max(0, rest - activations)
        highest = parameters + buffers + gradients + state + inputs + activations + temporary
        return Footprint(
            size=size,
            phase="optimizer" if in_optimizer_step else "backward",
            peak_bytes=highest,
            reserved_bytes=max(reserved, highest),
            parameters_bytes=parameters,
            buffers_bytes=buffers,
            gradients_bytes=gradients,
            optimizer_bytes=state,
            inputs_bytes=inputs,
            activations_bytes=activations,
            temporary_bytes=temporary,
        )

    def _warn_of_untouched(self) -> None:
        untouched = [p for p in self._step.parameters if p.requires_grad and p.grad is None]
        if untouched:
            size = format_bytes(sum(parameter.nbytes for parameter in untouched))
            self._warnings.append(
                f"{len(untouched)} parameters ({size}) require a gradient and got none from this batch; if a later "
                "batch gives them one, their gradients and optimizer state need additional memory"
            )

    def _warn_of_loss(self) -> None:
        """Infer the loss's reduction as the first window does, and warn if the gradient may differ from the whole's."""
        step, samples = self._step, count(self._batch, self._step.objective.split)
        if self._plan.accum_steps == 1 or samples == 1:
            return
        mark = step.savepoint()
        sizes = balanced(samples, min(self._plan.micro_batch, samples - 1))
        try:
            window = Window([self._batch], step.objective.split)
            if step.objective.needs_check(window, sizes, is_part=False, is_due=True):
                step.objective.check(window, step.transfer.place, mark, step.precision.autocast, step.parameters)
        except InvalidInputError as error:
            self._warnings.append(str(error))
        except Exception as error:
            if not (is_oom(error) or is_too_large(error)):
                raise
            let_go(error)
            return
        self._warnings += step.objective.weights.warnings


def _buffers(modules: Sequence[nn.Module]) -> list[Tensor]:
    return list(dict.fromkeys(buffer for module in modules for buffer in module.buffers()))


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = torch.utils._pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
    return sum(part.nbytes for tensor in tensors if isinstance(tensor, Tensor) for part in plain_parts(tensor))
