"""The memory that one call of an operator takes beside its results, which no trace shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workspace:
    """The memory one call of an operator allocates and frees, excluding its results.

    Attributes:
        steps: Sizes held at the same time and freed before the results are allocated, one group after another.
        beside: Sizes held from the first step until the results exist.
    """

    steps: tuple[tuple[int, ...], ...] = ()
    beside: tuple[int, ...] = ()
