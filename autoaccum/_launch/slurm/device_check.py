"""Checks the device at the start of a job, and tries a step of one or two samples that restores all state.

The first windows find larger sizes. If not even this step fits, the job ends with a full report of remedies.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from autoaccum._launch.job import shared_arguments
from autoaccum._memory.limits import format_bytes
from autoaccum._report.api import preflight
from autoaccum._report.loader_speed import first_of
from autoaccum._report.table import plain_text
from autoaccum._system.user_files import beside
from autoaccum.errors import DoesNotFitError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from autoaccum._launch.job import Job
    from autoaccum._report import Report

# BatchNorm in training mode rejects one sample.
_SAMPLES = 2


def check(job: Job, report_file: Path | None, say: Callable[[str], None]) -> None:
    """Check the device and try a step.

    Args:
        job: The job, with its model made.
        report_file: Where to write the report; None to write none.
        say: Prints a line.

    Raises:
        DoesNotFitError: Nothing fits, and the job has no memory="auto", which reports do not count.
    """
    batch = first_of(job.loader)
    if batch is None:
        say("pre-flight: no step was tried, because the loader can be read only once")
        return
    target = job.samples_of_target(batch)
    report = _report_of(job, batch, min(_SAMPLES, target))
    takes_less = job.memory in ("auto", ["auto"], ("auto",))
    if not report.fits and not takes_less:
        report = _report_of(job, batch, target)
    if report_file is not None:
        with beside(report_file) as unfinished:
            unfinished.write_text(json.dumps(report.to_dict(), allow_nan=False), encoding="utf-8")
    say(f"pre-flight: {_summary(report)}")
    if report.fits:
        return
    if takes_less:
        say(f"pre-flight: this step does not fit, so training will use memory={job.memory!r}")
        return
    say(plain_text(report))
    assert report.measured is not None
    raise DoesNotFitError(report.measured.reason or "not even the smallest micro-batch fits")


def _report_of(job: Job, batch: Any, target_batch: int) -> Report:
    whether_it_fits = {"target_batch": target_batch, "max_micro_batch": min(_SAMPLES, target_batch), "measure": True}
    not_asked = dict.fromkeys(("loader", "epochs", "max_steps"))
    return preflight(batch=batch, **shared_arguments(job, preflight) | whether_it_fits | not_asked)


def _summary(report: Report) -> str:
    assert report.measured is not None
    device, trials = report.measured.device, report.measured.trials
    texts = [f"{device.name}, {format_bytes(device.total_bytes)}, {format_bytes(device.free_bytes)} free"]
    if device.limit_bytes is not None:
        texts.append(f"limited to {format_bytes(device.limit_bytes)}")
    if device.others_bytes:
        texts.append(f"other processes hold {format_bytes(device.others_bytes)}")
    if report.fits:
        largest = max((trial for trial in trials if trial.fits), key=lambda trial: trial.size)
        took = "" if largest.peak_bytes is None else f" and needs {format_bytes(largest.peak_bytes)}"
        texts.append(f"a step of {largest.size} fits{took}")
    return "; ".join(texts)
