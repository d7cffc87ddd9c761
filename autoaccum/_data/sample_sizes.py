"""How large the samples of a loader's lists are, and the order in which micro-batches take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import Window
from autoaccum._data.nesting import elements_of
from autoaccum._data.splits import ListOfSamples

if TYPE_CHECKING:
    from autoaccum._data.pieces import Split


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
