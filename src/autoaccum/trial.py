"""One real training step of one size: does it fit, what does it take, how long does it last?"""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum.batches import Window, copied, repeated
from autoaccum.errors import StateDamagedError
from autoaccum.objective import Factors
from autoaccum.oom import is_oom, is_too_large, let_go
from autoaccum.records import Trial
from autoaccum.step import Accumulated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum.step import TrainingStep


class Trials:
    """Runs trials of a training step; what they change is put back by whoever made a snapshot before.

    A trial meets the memory of a step in the middle of training: gradients and optimizer state are there before it
    begins, and the next micro-batch is on its way.

    Args:
        step: The training step to try.
        batch: Its samples are repeated to make a micro-batch of any size.
    """

    def __init__(self, step: TrainingStep, batch: Any) -> None:
        self._step = step
        self._batch = batch
        self._with_gradient: list[torch.nn.Parameter] | None = None

    def run(self, size: int, *, expected_bytes: int = 0) -> Trial:
        """Try one size.

        Args:
            size: Samples in the micro-batch.
            expected_bytes: What it is likely to take beyond what is held; where that cannot be had the step is not
                begun, and does not fit.

        Returns:
            What came of it. Errors that are not lack of memory arrive as they are.
        """
        memory = self._step.memory
        memory.reset_peak()
        started = time.perf_counter()
        fits = True
        try:
            memory.ensure(expected_bytes)
            if self._with_gradient is None:
                # The first step makes what later ones find: gradients and the optimizer's state.
                self._one_step(size)
                self._with_gradient = [p for p in self._step.parameters if p.grad is not None]
                memory.synchronize()
                memory.reset_peak()
                started = time.perf_counter()
            self._one_step(size)
            memory.synchronize()
        except Exception as error:
            # An optimizer that memory failed half-way has harmed nothing here: everything is put back in the end.
            half_way = isinstance(error, StateDamagedError) and error.__cause__ is not None and is_oom(error.__cause__)
            if not (is_oom(error) or is_too_large(error) or half_way):
                raise
            fits = False
            let_go(error)
        elapsed_s = time.perf_counter() - started
        if fits:
            return Trial(size, fits, memory.peak_bytes(), elapsed_s)
        # After the handler: inside it the traceback still pins the activations.
        self._step.abandon()
        memory.release()
        return Trial(size, fits, None, elapsed_s)

    def _one_step(self, size: int) -> None:
        for parameter in self._with_gradient or ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # A copy, as a transfer makes one: a model that changes its input must not change the user's batch.
        batch = copied(repeated(self._batch, size))
        with closing(self._step.transfer.feed(Window([batch, batch]), [size, size])) as feed:
            self._step.accumulate(next(feed), size, Factors(1.0, 1.0 / size, alone=False), Accumulated())
        with _standing_still(self._step.optimizer):
            self._step.update()


@contextmanager
def _standing_still(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the optimizer do all its work, but stay where it is: trials that drift can diverge.

    Hooks that a user has hung on it (an average of the weights) are no part of the step and would count the trials.
    """
    hooks: tuple[Any, ...] = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    kept = [dict(table) for table in hooks]
    for table in hooks:
        table.clear()
    before = [group.get("lr") for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, before, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            if rate is not None:
                group["lr"] = rate
        for table, entries in zip(hooks, kept, strict=True):
            table.update(entries)
