"""Timelines of a step of any size, from as few traced ones as possible.

Two sizes are traced. If every storage of theirs is fixed or proportional to the samples, any other size follows
exactly. If not, sizes are traced where they are asked for, at most between two powers of two, so that the timeline of a
size does not depend on which others were asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._estimate.allocation_trace import between
from autoaccum._system.own_code import raised_here
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoaccum._estimate.allocation_trace import Timeline


class TracedSizes:
    """Traces sizes on request.

    Args:
        run: Traces a size.
        low: The smaller size from which others are derived.
        high: The larger one, traced at once; the same as `low` to derive none.
    """

    def __init__(self, run: Callable[[int], Timeline], low: int, high: int) -> None:
        self._run = run
        self._low, self._high = low, high
        self._known = {high: run(high)}

    def __call__(self, size: int) -> Timeline:
        """Return the timeline of a size."""
        if size not in self._known:
            is_base = size == self._low
            self._known[size] = self._run(size) if is_base else self._derived(size) or self._traced(size)
        return self._known[size]

    def _derived(self, size: int) -> Timeline | None:
        exact = between(self(self._low), self(self._high), size) if self._low < self._high else None
        least = 1 << (size.bit_length() - 1)
        if exact is not None or least == size:
            return exact
        return between(self(least), self(2 * least), size)

    def _traced(self, size: int) -> Timeline:
        high = self._high
        try:
            return self._run(size)
        except Exception as error:
            # The model refuses this size, as batch statistics refuse one sample. The next power of two takes more. Our
            # own errors are bugs.
            if size >= high or (raised_here(error) and not isinstance(error, InvalidInputError)):
                raise
            return self(min(high, 1 << size.bit_length()))
