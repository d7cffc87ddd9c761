"""The records of the package as JSON: what the log, the report and the command line write."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoaccum._records import Evaluation, MemoryEvent, Plan, ProbeResult, StepReport, Trial


def trial_record(trial: Trial) -> dict[str, Any]:
    """Return a trial as JSON's types: size, fits, peak_bytes, elapsed_s."""
    return asdict(trial)


def probe_record(probe: ProbeResult) -> dict[str, Any]:
    """Return a probe's answer as JSON's types: micro_batch, limit_bytes, fixed_bytes, bytes_per_sample."""
    return {name: value for name, value in asdict(probe).items() if name != "trials"}


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON's types: target_batch, micro_batches, micro_batch, accum_steps."""
    return {
        "target_batch": plan.target_batch,
        "micro_batches": list(plan.micro_batches),
        "micro_batch": plan.micro_batch,
        "accum_steps": plan.accum_steps,
    }


def step_record(report: StepReport) -> dict[str, Any]:
    """Return a step as JSON's types, its losses included; waits for the device.

    The keys: step, samples, loss, losses (by name), micro_batches, oom_events, elapsed_s, peak_bytes,
    grad_norm, skipped, learning_rates (one for each group of the optimizer), noise_scale.
    """
    return {
        "step": report.step,
        "samples": report.samples,
        "loss": finite(report.loss),
        "losses": {name: finite(loss) for name, loss in report.losses.items()},
        "micro_batches": list(report.micro_batches),
        "oom_events": report.oom_events,
        "elapsed_s": report.elapsed_s,
        "peak_bytes": report.peak_bytes,
        "grad_norm": finite(report.grad_norm),
        "skipped": report.skipped,
        "learning_rates": [finite(rate) for rate in report.learning_rates],
        "noise_scale": finite(report.noise_scale),
    }


def oom_record(event: MemoryEvent) -> dict[str, Any]:
    """Return one running out of memory as JSON's types: phase, size, message."""
    return asdict(event)


def evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as JSON's types: loss, losses and metrics (by name), samples, elapsed_s."""
    return {
        "loss": finite(evaluation.loss),
        "losses": {name: finite(loss) for name, loss in evaluation.losses.items()},
        "metrics": {name: finite(value) for name, value in evaluation.metrics.items()},
        "samples": evaluation.samples,
        "elapsed_s": evaluation.elapsed_s,
    }


def finite(number: float | None) -> float | None:
    """Return `number`, or None where it is NaN or infinite, which JSON lacks."""
    return number if number is not None and math.isfinite(number) else None
