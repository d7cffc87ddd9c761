"""How long a job may take: what a person or Slurm says in, seconds out. No clock is set here."""

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
# As `sbatch --time` takes them, but for a lone number: days-hours:minutes:seconds, hours:minutes:seconds.
_SLURM = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+)(?::(?P<minutes>\d+))?(?::(?P<seconds>\d+))?")
# When Slurm will end the job, in seconds since 1970 (https://slurm.schedmd.com/sbatch.html, output environment).
_ENDS = "SLURM_JOB_END_TIME"


def seconds_in(text: str, *, name: str) -> float:
    """Return a time such as "12h", "1h 30min", "12:00:00" or "1-12:00:00" in seconds.

    Args:
        text: The time.
        name: What the user calls the argument, for the message.

    Raises:
        InvalidInputError: This is no such time, or none at all.
    """
    text = text.strip().lower()
    reads = _slurm_seconds if ":" in text or "-" in text else _unit_seconds
    found = reads(text) if len(text) <= _LONGEST else 0.0
    if not found:
        raise InvalidInputError(f"{name}={shown(text)} is no time; give one such as '12h', '1h 30min' or '1-12:00:00'")
    return found


def _unit_seconds(text: str) -> float:
    if re.sub(r"\s", "", _WITH_UNIT.sub("", text)):
        return 0.0
    return sum(float(number) * _UNIT_S[unit] for number, unit in _WITH_UNIT.findall(text))


def _slurm_seconds(text: str) -> float:
    match = _SLURM.fullmatch(text)
    if match is None:
        return 0.0
    days, hours, minutes, seconds = (int(match[part] or 0) for part in ("days", "hours", "minutes", "seconds"))
    if match["days"] is None and match["seconds"] is None:  # Slurm reads "90:00" as minutes and seconds
        return hours * 60.0 + minutes
    return ((days * 24 + hours) * 60.0 + minutes) * 60 + seconds


def left_by_slurm(environment: Mapping[str, str]) -> float | None:
    """Return the seconds that Slurm leaves the job this runs in; None outside of one, or where it does not say."""
    ends = environment.get(_ENDS, "")
    return max(0.0, int(ends) - time.time()) if ends.isdigit() else None
