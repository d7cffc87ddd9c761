"""Sums that are divided by a number of their batch (`num_items_in_batch`), within the loss of a window.

The number counts the targets of one of the loader's batches. The loss of a micro-batch is a sum divided by the number
of its batch, and the loss of a window is the sum over all of it divided by the sum of the numbers, unless each batch
carries the number of the whole window already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from autoaccum._data.numbers import is_count, number_at, numbers_in
from autoaccum._loss.batch_counts import counts_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.batches import Window
    from autoaccum._data.numbers import Path
    from autoaccum._data.pieces import Span


class Divisor(NamedTuple):
    """What the loss of a window is divided by.

    Attributes:
        total: The number.
        is_counted: False if a part of one of the loader's batches was given a share of its number by samples, since the
            number is no count of that batch.
    """

    total: float
    is_counted: bool


def carries_numbers(window: Window) -> bool:
    """Whether a window holds several of the loader's batches, or a part of one, that carry numbers of their own."""
    spans = window.spans
    is_several = len(spans) > 1 or any(not span.is_whole for span in spans)
    return is_several and window.is_nested and bool(numbers_in(spans[0].piece.batch))


def is_count_at(path: Path, window: Window) -> bool:
    """Whether the number at a path counts something: by its name, or by its value in the loader's batches."""
    if is_count(path):
        return True
    return all(
        number_at(span.piece.batch, path) in counts_in(span.piece.batch, span.piece.samples).values()
        for span in window.spans
    )


def of_window(path: Path, window: Window) -> Divisor:
    """Return what the loss of a window is divided by, given the path of the number in its batches."""
    spans = window.spans
    numbers = [number_at(span.piece.batch, path) for span in spans]
    if _is_of_window(spans, numbers):
        return Divisor(numbers[0], is_counted=True)
    shares = [_share(span, number) for span, number in zip(spans, numbers, strict=True)]
    return Divisor(sum(share.total for share in shares), all(share.is_counted for share in shares))


def of_micro_batches(path: Path, window: Window, sizes: Sequence[int]) -> list[float]:
    """Return the number that each micro-batch of a cut carries."""
    numbers, start = [], 0
    for size in sizes:
        numbers.append(number_at(window.parts(start, start + 1)[0][0], path) if size else 0.0)
        start += size
    return numbers


def _share(span: Span, number: float) -> Divisor:
    """Return the share of its batch's number that belongs to a part of it: what it counts there, else by samples."""
    if span.is_whole or not number:
        return Divisor(number, is_counted=True)
    counts = counts_in(span.piece.batch, span.piece.samples)
    if matching := [count for count, total in counts.items() if total == number]:
        return Divisor(counts_in(span.cut(), span.samples)[min(matching)], is_counted=True)
    return Divisor(number * span.samples / span.piece.samples, is_counted=False)


def _is_of_window(spans: Sequence[Span], numbers: Sequence[float]) -> bool:
    """Whether each batch carries the count of the whole window already."""
    if len(spans) == 1 or any(number != numbers[0] for number in numbers):
        return False
    counts = [counts_in(span.cut(), span.samples) for span in spans]
    if numbers[0] in counts[0].values():
        return False
    return numbers[0] in [sum(one.get(count, 0.0) for one in counts) for count in counts[0]]
