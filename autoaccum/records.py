"""What the library returns: plain records, of which every quantity names its unit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._records import (
    BackwardReport,
    Evaluation,
    FitResult,
    MemoryEvent,
    MemoryReading,
    ProbeResult,
    SplitCheck,
    StepReport,
    Trial,
    Verification,
)

if TYPE_CHECKING:
    from autoaccum._report import Report

__all__ = [
    "BackwardReport",
    "Evaluation",
    "FitResult",
    "MemoryEvent",
    "MemoryReading",
    "ProbeResult",
    "Report",
    "SplitCheck",
    "StepReport",
    "Trial",
    "Verification",
]


def __getattr__(name: str) -> Any:
    if name != "Report":  # which needs torch
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autoaccum._report import Report  # noqa: PLC0415 - as above

    return Report
