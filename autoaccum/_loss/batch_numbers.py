"""Tells what the numbers that a batch carries do to its loss: one may divide it, and some differ within a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._data.numbers import is_count, numbers_in, spelled
from autoaccum._loss.divisor import counts_targets

if TYPE_CHECKING:
    from collections.abc import Container

    from autoaccum._data.batches import Window
    from autoaccum._data.numbers import Path
    from autoaccum._loss.observation import Attempt
    from autoaccum._system.notices import Notices


def divisor_of(name: str, attempt: Attempt, notices: Notices, *, is_sum: bool, less: float = 0.0) -> Path | None:
    """Return the path of the count in a batch that a loss is divided by; None if there is none.

    A number divides the loss if half of it doubles the loss. Numbers are made smaller, never larger: one may be an
    index or a size. It is a count if its name says so, or if it is the number of targets in its batch.

    Args:
        name: The loss.
        attempt: A few samples, and their loss.
        notices: Says what is taken for no count.
        is_sum: Whether the loss is known to be a sum while the number stays the same.
        less: A term of the loss that is not divided.
    """
    for path, number in attempt.numbers().items():
        half = number // 2 if number.is_integer() else number / 2
        if number <= 0.0 or not half or not _divides(name, attempt, path, half, less):
            continue
        if is_count(path) or (is_sum and _is_number_of_targets(attempt, path, number)):
            return path
        if is_sum:
            notices.say(
                f"loss {name!r} is a sum over the samples, divided by {spelled(path)} of the batch, which is taken for "
                "a scale and not for a count, by its name: it is not added up over a window. Call it "
                "'num_items_in_batch' if it counts what the loss is a mean over"
            )
    return None


class DifferingNumbers:
    """Says once of each number if it differs between a window's batches.

    Attributes:
        may_differ: Whether there is a number of which it was not yet said.
    """

    def __init__(self, notices: Notices) -> None:
        self.may_differ = True
        self._notices = notices
        self._said: set[Path] = set()

    def look(self, window: Window, divisors: Container[Path | None]) -> None:
        """Compare the numbers of a window's batches.

        Args:
            window: The window.
            divisors: Those that losses are divided by, which are added up over a window.
        """
        self.may_differ = self.may_differ and window.is_nested
        if not self.may_differ:
            return
        batches = [span.piece.batch for span in window.spans]
        found = [numbers_in(batch) for batch in batches[:1]]
        if not found or not found[0].keys() - self._said:
            self.may_differ = not found  # loaders keep the form of their batches
            return
        found += [numbers_in(batch) for batch in batches[1:]]
        for path, first in found[0].items():
            other = next((numbers[path] for numbers in found if numbers.get(path, first) != first), None)
            if other is None or path in self._said:
                continue
            self._said.add(path)
            if path not in divisors:
                self._notices.say(
                    f"{spelled(path)} differs between the loader's batches of a window ({first:g} and {other:g}): "
                    "samples of two such batches are never in one micro-batch, and each is run with the number of its "
                    "own batch"
                )


def _divides(name: str, attempt: Attempt, path: Path, half: float, less: float) -> bool:
    """Whether the loss grows as its number becomes about half of what it is."""
    value, ratio = attempt.value_of(name), attempt.numbers()[path] / half
    calls = attempt.repeat(name, numbers={path: half})  # exactly: integers are not rounded
    if calls is None or value == less:
        return False
    changed, _ = calls
    split = attempt.observed[0].split(name)
    tolerance = split.rounding.most * abs(value / (value - less))
    return abs((changed - less) / (value - less) - ratio) <= tolerance * ratio


def _is_number_of_targets(attempt: Attempt, path: Path, number: float) -> bool:
    pieces = [span.piece for span in attempt.window.spans if numbers_in(span.piece.batch).get(path) == number]
    return any(counts_targets(piece.batch, piece.samples, number) for piece in pieces[:1])
