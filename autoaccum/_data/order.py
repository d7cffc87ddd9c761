"""The order in which lists of samples are taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import Window
from autoaccum._data.nesting import elements_of
from autoaccum._data.splits import ListOfSamples

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    sizes = list(map(elements_of, window.each_sample()))
    return arranged(window, sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True))


def arranged(window: Window, order: Sequence[int]) -> Window:
    """Return a window of lists of samples in another order, given by their indices."""
    samples = window.each_sample()
    found = Window.of_checked([[samples[index] for index in order]], window.split)
    found.places = order if window.places is None else [window.places[index] for index in order]
    return found
