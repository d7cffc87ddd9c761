"""Counts what a mean may run over in a micro-batch on the host: labels, what a mask keeps, elements, samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoaccum._data.batches import Window

IGNORED = -100  # the label that does not count, by default in torch.nn.CrossEntropyLoss and every Transformers model
# How something is counted, and in which entry of the batch.
Count = tuple[str, str]
SAMPLES: Count = ("samples", "")
# The most dimensions, and elements a sample, of a tensor that may hold labels, a mask or weights.
_MOST_DIMS = 2
_MOST_ELEMENTS = 2**16

LABELS = f"labels that are not {IGNORED}"
SHIFTED = f"{LABELS}, shifted by one"
SUM, POSITIVE = "the sum", "the number above 0"
_WAYS: dict[str, Callable[[Any], Any]] = {
    LABELS: lambda one: one.size - _ignored(one),
    SHIFTED: lambda one: one[..., 1:].size - _ignored(one[..., 1:]),
    SUM: lambda one: one.sum(dtype="float64"),
    POSITIVE: lambda one: (one > 0).sum(),
}
TARGETS = "[1]"  # the name of those of a pair
ELEMENTS = "elements"
# What sums are divided by that count a whole window, whatever its masks are.
OF_WINDOWS = (SAMPLES[0], ELEMENTS, LABELS, SHIFTED)


def counts_in(batch: Any, samples: int, wanted: frozenset[Count] | None = None) -> dict[Count, float]:
    """Return what is counted in a batch; the counts of parts add up to those of the whole."""
    found: dict[Count, float] = {SAMPLES: float(samples)} if wanted is None or SAMPLES in wanted else {}
    for name, tensor in _named(batch, ""):
        for way, number in _counted(tensor, samples, wanted, name):
            found[way, name] = found.get((way, name), 0.0) + number
    return found


def counts_of(window: Window, start: int, stop: int, wanted: frozenset[Count] | None = None) -> dict[Count, float]:
    """Return some counts of samples `start` to `stop` (exclusive) of a window, or all."""
    parts = window.parts(start, stop) if window.is_nested else [(window.peek(start, stop), stop - start)]
    found = dict.fromkeys(wanted or (), 0.0)
    for batch, samples in parts:
        for count, number in counts_in(batch, samples, wanted).items():
            found[count] = found.get(count, 0.0) + number
    return found


def _is_mask(array: Any) -> bool:
    """Whether integers are a mask, of 0 and 1."""
    return bool(array.size) and array.min() >= 0 and array.max() <= 1


def _ignored(labels: Any) -> int:
    """Return how many labels do not count. Labels are never negative, and the minimum takes one pass."""
    return int((labels == IGNORED).sum()) if labels.size and labels.min() < 0 else 0


def _as_array(tensor: Tensor) -> Any:
    """Return a tensor for NumPy, which counts without an operator of torch."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    tensor = tensor.cpu() if tensor.device.type != "cpu" else tensor
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


def in_words(count: Count) -> str:
    """Return what is counted, for a message."""
    way, name = count
    return way if not name else f"{way} in {name}"


def _named(batch: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of a batch by name; those of a list of samples share theirs."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield name or "the batch", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _named(value, f"{name}[{key!r}]")
    elif isinstance(batch, tuple | list):
        for place, value in enumerate(batch):
            is_sample = isinstance(batch, list) and bool(name)
            yield from _named(value, f"{name}[]" if is_sample else f"{name}[{place}]")


def _counted(tensor: Tensor, samples: int, wanted: frozenset[Count] | None, name: str) -> Iterator[tuple[str, float]]:
    if tensor.is_complex() or tensor.is_sparse:
        return
    if tensor.dim() <= _MOST_DIMS and tensor.numel() <= _MOST_ELEMENTS * max(samples, 1):
        of_labels = not (tensor.is_floating_point() or tensor.dtype is torch.bool)
        are_rows = tensor.dim() > 1 or "[]" in name  # otherwise samples would be shifted
        ways = [way for way in _WAYS if (wanted is None or (way, name) in wanted) and (way != SHIFTED or are_rows)]
        array = _as_array(tensor) if ways else None
        for way in ways:
            if of_labels if way.startswith("labels") else way != SUM or not of_labels or _is_mask(array):
                yield way, float(_WAYS[way](array))
    if wanted is None or (ELEMENTS, name) in wanted:
        yield ELEMENTS, float(tensor.numel())
