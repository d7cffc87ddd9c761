"""The command that is started: the user's, with its placeholders filled, and the environment variables beside it.

Arguments stay a list from end to end; no shell sees them. Every other brace, such as those of JSON, is the command's.
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
    """Return the command with numbers in place of its placeholders, each by its name."""
    return [_PLACEHOLDER.sub(lambda found: str(numbers[found[1]]), argument) for argument in command]


def variables(cut: Cut | None, cap: int | None, *, attempt: int, reason_file: Path) -> dict[str, str]:
    """Return the environment variables that a command gets besides those of this process.

    Args:
        cut: Its cut; None where no target batch is known.
        cap: The most samples at once on one device; None for no bound.
        attempt: The number of the attempt, from 0.
        reason_file: Where the command may leave why it ended.
    """
    given = {environment.ATTEMPT: str(attempt), environment.REASON_FILE: str(reason_file)}
    if cap is not None:
        given[environment.MAX_MICRO_BATCH] = str(cap)
    if cut is not None:
        given |= {f"AUTOACCUM_{name.upper()}": str(number) for name, number in numbers_of(cut).items()}
    return given


def numbers_of(cut: Cut) -> dict[str, int]:
    """Return the numbers of a cut by the names of the placeholders."""
    return asdict(cut)
