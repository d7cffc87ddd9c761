"""Reads the environment variables that `autoaccum run` sets for the processes that it starts.

`fit` obeys one of them, the most samples allowed on one device at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MICRO_BATCH = "AUTOACCUM_MAX_MICRO_BATCH"
MICRO_BATCH = "AUTOACCUM_MICRO_BATCH"
ACCUM_STEPS = "AUTOACCUM_ACCUM_STEPS"
TARGET_BATCH = "AUTOACCUM_TARGET_BATCH"
WORLD_SIZE = "AUTOACCUM_WORLD_SIZE"
ATTEMPT = "AUTOACCUM_ATTEMPT"
REASON_FILE = "AUTOACCUM_REASON_FILE"

# No batch has this many digits; `int` rejects thousands of digits with its own error.
_MOST_DIGITS = 18


def max_micro_batch(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the most samples that a wrapper allows on one device at once; None if there is no such cap.

    Args:
        environment: The variables of this process; others in tests.

    Raises:
        InvalidInputError: The variable is not a whole number of at least 1.
    """
    return positive_int(MAX_MICRO_BATCH, environment)


def positive_int(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return a variable that holds a whole number of at least 1; None if it is not set.

    Raises:
        InvalidInputError: It has another value.
    """
    text = environment.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) >= 1):
        raise InvalidInputError(
            f"the environment variable {name}={text!r} is not a whole number of at least 1; set it to one, or unset it"
        )
    return int(text)
