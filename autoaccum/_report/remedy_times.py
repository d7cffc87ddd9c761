"""Measures what updates would take with remedies that `memory=` takes, on the device at hand."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from autoaccum._engine.savings import Savings
from autoaccum._memory.limits import parse_limit
from autoaccum._oom import let_go
from autoaccum._report.dry_run import rehearse
from autoaccum._system.notices import Notices
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._report.capacity import Asked
    from autoaccum._report.records import Remedy


def timed(
    remedies: Sequence[Remedy],
    asked: Asked,
    backend: MemoryBackend,
    put_together: Callable[[], TrainingStep],
    in_force: Sequence[str],
) -> tuple[Remedy, ...]:
    """Return the remedies with the seconds of an update, as far as they can be measured.

    Args:
        remedies: The remedies.
        asked: The question about the job.
        backend: The device.
        put_together: Makes the training step.
        in_force: What saves memory already, by names of `memory`.
    """
    return tuple(
        replace(one, update_s=_seconds(one, asked, backend, put_together, in_force)) if one.memory else one
        for one in remedies
    )


def _seconds(
    remedy: Remedy,
    asked: Asked,
    backend: MemoryBackend,
    put_together: Callable[[], TrainingStep],
    in_force: Sequence[str],
) -> float | None:
    """Return what an update takes; None if it turns out not to fit."""
    size = remedy.safe_micro_batch or remedy.micro_batch
    if not size:
        return None
    names = (*in_force, *(name for name in remedy.memory if name not in in_force))
    try:
        with ExitStack() as changed:
            step = put_together()
            savings = Savings(step.objective.modules, names, backend, Notices(silent=True))
            changed.enter_context(savings.in_force())
            plan = asked.plan(size)
            seen = rehearse(step, asked.batch, plan, parse_limit(asked.memory_limit, backend))
    except (DoesNotFitError, InvalidInputError) as error:
        let_go(error)  # the model itself, or a way that has no place in it after all
        return None
    return None if seen is None else seen.pace.update_s
