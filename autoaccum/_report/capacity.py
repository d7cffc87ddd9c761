"""Finds the largest micro-batch and the plan for one device: measured if it is present, predicted otherwise.

Measuring runs trials and one rehearsal of the plan; both restore all state, except that the model stays on the device.
Predicting runs nothing: an `Estimate` of the step gives the memory of each size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autoaccum._engine.probing import probe
from autoaccum._memory.limits import parse_limit
from autoaccum._memory.simulated import Simulated
from autoaccum._report.dry_run import rehearse
from autoaccum._report.records import DeviceFacts, Measured, Predicted
from autoaccum._sizing.planner import plan
from autoaccum.errors import DoesNotFitError

_LOG = logging.getLogger("autoaccum.report")
# Of a size that fitted in a trial and not in the rehearsal.
_LESS = 0.9

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._estimate.gpus import GPU
    from autoaccum._estimate.trace import Estimate
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import MemoryReading, Plan, ProbeResult, Trial


@dataclass(frozen=True)
class Question:
    """The question about a job, independent of the device.

    Attributes:
        batch: Samples, repeated to make larger batches.
        target_batch: Samples per optimizer step.
        most: The largest micro-batch of interest.
        memory_limit: As for `fit`.
        loss_scope: As for `fit`.
    """

    batch: Any
    target_batch: int
    most: int
    memory_limit: float | str | None
    loss_scope: str

    def plan(self, largest: int, trials: tuple[Trial, ...] = ()) -> Plan:
        """Cut the target batch as `fit` cuts its first windows, in micro-batches of at most `largest`."""
        return plan(self.target_batch, min(largest, self.target_batch), trials=trials)


def measure_on(
    asked: Question, memory: MemoryBackend, put_together: Callable[[], TrainingStep]
) -> tuple[Measured, tuple[str, ...]]:
    """Measure what fits on a device, and rehearse the plan there.

    Args:
        asked: The question.
        memory: The device.
        put_together: Makes the training step and moves the model to the device.

    Returns:
        The findings, and warnings. If nothing fits, the findings give the reason.

    Raises:
        InvalidInputError: The limit cannot be set, or the loss cannot be computed over a window.
    """
    arrived = memory.reading()
    limit_bytes = parse_limit(asked.memory_limit, memory)
    trials: list[Trial] = []

    def note(trial: Trial) -> None:
        trials.append(trial)
        _LOG.info("%d samples %s", trial.size, "fit" if trial.fits else "do not fit")

    step: TrainingStep | None = None
    try:
        step = put_together()
        with memory.limited(limit_bytes):
            begun = memory.reading()
        found = probe(step, asked.batch, asked.most, limit_bytes, note)
    except DoesNotFitError as error:
        free = arrived.free_bytes if limit_bytes is None else min(arrived.free_bytes, limit_bytes)
        device = _facts(memory, arrived, free, limit_bytes)
        precision = None if step is None else step.precision.name
        return Measured(device, precision, tuple(trials), 0, None, reason=str(error)), ()
    device = _facts(memory, arrived, begun.used_bytes + begun.free_bytes, limit_bytes)
    return _rehearsed(asked, step, device, found, limit_bytes)


def _rehearsed(
    asked: Question, step: TrainingStep, device: DeviceFacts, found: ProbeResult, limit_bytes: int | None
) -> tuple[Measured, tuple[str, ...]]:
    chosen = asked.plan(found.micro_batch, found.trials)
    measured = Measured(
        device,
        step.precision.name,
        found.trials,
        found.micro_batch,
        chosen,
        fixed_bytes=found.fixed_bytes,
        bytes_per_sample=found.bytes_per_sample,
    )
    # A loss over the whole window runs every micro-batch twice, which the rehearsal does not do.
    if asked.loss_scope != "micro_batch":
        return measured, ()
    seen = rehearse(step, asked.batch, chosen, limit_bytes)
    notes: tuple[str, ...] = ()
    if seen is None:
        notes = (
            f"a whole step of {chosen.micro_batch} ran out of memory, though its trial had fitted: less is advised",
        )
        # What an allocator's segments hold from before may leave less than the trial of this size had.
        smaller = max(1, int(chosen.micro_batch * _LESS))
        chosen = asked.plan(smaller, found.trials)
        measured = replace(measured, micro_batch=smaller, plan=chosen)
        seen = rehearse(step, asked.batch, chosen, limit_bytes)
    if seen is None:
        return measured, (f"{notes[0]}; leave more room (memory_limit=)",)
    # Peaks of the same size differ a little; that of the search counts.
    tried = {one.size for one in measured.trials if one.fits}
    trials = measured.trials if seen.trial.size in tried else (*measured.trials, seen.trial)
    return replace(measured, trials=trials, pace=seen.pace), notes + seen.warnings


def _facts(memory: MemoryBackend, arrived: MemoryReading, room_bytes: int, limit_bytes: int | None) -> DeviceFacts:
    return DeviceFacts(
        name=memory.name,
        device=str(memory.device),
        total_bytes=arrived.total_bytes,
        free_bytes=arrived.free_bytes,
        room_bytes=room_bytes,
        limit_bytes=limit_bytes,
        holds_model=memory.device.type != "cpu",
        others_bytes=memory.others_bytes(),
        neighbours=tuple(memory.neighbours()),
    )


def predict(asked: Question, gpu: GPU, precision: str, estimate: Estimate) -> Predicted:
    """Predict what would fit on a GPU.

    Args:
        asked: The question.
        gpu: The GPU.
        precision: The precision in which the step was traced.
        estimate: The memory that steps use on the GPU.

    Raises:
        InvalidInputError: The memory limit cannot be parsed.
    """
    limit_bytes = parse_limit(asked.memory_limit, Simulated(gpu.total_bytes))
    room = gpu.free_bytes if limit_bytes is None else min(limit_bytes, gpu.free_bytes)
    largest = estimate.largest(room, asked.most)
    safe_bytes = estimate.safe_bytes(room)
    safe = min(largest, estimate.largest(safe_bytes, asked.most))
    chosen = _planned(asked, estimate, safe, safe_bytes) or _planned(asked, estimate, largest, room)
    size = estimate.footprints[0].size if chosen is None else chosen.micro_batch
    footprint = estimate.at(size, room)
    known = (*estimate.footprints, footprint)
    return Predicted(
        gpu,
        precision,
        estimate.uncertainty,
        room,
        largest,
        safe,
        chosen,
        footprint,
        curve=tuple(sorted({one.size: one.reserved_bytes for one in known}.items())),
        bytes_per_sample=estimate.bytes_per_sample,
        is_capped=0 < largest == asked.most and estimate.at(largest).reserved_bytes + estimate.bytes_per_sample <= room,
        notes=estimate.notes,
    )


def _planned(asked: Question, estimate: Estimate, largest: int, room_bytes: int) -> Plan | None:
    """Return the cut in micro-batches of at most `largest` whose own step fits; None if none does.

    A step of fewer samples may not fit where the largest does: fragments of the cache differ.
    """
    if largest == 0:
        return None
    chosen = asked.plan(largest)
    if estimate.fits(chosen.micro_batch, room_bytes):
        return chosen
    fitting, too_large = 0, largest
    while too_large - fitting > 1:
        middle = (fitting + too_large) // 2
        if estimate.fits(asked.plan(middle).micro_batch, room_bytes):
            fitting = middle
        else:
            too_large = middle
    return asked.plan(fitting) if fitting else None
