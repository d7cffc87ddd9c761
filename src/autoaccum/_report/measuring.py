"""The measured half of a pre-flight report: a training step on a device at hand in, what was found there out.

Sizes are tried and the plan is rehearsed for real; both leave no trace, but that the model is on the device afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoaccum._engine.probing import probe
from autoaccum._memory.limits import parse_limit
from autoaccum._report.dry_run import rehearse
from autoaccum._report.records import DeviceFacts, Measured
from autoaccum._sizing.planner import TILE, plan
from autoaccum.errors import DoesNotFitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoaccum._engine.step import TrainingStep
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import MemoryReading, ProbeResult, Trial


@dataclass(frozen=True)
class Asked:
    """What is asked about a job, wherever it would run.

    Attributes:
        batch: Samples to repeat.
        target_batch: Samples an update.
        most: The largest micro-batch of interest.
        strategy: How windows are cut.
        memory_limit: As for `fit`.
        loss_scope: As for `fit`.
    """

    batch: Any
    target_batch: int
    most: int
    strategy: str
    memory_limit: float | str | None
    loss_scope: str


def measure_on(
    asked: Asked,
    memory: MemoryBackend,
    put_together: Callable[[], TrainingStep],
    on_trial: Callable[[Trial], None],
) -> tuple[Measured, tuple[str, ...]]:
    """Find out what fits on a device and how a plan goes there.

    Args:
        asked: What is asked.
        memory: The device.
        put_together: Makes the training step, which moves the model there.
        on_trial: Called after each trial.

    Returns:
        What was found, and what to warn of. That nothing fits is an answer too.

    Raises:
        InvalidInputError: The limit cannot be set, or the loss cannot be taken over a window.
    """
    arrived = memory.reading()
    limit_bytes = parse_limit(asked.memory_limit, memory)
    trials: list[Trial] = []

    def note(trial: Trial) -> None:
        trials.append(trial)
        on_trial(trial)

    step: TrainingStep | None = None
    try:
        step = put_together()
        with memory.limited(limit_bytes):
            begun = memory.reading()
        found = probe(step, asked.batch, asked.most, limit_bytes, note, loss_scope=asked.loss_scope)
    except DoesNotFitError as error:
        free = arrived.free_bytes if limit_bytes is None else min(arrived.free_bytes, limit_bytes)
        device = _facts(memory, arrived, free, limit_bytes)
        precision = None if step is None else step.precision.name
        return Measured(device, precision, tuple(trials), 0, None, reason=str(error)), ()
    device = _facts(memory, arrived, begun.used_bytes + begun.free_bytes, limit_bytes)
    return _planned(asked, step, device, found, limit_bytes)


def _planned(
    asked: Asked, step: TrainingStep, device: DeviceFacts, found: ProbeResult, limit_bytes: int | None
) -> tuple[Measured, tuple[str, ...]]:
    chosen = plan(
        asked.target_batch,
        min(found.micro_batch, asked.target_batch),
        strategy=asked.strategy,
        trials=found.trials,
        multiple_of=TILE if step.precision.name != "fp32" else 1,
    )
    # A loss over the whole window is run twice for every micro-batch, which a rehearsal of one would not show.
    seen = rehearse(step, asked.batch, chosen, limit_bytes) if asked.loss_scope == "micro_batch" else None
    measured = Measured(
        device,
        step.precision.name,
        found.trials,
        found.micro_batch,
        chosen,
        fixed_bytes=found.fixed_bytes,
        bytes_per_sample=found.bytes_per_sample,
        footprint=None if seen is None else seen.footprint,
        activation_bytes_per_sample=None if seen is None else seen.activation_bytes_per_sample,
        pace=None if seen is None else seen.pace,
    )
    return measured, () if seen is None else seen.warnings


def _facts(memory: MemoryBackend, arrived: MemoryReading, room_bytes: int, limit_bytes: int | None) -> DeviceFacts:
    return DeviceFacts(
        name=memory.name,
        device=str(memory.device),
        total_bytes=arrived.total_bytes,
        free_bytes=arrived.free_bytes,
        room_bytes=room_bytes,
        limit_bytes=limit_bytes,
        holds_model=memory.device.type != "cpu",
        others_bytes=arrived.others_bytes,
        neighbours=tuple(memory.neighbours()),
    )
