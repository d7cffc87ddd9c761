"""Reads rank and world size from the launcher's variables, before a process group exists."""

from __future__ import annotations

import os

from torch import distributed

from autoaccum.errors import InvalidInputError

# Variables set by torchrun and needed by torch.distributed.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = "AUTOACCUM_RANK_TIMEOUT_S"
# torch.distributed's default timeout for Gloo.
_TIMEOUT_S = 1800.0


def world_size() -> int:
    """Return the number of processes of this training, by torch.distributed or else by torchrun's variables.

    Raises:
        InvalidInputError: Only some of the variables are set.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return _number("WORLD_SIZE") if is_to_be_set_up() else 1


def own_rank() -> int:
    """Return the rank of this process, which need not have joined the process group.

    Raises:
        InvalidInputError: Only some of torchrun's variables are set.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return _number("RANK") if is_to_be_set_up() else 0


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0


def timeout_s() -> float:
    """Return how long ranks wait for each other.

    Raises:
        InvalidInputError: The variable AUTOACCUM_RANK_TIMEOUT_S is not a positive number.
    """
    text = os.environ.get(_TIMEOUT, "")
    try:
        seconds = float(text) if text else _TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise InvalidInputError(f"{_TIMEOUT}={text!r} must be a positive number of seconds; set it to one, or unset it")
    return seconds


def is_to_be_set_up() -> bool:
    """Whether a launcher started several processes, and torch.distributed is not set up yet.

    Raises:
        InvalidInputError: torchrun's variables are half set.
    """
    if not distributed.is_available() or distributed.is_initialized():
        return False
    found = [name for name in VARIABLES if os.environ.get(name)]
    if "RANK" not in found or "WORLD_SIZE" not in found:
        # One of these two alone means nothing (some clusters set WORLD_SIZE in every job); both mean ranks.
        if "RANK" in found or _is_above_one(os.environ.get("WORLD_SIZE", "")):
            raise _half_set(found)
        return False
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if size > 1 and len(found) < len(VARIABLES):
        raise _half_set(found)
    if not rank < size:
        raise InvalidInputError(f"RANK={rank} must be less than WORLD_SIZE={size}; start every process by torchrun")
    return size > 1


def _is_above_one(text: str) -> bool:
    return text.isdigit() and int(text) > 1


def _half_set(found: list[str]) -> InvalidInputError:
    missing = [name for name in VARIABLES if name not in found]
    return InvalidInputError(
        f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} set in the environment and {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} not; start every process by torchrun, or unset {', '.join(found)}"
    )


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdigit():
        raise InvalidInputError(
            f"{name}={text!r} in the environment is not a whole number; start by torchrun, or unset it"
        )
    return int(text)
