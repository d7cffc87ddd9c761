"""Reads the package's environment variables, and those of launchers before a process group exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

# Set by `autoaccum run` for its command, beside AUTOACCUM_MICRO_BATCH and the other numbers of `Sizes`.
MAX_MICRO_BATCH = "AUTOACCUM_MAX_MICRO_BATCH"
ATTEMPT = "AUTOACCUM_ATTEMPT"
REASON_FILE = "AUTOACCUM_REASON_FILE"
# Set by torchrun and needed by torch.distributed.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The package's own variables.
RANK_TIMEOUT_S = "AUTOACCUM_RANK_TIMEOUT_S"
_CACHE_DIR = "AUTOACCUM_CACHE_DIR"
# No number here has this many digits; `int` rejects thousands of digits with its own error.
_MOST_DIGITS = 18
# torch.distributed's default timeout for Gloo.
_TIMEOUT_S = 1800.0


def folder_of_plans() -> Path | None:
    """Return the folder named by AUTOACCUM_CACHE_DIR, by default in the user's cache directory; None if it is empty."""
    named = os.environ.get(_CACHE_DIR)
    if named is None:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "autoaccum"
    return Path(named) if named else None


def max_micro_batch(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the most samples that `autoaccum run` allows on one device at once; None if there is no such cap."""
    return whole_number(MAX_MICRO_BATCH, environment)


def whole_number(name: str, environment: Mapping[str, str] = os.environ, *, least: int = 1) -> int | None:
    """Return a variable that holds a whole number of at least `least`; None if it is not set.

    Raises:
        InvalidInputError: It has another value.
    """
    text = environment.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) >= least):
        raise InvalidInputError(
            f"the environment variable {name}={text!r} is not a whole number of at least {least}; set it to one, or "
            "unset it"
        )
    return int(text)


def world_size() -> int:
    """Return the number of processes of this training, by torch.distributed or else by torchrun's variables.

    Raises:
        InvalidInputError: Only some of the variables are set.
    """
    if _torch_distributed().is_available() and _torch_distributed().is_initialized():
        return int(_torch_distributed().get_world_size())
    return (whole_number("WORLD_SIZE") if is_to_be_set_up() else None) or 1


def check_not_one_of_several() -> None:
    """Raise if Slurm started several tasks, of which each would train by itself: a launcher is missing.

    Raises:
        InvalidInputError: This process is alone, and its job step has more tasks.
    """
    tasks = whole_number("SLURM_STEP_NUM_TASKS") or 1
    if tasks > 1 and world_size() == 1:
        raise InvalidInputError(
            f"shard_data=True divides windows among processes, and this one is alone: Slurm started {tasks} tasks, and "
            "each would train by itself; start them by torchrun (autoaccum slurm ... -- torchrun train.py), or unset "
            "SLURM_STEP_NUM_TASKS"
        )


def own_rank() -> int:
    """Return the rank of this process, which need not have joined the process group.

    Raises:
        InvalidInputError: Only some of torchrun's variables are set.
    """
    if _torch_distributed().is_available() and _torch_distributed().is_initialized():
        return int(_torch_distributed().get_rank())
    return (whole_number("RANK", least=0) if is_to_be_set_up() else None) or 0


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return whole_number("LOCAL_RANK", least=0) or 0


def timeout_s() -> float:
    """Return how many seconds ranks wait for each other.

    Raises:
        InvalidInputError: The variable that says so is no number above 0.
    """
    text = os.environ.get(RANK_TIMEOUT_S, "")
    try:
        found = float(text) if text else _TIMEOUT_S
    except ValueError:
        found = 0.0
    if not found > 0.0:
        raise InvalidInputError(f"{RANK_TIMEOUT_S}={text!r} must be a positive number of seconds; or unset it")
    return found


def is_to_be_set_up() -> bool:
    """Whether a launcher started several processes, and torch.distributed is not set up yet.

    Raises:
        InvalidInputError: torchrun's variables are half set.
    """
    if not _torch_distributed().is_available() or _torch_distributed().is_initialized():
        return False
    found = [name for name in VARIABLES if os.environ.get(name)]
    if "RANK" not in found or "WORLD_SIZE" not in found:
        # One of these two alone means nothing (some clusters set WORLD_SIZE in every job); both mean ranks.
        if "RANK" in found or _is_above_one(os.environ.get("WORLD_SIZE", "")):
            raise _half_set(found)
        return False
    rank, size = whole_number("RANK", least=0) or 0, whole_number("WORLD_SIZE") or 1
    if size > 1 and len(found) < len(VARIABLES):
        raise _half_set(found)
    if not rank < size:
        raise InvalidInputError(f"RANK={rank} must be less than WORLD_SIZE={size}; start every process by torchrun")
    return size > 1


def _torch_distributed() -> ModuleType:
    from torch import distributed  # noqa: PLC0415 - `autoaccum run` starts without torch

    return distributed


def _is_above_one(text: str) -> bool:
    return text.isdigit() and int(text) > 1


def _half_set(found: list[str]) -> InvalidInputError:
    missing = [name for name in VARIABLES if name not in found]
    return InvalidInputError(
        f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} set in the environment and {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not; start every process by torchrun, or unset {', '.join(found)}"
    )
