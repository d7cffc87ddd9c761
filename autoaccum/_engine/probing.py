"""Searches for the largest micro-batch by running real training steps of several sizes, without side effects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import check_positive_int
from autoaccum._data.batches import count, repeating
from autoaccum._data.sample_sizes import by_size
from autoaccum._engine import devices
from autoaccum._engine.assembly import assemble
from autoaccum._engine.does_not_fit import sample_does_not_fit
from autoaccum._engine.optimizer_copy import Snapshot
from autoaccum._engine.options import Options
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.savings import AVOIDABLE, Savings
from autoaccum._engine.trial import Trials
from autoaccum._engine.window_loss import WholeWindow
from autoaccum._memory import backend_for
from autoaccum._oom import let_go
from autoaccum._records import ProbeResult
from autoaccum._sizing.frontier import Frontier
from autoaccum._sizing.search import Search
from autoaccum._system import signals
from autoaccum._system.notices import Notices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from autoaccum._data.pieces import Split
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._loss.objective import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Trial


def find_micro_batch(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakesOptimizer | str | None = None,
    device: str | torch.device | MemoryBackend | None = None,
    precision: str = "auto",
    memory_limit: float | str | None = None,
    memory: str | Sequence[str] | None = None,
    max_micro_batch: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    split: Split | None = None,
    loss_scope: str = "micro_batch",
) -> ProbeResult:
    """Find the largest micro-batch with which a whole training step fits.

    Each size is tried with a real step: forward, backward and optimizer, with gradients and optimizer state in place.
    Afterwards parameters, buffers, gradients, optimizer state, random state and modes are bit for bit what they were;
    only the model's device may have changed.

    Args:
        model: The model. It is moved to the device and stays there.
        batch: A batch as the loader yields it. Its samples are repeated to make larger ones; of a list of samples, the
            largest come first.
        loss: As for `fit`.
        optimizer: As for `fit`. Its state is included.
        device: As for `fit`.
        precision: As for `fit`.
        memory_limit: As for `fit`.
        memory: As for `fit`, while sizes are tried.
        max_micro_batch: The largest size of interest; None means the batch's own length.
        forward: As for `fit`.
        split: As for `fit`.
        loss_scope: As for `fit`. With "window", the loss is computed over a window of `max_micro_batch` samples.

    Returns:
        The largest size that was tried and fits, and every trial.

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: Not even one sample fits.
        DeviceLostError: This process can no longer use the device.
    """
    options = Options.of(find_micro_batch, locals())
    notices = Notices()
    samples = count(batch, split)
    largest = samples if max_micro_batch is None else check_positive_int("max_micro_batch", max_micro_batch)
    backend = devices.resolve(device, model, notices)
    limit_bytes, names = options.limit_bytes(backend), options.savings(backend)
    step = assemble(model, options, memory=backend, notices=notices)
    savings = Savings(step.objective.modules, names, backend, notices)
    if savings.is_auto:
        savings.begin()
    while True:
        try:
            with savings.in_force():
                return probe(step, by_size(batch, split), largest, limit_bytes, loss_scope=loss_scope)
        except AVOIDABLE as error:
            if not savings.climb(error):
                raise
            let_go(error)
        backend.release()


def probe(
    step: TrainingStep,
    batch: Any,
    max_micro_batch: int,
    limit_bytes: int | None,
    on_trial: Callable[[Trial], None] = lambda _: None,
    *,
    loss_scope: str = "micro_batch",
    begins_with: int | None = None,
    sample: str | None = None,
    frontier: Frontier | None = None,
) -> ProbeResult:
    """Search with an assembled training step; the limit applies only during the search.

    Args:
        step: The training step.
        batch: Samples to repeat.
        max_micro_batch: The largest size of interest.
        limit_bytes: Limit, as the memory backend counts; None for all available memory.
        on_trial: Called after each trial.
        loss_scope: "window": the loss is computed over a window of `max_micro_batch` samples at once.
        begins_with: The result of an earlier search. If it fits, it is returned without further trials.
        sample: The name of the only sample, for the error that it does not fit.
        frontier: What an earlier search has found; follows what this one finds.

    Raises:
        InvalidInputError: The limit cannot be set, or the loss cannot be computed over a window.
        DoesNotFitError: Not even one sample fits.
        DeviceLostError: This process can no longer use the device.
    """
    memory = step.memory
    modules = step.objective.modules
    whole = (
        WholeWindow(step, Savepoint(modules, memory.device, step.objective.functions))
        if loss_scope == "window"
        else None
    )
    # Before the limit begins, since the copy is not part of the step.
    host = memory if memory.device.type == "cpu" else backend_for(torch.device("cpu"))
    with devices.failures_told(host, "the copy of all that a search puts back"):
        snapshot = Snapshot(modules, step.optimizer, memory.device, step.precision.scaler, step.objective.functions)
    step.clear_gradients()
    made = step.updates.made
    with devices.failures_told(memory, "the search for a micro-batch"):
        try:
            with memory.limited(limit_bytes):
                return _search(
                    step, batch, max_micro_batch, limit_bytes, on_trial, whole, begins_with, sample, frontier
                )
        finally:
            with signals.held():
                step.abandon()
                snapshot.restore()
                step.updates.made = made


def _search(
    step: TrainingStep,
    batch: Any,
    max_micro_batch: int,
    limit_bytes: int | None,
    on_trial: Callable[[Trial], None],
    whole: WholeWindow | None,
    begins_with: int | None,
    sample: str | None,
    frontier: Frontier | None,
) -> ProbeResult:
    running = Trials(step, batch, whole, max_micro_batch)
    trials: list[Trial] = []
    frontier = Frontier() if frontier is None else frontier
    if begins_with is None or begins_with > max_micro_batch:
        frontier.forget()
        begins_with = None
    search = Search(frontier, begins_with=begins_with)
    ((_, widths),) = repeating(batch, 1, step.objective.split).widths()[0]
    while (size := search.next_trial(widths, max_micro_batch, running.free_bytes)) is not None:
        line = frontier.line(widths)
        try:
            trials.append(running.run(size, expected_bytes=0 if line is None else int(line.at(size))))
        except ValueError as error:
            if size > 1 or not trials:
                raise
            # BatchNorm rejects a single value per channel; one sample is tried only because two ran out of memory.
            reason = f"one sample alone is refused: {error}"
            raise sample_does_not_fit(step, reason, sample=running.sample()) from error
        on_trial(trials[-1])
        search.tried(size, widths, running.extra_bytes(size), fits=trials[-1].fits)
    answer = max((trial.size for trial in trials if trial.fits), default=None)
    if answer is None:
        lack = running.lack
        assert lack is not None
        said = lack.message
        if whole is not None:
            said = f"the loss takes all {max_micro_batch} samples of a window at once; {said}"
        raise sample_does_not_fit(
            step, said, sample=running.sample(sample), phase=lack.phase, is_whole=whole is not None
        )
    line = frontier.line(widths)
    return ProbeResult(
        answer,
        tuple(trials),
        limit_bytes,
        None if line is None else max(0, int(line.fixed_bytes + (running.held_bytes or 0))),
        None if line is None else int(line.bytes_per_sample),
    )
