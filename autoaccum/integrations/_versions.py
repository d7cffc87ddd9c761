"""Warns once of a framework's version that an adapter has not been tried with."""

from __future__ import annotations

import warnings
from importlib import metadata


def warn_if_untried(package: str, first: str, last: str) -> None:
    """Warn if the installed version of a package is outside those that the adapter was tried with.

    Args:
        package: Name of the distribution.
        first: The oldest version tried, as "major.minor".
        last: The newest version tried, as "major.minor".
    """
    found = metadata.version(package)
    if not _numbers(first) <= _numbers(found) <= _numbers(last):
        warnings.warn(
            f"autoaccum was tried with {package} {first} to {last}, and this is {found}; if something differs from "
            "training without it, use a version in between",
            stacklevel=3,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the major and the minor number of a version."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])
