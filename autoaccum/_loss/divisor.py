"""Sums that are divided by a number of their batch (`num_items_in_batch`), within the loss of a window.

The number counts the targets of one of the loader's batches. The loss of a micro-batch is a sum divided by the number
of its batch, and the loss of a window is the sum over all of it divided by the sum of the numbers, unless each batch
carries the number of the whole window already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._data.numbers import number_at
from autoaccum._loss.batch_counts import counts_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.batches import Window
    from autoaccum._data.numbers import Path
    from autoaccum._data.pieces import Span


def of_window(path: Path, window: Window) -> float:
    """Return what the loss of a window is divided by, given the path of the number in its batches."""
    spans = window.spans
    numbers = [number_at(span.piece.batch, path) for span in spans]
    if _is_of_window(spans, numbers):
        return numbers[0]
    return sum(_share(span, number) for span, number in zip(spans, numbers, strict=True))


def of_micro_batches(path: Path, window: Window, sizes: Sequence[int]) -> list[float]:
    """Return the number that each micro-batch of a cut carries."""
    numbers, start = [], 0
    for size in sizes:
        numbers.append(number_at(window.parts(start, start + 1)[0][0], path) if size else 0.0)
        start += size
    return numbers


def _share(span: Span, number: float) -> float:
    """Return the share of its batch's number that belongs to a part of it: what it counts there, else by samples."""
    if span.is_whole or not number:
        return number
    counts = counts_in(span.piece.batch, span.piece.samples)
    if matching := [count for count, total in counts.items() if total == number]:
        return counts_in(span.cut(), span.samples)[min(matching)]
    return number * span.samples / span.piece.samples


def _is_of_window(spans: Sequence[Span], numbers: Sequence[float]) -> bool:
    """Whether each batch carries the count of the whole window already."""
    if len(spans) == 1 or any(number != numbers[0] for number in numbers):
        return False
    counts = [counts_in(span.cut(), span.samples) for span in spans]
    if numbers[0] in counts[0].values():
        return False
    return numbers[0] in [sum(one.get(count, 0.0) for one in counts) for count in counts[0]]
