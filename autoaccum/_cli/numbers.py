"""Upper bounds of numbers and texts in options: the library checks lower bounds and units."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

# More samples or steps than any training has; torch counts up to 2**63.
MOST = 10**12
# Slurm's numbers have 32 bits.
MOST_OF_SLURM = 2**31 - 1
# Ten years.
_MOST_MINUTES = 10 * 366 * 24 * 60
# A size or a time has about twenty characters; Python does not parse numbers of thousands of digits.
_MOST_CHARACTERS = 64


def check_counts(given: Mapping[str, int | None], most: int = MOST) -> None:
    """Raise if a count exceeds a bound.

    Args:
        given: Values by the name of their option, without dashes; None if it was not given.
        most: The bound.

    Raises:
        InvalidInputError: One is larger.
    """
    for name, value in given.items():
        if isinstance(value, int) and value > most:
            raise InvalidInputError(f"--{_option(name)} {_short(value)} is too large; pass at most {most}")


def check_minutes(name: str, minutes: float | None) -> None:
    """Raise if a time is not positive, not finite, or longer than any training.

    Raises:
        InvalidInputError: The time is one of these.
    """
    if minutes is not None and not 0 < minutes <= _MOST_MINUTES:
        raise InvalidInputError(
            f"--{_option(name)} {minutes:g} must be a number of minutes above 0 and at most {_MOST_MINUTES} (ten years)"
        )


def check_texts(given: Mapping[str, str | None]) -> None:
    """Raise if a size or a time has too many characters.

    Args:
        given: Values by the name of their option, without dashes; None if it was not given.

    Raises:
        InvalidInputError: One is longer.
    """
    for name, text in given.items():
        if text is not None and len(text) > _MOST_CHARACTERS:
            raise InvalidInputError(
                f"--{_option(name)} {text[:20]}… has {len(text)} characters; pass a size such as 24GiB, or a time such "
                "as 12:00:00"
            )


def _option(name: str) -> str:
    return name.replace("_", "-")


def _short(value: int) -> str:
    text = str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:20]}… ({len(text)} digits)"
