"""Runs one real training step of one size, to determine whether it fits, its peak memory and its duration."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import repeated, repeating
from autoaccum._data.nesting import copied
from autoaccum._data.splits import is_default
from autoaccum._engine.does_not_fit import described
from autoaccum._engine.gradients import PartResult
from autoaccum._engine.lack_of_memory import resolvable_lack
from autoaccum._engine.phases import Phase
from autoaccum._engine.savepoint import Savepoint
from autoaccum._loss.loss_weights import Factors
from autoaccum._oom import is_oom, let_go
from autoaccum._records import Trial
from autoaccum.errors import StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.window_loss import WholeWindow
    from autoaccum._records import MemoryEvent


class Trials:
    """Runs trials of a training step. The caller must take a snapshot before, and restore it after.

    A trial reproduces the memory use of a step in the middle of training: gradients and optimizer state exist before it
    begins, the state to restore after a failure is copied, and the next micro-batch is being transferred.

    Args:
        step: The training step to try.
        batch: A batch or a window, whose samples are repeated to make a micro-batch of any size.
        whole: Runs a window whose loss is computed over all of it; None if every micro-batch has its own loss.
        samples: Samples in such a window.

    Attributes:
        held_bytes: Bytes held between trials, counted as peaks are; None if that is not counted.
        free_bytes: Bytes that are free between them; None if that is not known.
        lack: What happened when memory last ran out; None if it has not.
        growing_bytes: For each size that fits, the peak of the part of its step that grows with it: all but the update.
    """

    def __init__(
        self, step: TrainingStep, batch: Any, whole: WholeWindow | None = None, samples: int | None = None
    ) -> None:
        self._step = step
        self._batch = batch
        self._whole = whole
        saved = None if step.is_sharded else lambda: step.parameters
        modules, functions = step.objective.modules, step.objective.functions
        self._savepoint = Savepoint(modules, step.memory.device, functions, parameters=saved)
        split = step.objective.split
        self._window = None if whole is None or samples is None else repeating(batch, samples, split)
        self.lack: MemoryEvent | None = None
        self.held_bytes: int | None = None
        self.free_bytes: int | None = None
        self.growing_bytes: dict[int, int | None] = {}
        self._with_gradient: list[torch.nn.Parameter] | None = None

    def run(self, size: int, *, expected_bytes: int = 0) -> Trial:
        """Try one size. Errors other than lack of memory pass through unchanged.

        If `expected_bytes`, the expected peak, are not available, the step is not run and does not fit.
        """
        memory = self._step.memory
        memory.reset_peak()
        started = time.perf_counter()
        fits = True
        self._step.stage.phase = Phase.TRANSFER
        try:
            memory.ensure(expected_bytes - (self.held_bytes or 0))
            if self._with_gradient is None:
                # The first step creates what later ones find: gradients and the optimizer's state.
                self._one_step(size)
                self._with_gradient = [p for p in self._step.parameters if p.grad is not None]
                memory.synchronize()
                memory.reset_peak()
                started = time.perf_counter()
            self._one_step(size)
            memory.synchronize()
            if (excess := memory.excess(memory.peak_bytes())) is not None:
                raise torch.OutOfMemoryError(excess)  # noqa: TRY301 - as an allocator would, and undone in the same way
        except Exception as error:
            # An optimizer that ran out of memory midway does no harm here: everything is restored in the end.
            half_way = isinstance(error, StateDamagedError) and error.__cause__ is not None and is_oom(error.__cause__)
            cause = error.__cause__ if half_way and isinstance(error.__cause__, Exception) else error
            phase = self._step.phase
            lack = resolvable_lack(cause, phase, size, self._step.witness, is_trial=True)
            if lack is None:
                raise
            self.lack, fits = lack, False
            let_go(error)
        elapsed_s = time.perf_counter() - started
        peak = memory.peak_bytes() if fits else None
        if fits:
            memory.trim()
        else:
            # After the handler: inside it the traceback still pins the activations.
            self._step.abandon()
            memory.release()
        memory.reset_peak()
        self.held_bytes = memory.peak_bytes()
        if self.held_bytes is not None:
            self.free_bytes = memory.reading().free_bytes
        return Trial(size, fits, peak, elapsed_s)

    def extra_bytes(self, size: int) -> int | None:
        """Return what a size took of memory beside what is held; None if that is not counted, or it did not run through.

        Of its step only what grows with the size: if the update takes more than a small micro-batch, all small ones
        share its peak.
        """
        peak = self.growing_bytes.get(size)
        return None if peak is None or self.held_bytes is None else peak - self.held_bytes

    def sample(self, name: str | None = None) -> str:
        """Return a sample of those that are tried, in words, with its name if it has one."""
        split = self._step.objective.split
        return described(repeated(self._batch, 1, split), name, has_rows=is_default(split))

    def _one_step(self, size: int) -> None:
        for parameter in self._with_gradient or ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._savepoint.take(is_thorough=True)  # as before the first window, for which most is held
        if self._whole is None or self._window is None:
            self.one_micro_batch(size)
        else:
            self._whole.rehearse(self._window, size)
        self.growing_bytes[size] = self._step.memory.peak_bytes()
        with without_updates(self._step.optimizer):
            self._step.updates.make()

    def one_micro_batch(self, size: int) -> None:
        """Run forward and backward of one size while the next micro-batch is being transferred; catches nothing."""
        # A copy, as a transfer makes: a model that modifies its input must not modify the user's batch.
        batch = copied(repeated(self._batch, size, self._step.objective.split))
        with closing(self._step.transfer.send([batch, batch])) as feed:
            self._step.accumulate(next(feed), size, Factors(alone=True), PartResult())


@contextmanager
def without_updates(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the optimizer do all its work without changing the parameters: trials that drift can diverge.

    The user's hooks on it (such as an average of the weights) are disabled: they are not part of the step, and would
    count the trials.
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
