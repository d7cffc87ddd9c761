"""Searches for the largest micro-batch by running real training steps of several sizes, without side effects."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._arguments import check_positive_int
from autoaccum._data.batches import count, repeated, repeating
from autoaccum._data.nesting import copied
from autoaccum._data.order import by_size
from autoaccum._data.splits import is_default
from autoaccum._engine import devices
from autoaccum._engine.assembly import assemble
from autoaccum._engine.does_not_fit import described, sample_does_not_fit
from autoaccum._engine.gradients import PartResult
from autoaccum._engine.optimizer_step import OptimizerCopy
from autoaccum._engine.options import Options
from autoaccum._engine.out_of_memory import Phase, resolvable_oom
from autoaccum._engine.window_loss import WholeWindow
from autoaccum._loss.known_shares import SingleMicroBatch
from autoaccum._memory.available_devices import backend_for
from autoaccum._oom import clear_traceback_frames, is_oom
from autoaccum._records import ProbeResult, Trial
from autoaccum._saving.savings import Savings
from autoaccum._sizing.frontier import Frontier
from autoaccum._sizing.search import Search
from autoaccum._system import signals
from autoaccum._system.notices import Notices
from autoaccum.errors import StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._engine.savepoint import SavedState
    from autoaccum._loss.loss_sources import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import MemoryEvent
    from autoaccum._sizing.frontier import Widths
    from autoaccum.errors import DoesNotFitError


def find_micro_batch(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    loss_scope: str = "micro_batch",
    forward: Callable[[nn.Module, Any], Any] | None = None,
    split: Split | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakesOptimizer | str | None = None,
    device: str | torch.device | MemoryBackend | None = None,
    precision: str = "auto",
    max_micro_batch: int | None = None,
    memory_limit: float | str | None = None,
    save_memory: str | Sequence[str] | None = None,
) -> ProbeResult:
    """Find the largest micro-batch with which a whole training step fits.

    Each size is tried with a real step: forward, backward and optimizer, with gradients and optimizer state in place.
    Afterwards parameters, buffers, gradients, optimizer state, random state and modes are bit for bit what they were;
    only the model's device may have changed. Not put back, if the model's own code writes them, are frozen parameters,
    and large buffers of whole numbers, that together are larger than 64 MiB and than the trained parameters.

    Args:
        model: The model. It is moved to the device and stays there.
        batch: A batch as the loader yields it. Its samples are repeated to make larger ones; of a list of samples, the
            largest come first.
        loss: As for `fit`.
        loss_scope: As for `fit`. With "window", the loss is computed over a window of `max_micro_batch` samples.
        forward: As for `fit`.
        split: As for `fit`.
        optimizer: As for `fit`. Its state is included.
        device: As for `fit`.
        precision: As for `fit`.
        max_micro_batch: The largest size of interest; None means the batch's own length.
        memory_limit: As for `fit`.
        save_memory: As for `fit`, while sizes are tried.

    Returns:
        The largest size that was tried and fits, and every trial.

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: Not even one sample fits.
        DeviceLostError: This process can no longer use the device.
    """
    options = Options.of(find_micro_batch, locals())
    notices = Notices(holds_choices=True)
    samples = count(batch, split)
    largest = samples if max_micro_batch is None else check_positive_int("max_micro_batch", max_micro_batch)
    backend = devices.resolve(device, model, notices)
    limit_bytes, names = options.limit_bytes(backend), options.savings(backend)
    step = assemble(model, options, memory=backend, notices=notices)
    savings = Savings(step.objective.modules, names, backend, notices)
    notices.tell_choices()
    return savings.run(lambda: probe(step, by_size(batch, split), largest, limit_bytes))


def probe(
    step: TrainingStep,
    batch: Any,
    max_micro_batch: int,
    limit_bytes: int | None,
    on_trial: Callable[[Trial], None] = lambda _: None,
    *,
    begins_with: int | None = None,
    frontier: Frontier | None = None,
) -> ProbeResult:
    """Search with an assembled training step; the limit applies only during the search.

    Args:
        step: The training step. If its loss runs over a window, that has `max_micro_batch` samples.
        batch: Samples to repeat.
        max_micro_batch: The largest size of interest.
        limit_bytes: Limit, as the memory backend counts; None for all available memory.
        on_trial: Called after each trial.
        begins_with: The result of an earlier search. If it fits, it is returned without further trials.
        frontier: What an earlier search has found; follows what this one finds.
    """
    memory = step.memory
    host = memory if memory.device.type == "cpu" else backend_for(torch.device("cpu"))
    with devices.oom_explained(host, "the copy of all that a search puts back"):
        running = Trials(step, batch, max_micro_batch if step.options.loss_scope == "window" else None)
    frontier = Frontier() if frontier is None else frontier
    if begins_with is None or begins_with > max_micro_batch:
        frontier.forget()
        begins_with = None
    search = Search(frontier, begins_with=begins_with, fails_cleanly=memory.fails_cleanly, is_soft=memory.is_soft)
    with devices.oom_explained(memory, "the search for a micro-batch"):
        try:
            with memory.limited(limit_bytes):
                trials, widths = _search(running, search, max_micro_batch, on_trial)
        finally:
            running.end()
    line = frontier.line(widths)
    return ProbeResult(
        max(trial.size for trial in trials if trial.fits),
        tuple(trials),
        limit_bytes,
        None if line is None else max(0, int(line.fixed_bytes + (running.held_bytes or 0))),
        None if line is None else int(line.bytes_per_sample),
    )


def _search(
    running: Trials, search: Search, max_micro_batch: int, on_trial: Callable[[Trial], None]
) -> tuple[list[Trial], Widths]:
    """Return the trials, one of which fits, and the widths of their samples."""
    trials: list[Trial] = []
    ((_, widths),) = running.window(1).widths()[0]
    while (size := search.next_trial(widths, max_micro_batch, running.free_bytes)) is not None:
        line = search.frontier.line(widths)
        try:
            trials.append(running.run(size, expected_bytes=0 if line is None else int(line.at(size))))
        except ValueError as error:
            if size > 1 or not trials:
                raise
            # BatchNorm rejects a single value per channel; one sample is tried only because two ran out of memory.
            raise running.does_not_fit(f"one sample alone is refused: {error}") from error
        on_trial(trials[-1])
        search.tried(size, widths, running.extra_bytes(size), fits=trials[-1].fits)
    if not any(trial.fits for trial in trials):
        event = running.oom_event
        assert event is not None
        raise running.does_not_fit(event.message, event.phase)
    return trials, widths


class Trials:
    """Runs trials of a training step, until `end` puts everything back.

    A trial reproduces the memory use of a step in the middle of training: gradients and optimizer state exist before it
    begins, the state to restore after a failure is copied, and the next micro-batch is being transferred.

    Args:
        step: The training step.
        batch: Samples to repeat.
        samples: Those of a window that the loss runs over; None if it runs over micro-batches.

    Attributes:
        held_bytes: Bytes held between trials, counted as peaks are; None if that is not counted.
        free_bytes: Bytes that are free between them; None if that is not known.
        oom_event: What happened when memory last ran out; None if it has not.
    """

    def __init__(self, step: TrainingStep, batch: Any, samples: int | None = None) -> None:
        self._step = step
        self._batch = batch
        self._before: SavedState | None = None  # the state before the trials
        self._samples = samples
        self._whole = None if samples is None else WholeWindow(step)
        # On the host, and before a limit begins, since they are no part of a step.
        self._optimizer = OptimizerCopy(step.optimizer, step.precision.scaler)
        self._gradients = [(one, one.grad) for one in step.parameters]
        step.clear_gradients()
        self.oom_event: MemoryEvent | None = None
        self.held_bytes: int | None = None
        self.free_bytes: int | None = None
        self._growing_bytes: dict[int, int | None] = {}  # by size that fits: the peak of all but the optimizer step
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
            if (overrun := memory.describe_overrun(memory.peak_bytes())) is not None:
                raise torch.OutOfMemoryError(overrun)  # noqa: TRY301 - as an allocator would, and undone in the same way
        except Exception as error:
            # An optimizer that ran out of memory midway does no harm here: everything is restored in the end.
            half_way = isinstance(error, StateDamagedError) and error.__cause__ is not None and is_oom(error.__cause__)
            cause = error.__cause__ if half_way and isinstance(error.__cause__, Exception) else error
            phase = self._step.stage.phase
            event = resolvable_oom(cause, phase, size, self._step.witness, is_trial=True)
            if event is None:
                raise
            self.oom_event, fits = event, False
            clear_traceback_frames(error)
        elapsed_s = time.perf_counter() - started
        peak = memory.peak_bytes() if fits else None
        if fits:
            memory.trim()
        else:
            # After the handler: inside it the traceback still pins the activations.
            self._step.drop_progress()
            memory.release()
        memory.reset_peak()
        self.held_bytes = memory.peak_bytes()
        if self.held_bytes is not None:
            self.free_bytes = memory.reading().free_bytes
        return Trial(size, fits, peak, elapsed_s)

    def extra_bytes(self, size: int) -> int | None:
        """Return what a size took of memory beside what is held; None if not counted, or if it did not run through.

        Of its step only what grows with the size: if the optimizer step takes more than a small micro-batch, all small
        ones share its peak.
        """
        peak = self._growing_bytes.get(size)
        return None if peak is None or self.held_bytes is None else peak - self.held_bytes

    def does_not_fit(self, said: str, phase: str | None = None) -> DoesNotFitError:
        """Return the error for a sample that does not fit alone, given what the device said."""
        split, is_whole = self._step.objective.split, self._whole is not None and phase is not None
        if is_whole:
            said = f"the loss takes all {self._samples} samples of a window at once; {said}"
        sample = described(repeated(self._batch, 1, split), has_rows=is_default(split))
        return sample_does_not_fit(self._step, said, sample=sample, phase=phase, is_whole=is_whole)

    def window(self, samples: int) -> Window:
        """Return a window of so many of the samples."""
        return repeating(self._batch, samples, self._step.objective.split)

    def end(self) -> None:
        """Put everything back; tensors keep their identity."""
        with signals.deferred():
            self._step.drop_progress()
            self._optimizer.undo()
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            if self._before is not None:
                self._before.restore()

    def _one_step(self, size: int) -> None:
        for parameter in self._with_gradient or ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._before is not None:
            self._before.restore()
        else:
            self._before = self._step.savepoint.save(is_thorough=True)  # as before the first window: most is held
        if self._whole is None or self._samples is None:
            self.one_micro_batch(size)
        else:  # with all the memory of a window, but only the first of its micro-batches
            self._whole.run(self.window(self._samples), [min(size, self._samples)], self._before)
        self._growing_bytes[size] = self._step.memory.peak_bytes()
        with without_moving_weights(self._step.optimizer):
            self._step.optimizer_steps.make()

    def one_micro_batch(self, size: int) -> None:
        """Run forward and backward of one size while the next micro-batch is being transferred; catches nothing."""
        # A copy, as a transfer makes: a model that modifies its input must not modify the user's batch.
        batch = copied(repeated(self._batch, size, self._step.objective.split))
        with closing(self._step.transfer.send([batch, batch])) as feed:
            self._step.accumulate(next(feed), size, SingleMicroBatch(self._step.objective.knowledge), PartResult(size))


@contextmanager
def without_moving_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
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
