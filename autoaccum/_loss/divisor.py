"""Sums that are divided by a number of their batch (`num_items_in_batch`), within the loss of a window.

The number counts the targets of one of the loader's batches. The loss of a micro-batch is a sum divided by the number
of its batch, and the loss of a window is the sum over all of it divided by the sum of the numbers, unless each batch
carries the number of the whole window already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._data.numbers import is_count, number_at, numbers_in
from autoaccum._loss.batch_counts import counts_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.batches import Window
    from autoaccum._data.numbers import Path


def carries_numbers(window: Window) -> bool:
    """Whether a window holds several of the loader's batches, or a part of one, that carry numbers of their own."""
    spans = window.spans
    is_several = len(spans) > 1 or any(not span.is_whole for span in spans)
    return is_several and window.is_nested and bool(numbers_in(spans[0].piece.batch))


def is_count_at(path: Path, window: Window) -> bool:
    """Whether the number at a path counts something: by its name, or by its value in the loader's batches."""
    return is_count(path) or all(
        number_at(span.piece.batch, path) in counts_in(span.piece.batch, span.piece.samples).values()
        for span in window.spans
    )


def of_window(path: Path, window: Window) -> tuple[float, bool]:
    """Return what the loss of a window is divided by, given the path of the number in its batches.

    A part of a batch has the share of its number that it counts. Of a number that is no count of its batch it has a
    share by samples; then False comes second.
    """
    spans = window.spans
    numbers = [number_at(span.piece.batch, path) for span in spans]
    counts = [counts_in(span.cut(), span.samples) for span in spans]
    first, in_all = numbers[0], [sum(one.get(count, 0.0) for one in counts) for count in counts[0]]
    if len(spans) > 1 and set(numbers) == {first} and first in in_all and first not in counts[0].values():
        return first, True  # each batch carries that of the window
    total, is_counted = 0.0, True
    for span, number, own in zip(spans, numbers, counts, strict=True):
        of_batch = own if span.is_whole else counts_in(span.piece.batch, span.piece.samples)
        matching = [count for count, found in of_batch.items() if found == number]
        is_counted &= span.is_whole or bool(matching)
        total += own[min(matching)] if matching else number * span.samples / span.piece.samples
    return total, is_counted


def of_micro_batches(path: Path, window: Window, sizes: Sequence[int]) -> list[float]:
    """Return the number that each micro-batch of a cut carries."""
    numbers, start = [], 0
    for size in sizes:
        numbers.append(number_at(window.parts(start, start + 1)[0][0], path) if size else 0.0)
        start += size
    return numbers
