"""Chooses samples of a window that may contradict what others have shown of a loss.

These are samples with the least and the largest values, and with NaN, in any tensor of the batch: rare weights, missing
targets, classes that did not occur before; and samples of which two have the same target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autoaccum._data.nesting import tensors_in
from autoaccum._loss.counting import target_tensors

if TYPE_CHECKING:
    import random

    from torch import Tensor

    from autoaccum._data.batches import Window
    from autoaccum._loss.observation import Rows

# The most elements of a tensor that are looked at, and samples taken from each tensor for one reason.
_LOOKED_AT = 2**20
_OF_EACH = 2


def choose_unusual(window: Window, most: int, chance: random.Random) -> tuple[Window, list[Rows]]:
    """Return some samples, unusual ones first, and ways to split them; they can be joined, and are at least two.

    Args:
        window: The window, with a group of at least two samples.
        most: The most samples to take.
        chance: The random generator that draws the others.
    """
    groups = window.groups()
    largest = max(range(len(groups)), key=groups.__getitem__)
    start, samples = sum(groups[:largest]), groups[largest]
    unusual = [row for tensor in _by_sample(window, start, samples) for row in _unusual(tensor)]
    unusual = list(dict.fromkeys(unusual))[: max(1, most // 2)]
    usual = [row for row in range(samples) if row not in unusual]
    rows = [*unusual, *chance.sample(usual, min(len(usual), most - len(unusual)))]
    sides = list(range(len(rows)))
    cuts = dict.fromkeys(at for at in (len(unusual), 1, len(rows) // 2) if 0 < at < len(rows))
    splits = [[sides[:at], sides[at:]] for at in cuts]
    chance.shuffle(sides)
    return window.chosen(start + row for row in rows), [*splits, [sides[: len(rows) // 2], sides[len(rows) // 2 :]]]


def choose_repeated(window: Window) -> tuple[Window, list[Rows]] | None:
    """Return two samples with the same class and one of another, and ways to split them; None if there are none.

    Losses whose weights come from the counts of classes in a batch are plain means where each class occurs once.
    """
    if not window.is_plain:
        return None
    groups = window.groups()
    largest = max(range(len(groups)), key=groups.__getitem__)
    start, samples = sum(groups[:largest]), groups[largest]
    for targets in target_tensors(window.cut(start, start + samples)).values():
        if targets.dim() != 1 or len(targets) != samples or targets.is_floating_point() or targets.is_complex():
            continue
        found = targets.detach().cpu()
        values, counts = torch.unique(found, return_counts=True)
        if len(values) > 1 and int(counts.max()) > 1:
            twice = values[counts.argmax()]
            same, others = (found == twice).nonzero().flatten().tolist(), (found != twice).nonzero().flatten().tolist()
            rows = [*same[:2], others[0]]
            return window.chosen(start + row for row in rows), [[[0], [1, 2]], [[0, 1], [2]]]
    return None


def _by_sample(window: Window, start: int, samples: int) -> list[Tensor]:
    """Return the window's tensors that have one row for each sample, flattened, on the host."""
    return [
        tensor.detach().to("cpu", torch.float64).reshape(samples, -1)
        for tensor in tensors_in(window.cut(start, start + samples))
        if tensor.dim() and len(tensor) == samples and 0 < tensor.numel() <= _LOOKED_AT and not tensor.is_complex()
    ]


def _unusual(rows: Tensor) -> list[int]:
    finite = rows.nan_to_num()
    missing = rows.isnan().sum(1).double()
    scores = [finite.amax(1), -finite.amin(1)] + ([missing] if missing.any() else [])
    return [int(row) for score in scores for row in score.topk(min(_OF_EACH, len(score))).indices]
