"""Parses durations as people and Slurm write them, and reads the time left in the running Slurm job."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from autoaccum._arguments import shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

# `int` refuses thousands of digits with an error of its own.
_LONGEST = 100
_UNIT_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*(min|[smhd])")
# https://slurm.schedmd.com/sbatch.html, --time: M, M:S, H:M:S; with days D-H, D-H:M, D-H:M:S.
_SLURM = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)
# The end of the job, in seconds since 1970 (https://slurm.schedmd.com/sbatch.html, output environment).
_ENDS = "SLURM_JOB_END_TIME"


def seconds_in(text: str, *, name: str) -> float:
    """Return a time such as "12h", "1h 30min", "12:00:00" or "1-12:00:00" in seconds.

    Args:
        text: The time.
        name: What the user calls the argument, for the message.

    Raises:
        InvalidInputError: The text is not a duration, or is zero.
    """
    text = text.strip().lower()
    # A number without a unit is ambiguous, although Slurm reads it as minutes.
    found = slurm_seconds(text) if ":" in text or "-" in text else _unit_seconds(text)
    if not found:
        raise InvalidInputError(f"{name}={shown(text)} is not a time; pass '12h', '1h 30min' or '1-12:00:00'")
    return found


def slurm_seconds(text: str) -> float:
    """Return a time limit in one of Slurm's formats in seconds; 0.0 if it is in none of them."""
    match = _SLURM.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return 0.0
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match["days"] is None and match["third"] is None:
        return first * 60.0 + second
    return ((days * 24 + first) * 60.0 + second) * 60 + third


def _unit_seconds(text: str) -> float:
    if len(text) > _LONGEST or re.sub(r"\s", "", _WITH_UNIT.sub("", text)):
        return 0.0
    return sum(float(number) * _UNIT_S[unit] for number, unit in _WITH_UNIT.findall(text))


def left_by_slurm(environment: Mapping[str, str]) -> float | None:
    """Return the seconds left in the running Slurm job; None outside a job, or if Slurm does not set its end."""
    ends = environment.get(_ENDS, "")
    return max(0.0, int(ends) - time.time()) if ends.isdigit() else None
