"""How large the samples of a loader's lists are, and the order in which micro-batches take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from autoaccum._data.batches import Window
from autoaccum._data.nesting import tensors_in
from autoaccum._data.splits import ListOfSamples

if TYPE_CHECKING:
    from autoaccum._data.pieces import Split


def elements_of(sample: Any) -> int:
    """Return the elements of a sample's largest tensor, array or list of numbers; 0 if it holds none."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, list) and sample and isinstance(sample[0], int | float):
        return len(sample)
    if isinstance(sample, list | tuple | Mapping):
        items = sample.values() if isinstance(sample, Mapping) else sample
        return max(map(elements_of, items), default=0)
    if isinstance(sample, np.ndarray):
        return sample.size
    is_plain = isinstance(sample, int | float | str | bytes | None)
    return 0 if is_plain else max(map(Tensor.numel, tensors_in(sample)), default=0)


def by_size(batch: Any, split: Split | None) -> Any:
    """Return a list of samples with the largest ones first, and any other batch as it is."""
    return sorted(batch, key=elements_of, reverse=True) if isinstance(split, ListOfSamples) else batch


def largest_first(window: Window) -> Window:
    """Return a window of lists of samples with the largest ones first, and any other window as it is.

    Each micro-batch then holds samples of like size, so that its collator pads little; and the one that takes most
    memory is the first. Samples of one size stay in the loader's order.
    """
    if not isinstance(window.split, ListOfSamples):
        return window
    samples = [sample for part in window.raw() for sample in part]
    sizes = list(map(elements_of, samples))
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    found = Window.of_checked([[samples[index] for index in order]], window.split)
    found.places = order
    return found
