"""Reads the time left in the running Slurm job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# The end of the job, in seconds since 1970 (https://slurm.schedmd.com/sbatch.html, output environment).
_ENDS = "SLURM_JOB_END_TIME"


def left_by_slurm(environment: Mapping[str, str]) -> float | None:
    """Return the seconds left in the running Slurm job; None outside a job, or if Slurm does not set its end."""
    ends = environment.get(_ENDS, "")
    return max(0.0, int(ends) - time.time()) if ends.isdigit() else None
