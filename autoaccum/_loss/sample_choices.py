"""Chooses the samples on which losses are tried: from all over a window, and such as tell most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autoaccum._loss.batch_counts import LABELS, SUM, counts_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._data.batches import Window

# The most samples of a check, and the number below which its two parts are alike.
MOST_SAMPLES = 8
_TO_HALVE = 7
# The most samples that are looked at to choose these, and the most choices where nothing counts in the first.
_LOOKED_AT, _MOST_CHOICES = 64, 8


def choices(
    window: Window, most: int, contrasting: tuple[Sequence[int], Sequence[int]] = ((), ())
) -> Iterator[tuple[Window, int]]:
    """Yield samples from all over a window, and how many of them are in the first of two parts; the best choice first.

    The two parts of the first choice are of samples that are `contrasting`, if there are any.

    Later choices are of other samples, until none are left. A window of which no two samples can be joined has none.
    """
    groups = window.groups()
    largest = max(range(len(groups)), key=groups.__getitem__)
    start, samples = sum(groups[:largest]), groups[largest]
    number = min(most, samples)
    if number <= 1:
        return
    evenly = [start + place * (samples - 1) // (number - 1) for place in range(number)]
    unlike = _unlike(window, start, samples) if number < samples else []
    rows = list(dict.fromkeys([*unlike[: number // 2 + 1], *evenly]))[:number]
    rest = [start + row for row in torch.randperm(samples, generator=torch.Generator().manual_seed(0)).tolist()]
    for _ in range(_MOST_CHOICES):
        # About a third in the first part: losses may need two samples. One part is odd, since they may take pairs.
        first = (len(rows) + 1) // 3 if len(rows) >= _TO_HALVE else len(rows) // 2
        least, others = ([row for row in part if start <= row < start + samples] for part in contrasting)
        least = least[:first]
        first = len(least) or first
        yield window.chosen(list(dict.fromkeys([*least, *others, rows[0], *rows[:0:-1]]))[: len(rows)]), first
        contrasting = (), ()
        used = set(rows)
        rest = [row for row in rest if row not in used]
        rows = rest[:number]
        if len(rows) <= 1:
            return


def _unlike(window: Window, start: int, samples: int) -> list[int]:
    """Return two samples in which most counts and one with the least; then the least and most of each count."""
    if not window.is_nested:
        return []
    rows = range(start, start + samples, max(1, samples // _LOOKED_AT))
    counts = [counts_in(window.cut(row, row + 1), 1) for row in rows]
    in_all = [count for count in counts[0] if all(count in of_row for of_row in counts)]
    numbers = {count: [of_row[count] for of_row in counts] for count in in_all}
    # Something has to count in both parts: labels, or what a mask keeps.
    masks = [of_rows for (way, _), of_rows in numbers.items() if way in (LABELS, SUM) and not min(of_rows)]
    labels = next((of_rows for (way, _), of_rows in numbers.items() if way == LABELS), None)
    in_each = [(sum(mask[at] > 0 for mask in masks), labels and labels[at]) for at in range(len(rows))]
    by_number = sorted(range(len(rows)), key=in_each.__getitem__)
    found = [*by_number[:-3:-1], by_number[0]] if in_each[by_number[0]] != in_each[by_number[-1]] else []
    for (way, _), of_rows in numbers.items():
        if way != SUM and min(of_rows) != max(of_rows):
            found += [of_rows.index(min(of_rows)), of_rows.index(max(of_rows))]
    return [rows[at] for at in dict.fromkeys(found)]
