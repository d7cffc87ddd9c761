"""The report as JSON.

docs/report.md explains the document. Within a version keys are only added: readers check `schema_version` and ignore
unknown keys.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autoaccum._estimate.moments import KINDS
from autoaccum._json import finite, plan_record, trial_record
from autoaccum._system.own_distribution import __version__

if TYPE_CHECKING:
    from autoaccum._estimate.moments import StepMemory
    from autoaccum._records import Plan
    from autoaccum._report.records import Findings, LoaderFacts, Measured, Pace, Predicted

SCHEMA_VERSION = 1


def document_of(report: Findings) -> dict[str, Any]:
    """Return the report as JSON types; NaN and infinity become None."""
    return {
        "schema_version": SCHEMA_VERSION,
        "autoaccum": __version__,
        "fits": report.fits,
        "micro_batch": report.micro_batch,
        "safe_micro_batch": report.safe_micro_batch,
        "required_micro_batch": report.required_micro_batch,
        "subject": asdict(report.subject),
        "measured": None if report.measured is None else _measured(report.measured),
        "predicted": [_predicted(one) for one in report.predicted],
        "lengths": None if report.lengths is None else asdict(report.lengths),
        "loader": _numbers(report.loader),
        "host": asdict(report.host),
        "remedies_on": report.remedies_on,
        "remedies": [asdict(one) for one in report.remedies],
        "warnings": list(report.warnings),
        "notes": list(report.notes),
    }


def _measured(measured: Measured) -> dict[str, Any]:
    return {
        "device": asdict(measured.device) | {"neighbours": [asdict(one) for one in measured.device.neighbours]},
        "precision": measured.precision,
        "fits": measured.plan is not None,
        "micro_batch": measured.micro_batch,
        "reason": measured.reason,
        "plan": _plan(measured.plan),
        "peak_bytes": measured.peak_bytes,
        "headroom_bytes": measured.headroom_bytes,
        "fixed_bytes": measured.fixed_bytes,
        "bytes_per_sample": measured.bytes_per_sample,
        "activation_bytes_per_sample": measured.activation_bytes_per_sample,
        "footprint": None if measured.footprint is None else asdict(measured.footprint),
        "step_memory": _step_memory(measured.step_memory),
        "trials": [trial_record(trial) | {"elapsed_s": finite(trial.elapsed_s)} for trial in measured.trials],
        "pace": _numbers(measured.pace),
    }


def _predicted(predicted: Predicted) -> dict[str, Any]:
    estimate = predicted.estimate
    return {
        "card": asdict(predicted.card) | {"capability": list(predicted.card.capability)},
        "precision": predicted.precision,
        "fits": predicted.plan is not None,
        "verdict": predicted.verdict,
        "micro_batch": predicted.micro_batch,
        "safe_micro_batch": predicted.safe_micro_batch,
        "uncertainty": estimate.uncertainty,
        "plan": _plan(predicted.plan),
        "room_bytes": predicted.room_bytes,
        "headroom_bytes": predicted.headroom_bytes,
        "bytes_per_sample": estimate.bytes_per_sample,
        "activation_bytes_per_sample": predicted.activation_bytes_per_sample,
        "footprint": asdict(predicted.footprint),
        "footprints": [asdict(one) for one in estimate.footprints],
        "step_memory": _step_memory(predicted.step_memory),
        "notes": list(estimate.notes),
    }


def _step_memory(step: StepMemory | None) -> dict[str, Any] | None:
    if step is None:
        return None
    moments = step.moments
    kinds = [kind for kind in KINDS if any(kind in one.bytes_by_kind for one in moments)]
    return {
        "size": step.size,
        "peak": step.peak,
        # By columns: a tenth of the text that a record for each moment would take.
        "moments": {
            "event": [one.event for one in moments],
            "phase": [one.phase for one in moments],
            "held_bytes": [one.held_bytes for one in moments],
            "bytes_by_kind": {kind: [one.bytes_by_kind.get(kind, 0) for one in moments] for kind in kinds},
        },
        "modules": [asdict(one) for one in step.modules],
        "alive": [asdict(one) for one in step.alive],
    }


def _plan(plan: Plan | None) -> dict[str, Any] | None:
    return None if plan is None else plan_record(plan)


def _numbers(record: Pace | LoaderFacts | None) -> dict[str, Any] | None:
    return None if record is None else {name: finite(number) for name, number in asdict(record).items()}
