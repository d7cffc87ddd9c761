"""The search for the largest micro-batch: real training steps of several sizes, without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum import devices, signals
from autoaccum.batches import count
from autoaccum.errors import DoesNotFitError
from autoaccum.memory.limits import format_bytes, parse_limit
from autoaccum.notices import Notices
from autoaccum.records import ProbeResult, check_positive_int
from autoaccum.search import line_through, next_size
from autoaccum.state import Snapshot
from autoaccum.step import assemble
from autoaccum.trial import Trials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from autoaccum.memory.base import MemoryBackend
    from autoaccum.objective import Loss
    from autoaccum.optimizers import MakesOptimizer
    from autoaccum.records import Trial
    from autoaccum.step import TrainingStep


def find_micro_batch(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    optimizer: torch.optim.Optimizer | MakesOptimizer | None = None,
    device: str | torch.device | MemoryBackend | None = None,
    precision: str = "auto",
    memory_limit: float | str | None = None,
    max_micro_batch: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> ProbeResult:
    """Find the largest micro-batch with which a whole training step fits.

    Sizes are tried for real: forward, backward and optimizer, with gradients and optimizer state in place. Afterwards
    parameters, buffers, gradients, optimizer state, random state and modes are bit for bit what they were; only the
    model's device may have changed.

    Args:
        model: The model; it is moved to the device and stays there.
        batch: A batch as the loader yields it; its samples are repeated to make larger ones.
        loss: As for `fit`.
        optimizer: As for `fit`; its state counts.
        device: As for `fit`.
        precision: As for `fit`.
        memory_limit: As for `fit`.
        max_micro_batch: The largest size of interest; None means the batch's own length.
        forward: As for `fit`.

    Returns:
        The largest size that was tried and fits, and every trial.

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: Not even one sample fits.
    """
    notices = Notices()
    samples = count(batch)
    largest = samples if max_micro_batch is None else check_positive_int("max_micro_batch", max_micro_batch)
    memory = devices.resolve(device, model, notices)
    limit_bytes = parse_limit(memory_limit, memory)
    step = assemble(
        model,
        loss,
        optimizer,
        memory=memory,
        precision_name=precision,
        forward=forward,
        loss_reduction=None,
        clip_grad_norm=None,
        notices=notices,
    )
    return probe(step, batch, largest, limit_bytes)


def probe(
    step: TrainingStep,
    batch: Any,
    max_micro_batch: int,
    limit_bytes: int | None,
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> ProbeResult:
    """Search on a training step that is put together already; the limit holds for the search alone.

    Args:
        step: The training step.
        batch: Samples to repeat.
        max_micro_batch: The largest size of interest.
        limit_bytes: In the memory backend's terms; None for what there is.
        on_trial: Called after each trial.

    Raises:
        InvalidInputError: The limit cannot be set.
        DoesNotFitError: Not even one sample fits.
    """
    memory = step.memory
    # Before the limit begins: what is set aside is not the step's.
    snapshot = Snapshot(step.objective.modules, step.optimizer, memory.device, step.precision.scaler)
    step.clear_gradients()
    try:
        with memory.limited(limit_bytes):
            return _search(step, batch, max_micro_batch, limit_bytes, on_trial)
    finally:
        with signals.held():
            step.abandon()
            snapshot.put_back()


def _search(
    step: TrainingStep,
    batch: Any,
    max_micro_batch: int,
    limit_bytes: int | None,
    on_trial: Callable[[Trial], None],
) -> ProbeResult:
    memory = step.memory
    now = memory.reading()
    reachable = now.limit_bytes if now.limit_bytes is not None else now.used_bytes + now.free_bytes
    running = Trials(step, batch)
    trials: list[Trial] = []
    while (size := next_size(trials, max_micro_batch, reachable)) is not None:
        line = line_through(trials)
        try:
            trials.append(running.run(size, expected_bytes=0 if line is None else int(line.bytes_per_sample * size)))
        except ValueError as error:
            if size > 1 or not trials:
                raise
            # BatchNorm refuses a single value a channel; one sample is tried only because two ran out of memory.
            reason = f"one sample alone is refused: {error}"
            raise DoesNotFitError(does_not_fit_text(step, limit_bytes, reason)) from error
        on_trial(trials[-1])
    answer = max((trial.size for trial in trials if trial.fits), default=None)
    if answer is None:
        raise DoesNotFitError(does_not_fit_text(step, limit_bytes))
    line = line_through(trials)
    return ProbeResult(
        answer,
        tuple(trials),
        limit_bytes,
        None if line is None else max(0, int(line.fixed_bytes)),
        None if line is None else int(line.bytes_per_sample),
    )


def does_not_fit_text(step: TrainingStep, limit_bytes: int | None, message: str = "") -> str:
    """Say what was asked, what was found and what to try where not even one sample fits."""
    reading = step.memory.reading()
    allowed = "" if limit_bytes is None else f" of memory_limit={format_bytes(limit_bytes)}"
    found = f" ({message})" if message else ""
    remedies = [] if step.precision.name != "fp32" else ["precision='bf16'"]
    remedies += [
        "activation checkpointing (torch.utils.checkpoint)",
        "shorter or smaller inputs",
        "an optimizer with less state",
    ]
    if limit_bytes is not None:
        remedies.append("a higher memory_limit")
    return (
        f"micro_batch=1 does not fit on {step.memory.name}: {format_bytes(reading.free_bytes)}{allowed} are free, "
        f"and a step needs more for gradients, optimizer state and activations{found}; try {', or '.join(remedies)}"
    )
