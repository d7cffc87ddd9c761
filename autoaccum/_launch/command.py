"""Fills the placeholders in the user's command, and makes its environment variables.

Arguments are always a list; there is no shell. Other braces, such as those of JSON, are left as they are.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING

from autoaccum._system import environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from autoaccum._launch.cuts import Cut

_PLACEHOLDER = re.compile(r"\{(micro_batch|accum_steps|target_batch|world_size)\}")


def placeholders(command: Sequence[str]) -> frozenset[str]:
    """Return the names of the placeholders in a command."""
    return frozenset(name for argument in command for name in _PLACEHOLDER.findall(argument))


def filled(command: Sequence[str], numbers: Mapping[str, int]) -> list[str]:
    """Return the command with its placeholders replaced by numbers."""
    return [_PLACEHOLDER.sub(lambda found: str(numbers[found[1]]), argument) for argument in command]


def variables(cut: Cut | None, cap: int | None, *, attempt: int, reason_file: Path) -> dict[str, str]:
    """Return the environment variables that a command gets in addition to this process's.

    Args:
        cut: Its cut; None if no target batch is known.
        cap: The largest micro-batch on one device; None for no limit.
        attempt: The number of the attempt, from 0.
        reason_file: Where the command may write why it ended.
    """
    given = {environment.ATTEMPT: str(attempt), environment.REASON_FILE: str(reason_file)}
    if cap is not None:
        given[environment.MAX_MICRO_BATCH] = str(cap)
    if cut is not None:
        given |= {f"AUTOACCUM_{name.upper()}": str(number) for name, number in numbers_of(cut).items()}
    return given


def numbers_of(cut: Cut) -> dict[str, int]:
    """Return the numbers of a cut, by placeholder name."""
    return asdict(cut)
