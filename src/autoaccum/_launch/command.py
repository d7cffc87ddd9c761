"""A command as the user wrote it in, the command as it is started out: placeholders filled, variables beside it.

Arguments stay a list from end to end; no shell ever sees them. Only our own placeholders are touched: any other brace,
such as those of JSON, is the command's.
"""

from __future__ import annotations

import re
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
    """Return the environment variables that a command is told its cut by, besides those of this process.

    Args:
        cut: What it is to run with; None where no target batch is known.
        cap: The most samples at once on one device; None where nothing is known of it.
        attempt: Its number, from 0.
        reason_file: Where it may leave why it ended.
    """
    told = {environment.ATTEMPT: str(attempt), environment.REASON_FILE: str(reason_file)}
    if cap is not None:
        told[environment.MAX_MICRO_BATCH] = str(cap)
    if cut is not None:
        names = {
            "micro_batch": environment.MICRO_BATCH,
            "accum_steps": environment.ACCUM_STEPS,
            "target_batch": environment.TARGET_BATCH,
            "world_size": environment.WORLD_SIZE,
        }
        told |= {names[name]: str(number) for name, number in numbers_of(cut).items()}
    return told


def numbers_of(cut: Cut) -> dict[str, int]:
    """Return the numbers of a cut by the names of the placeholders."""
    return {
        "micro_batch": cut.micro_batch,
        "accum_steps": cut.accum_steps,
        "target_batch": cut.target_batch,
        "world_size": cut.world_size,
    }
