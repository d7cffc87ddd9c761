"""Weights a loss that is divided by a number of its batch (`num_items_in_batch`) within the loss of its window.

The number counts the targets of one of the loader's batches. The loss of a micro-batch is a sum divided by the number
of its batch, and the loss of a window is the sum over all of it divided by the sum of the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autoaccum._data.numbers import number_at
from autoaccum._loss.counting import target_tensors
from autoaccum._loss.weighting import IGNORE_INDEX, Over, Weighting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.batches import Window
    from autoaccum._data.numbers import Path
    from autoaccum._data.pieces import Span

# Values that mark targets which do not count, by convention, and in masks.
_IGNORED = (IGNORE_INDEX, 0, -1)


class Divisor(NamedTuple):
    """What the loss of a window is divided by.

    Attributes:
        total: The number.
        is_known: False if a part of one of the loader's batches had to be given a share of its number by samples, since
            the number is no count of its targets.
        is_of_window: Whether each batch carries the number of the whole window already.
    """

    total: float
    is_known: bool
    is_of_window: bool = False


def of_window(path: Path, window: Window) -> Divisor:
    """Return what the loss of a window is divided by, given the path of the number in its batches."""
    numbers = [number_at(span.piece.batch, path) for span in window.spans]
    if _is_of_window(window.spans, numbers):
        return Divisor(numbers[0], is_known=True, is_of_window=True)
    shares = [_share(span, number) for span, number in zip(window.spans, numbers, strict=True)]
    return Divisor(sum(share.total for share in shares), is_known=all(share.is_known for share in shares))


def of_micro_batches(path: Path, window: Window, sizes: Sequence[int]) -> list[float]:
    """Return the number that each micro-batch of a cut carries."""
    numbers, start = [], 0
    for size in sizes:
        numbers.append(number_at(window.parts(start, start + 1)[0][0], path) if size else 0.0)
        start += size
    return numbers


def counts_targets(batch: Any, samples: int, number: float) -> bool:
    """Whether a number is the count of a batch's targets, or of those that count."""
    return number in _counts(batch, samples)


def _share(span: Span, number: float) -> Divisor:
    """Return the share of its batch's number that belongs to a part of it."""
    if span.is_whole or not number:
        return Divisor(number, is_known=True)
    of_all, of_part = _counts(span.piece.batch, span.piece.samples), _counts(span.cut(), span.samples)
    found = [part for whole, part in zip(of_all, of_part, strict=True) if whole == number]
    if found:
        return Divisor(float(found[0]), is_known=True)
    return Divisor(number * span.samples / span.piece.samples, is_known=False)


def _is_of_window(spans: Sequence[Span], numbers: Sequence[float]) -> bool:
    """Whether each batch carries the count of the whole window already."""
    first = spans[0].piece
    if len(spans) == 1 or any(number != numbers[0] for number in numbers):
        return False
    if counts_targets(first.batch, first.samples, numbers[0]):
        return False
    counts = [_counts(span.cut(), span.samples) for span in spans]
    are_alike = len({len(of_part) for of_part in counts}) == 1
    return are_alike and numbers[0] in [sum(of_parts) for of_parts in zip(*counts, strict=True)]


def _counts(batch: Any, samples: int) -> list[int]:
    """Return the numbers of targets in a batch, counted in every usual way, the likeliest first."""
    named = target_tensors(batch)
    if not named and isinstance(batch, tuple | list):
        whole = [item for item in batch if isinstance(item, Tensor) and item.dim() and not item.is_floating_point()]
        named = {str(number): item for number, item in enumerate(whole)}
    hows = []
    for name, targets in named.items():
        overs = (Over.COUNTED, Over.SHIFTED) if targets.dim() > 1 else (Over.COUNTED,)
        ignored = (0,) if targets.dtype is torch.bool or targets.is_floating_point() else _IGNORED
        hows += [Weighting(over, value, target=name) for value in ignored for over in overs]
        hows.append(Weighting(Over.ELEMENTS, target=name))
    tallies = [how.tally(samples, named) for how in hows]
    return [tally for tally in tallies if isinstance(tally, int)] + [samples]
