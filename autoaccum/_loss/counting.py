"""Finds the target tensors of a batch, and counts the targets of each micro-batch of a cut. Calls no model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._loss.weighting import Over, constants

if TYPE_CHECKING:
    from autoaccum._data.batches import Window
    from autoaccum._loss.weighting import Tally, Weighting

_PAIR = 2
# Names of targets, and of masks, lengths and weights, in mappings.
_TARGET_WORDS = ("label", "target")
_COUNTING_WORDS = ("mask", "len", "weight")
# The most dimensions of a tensor not named as a target: a uint8 image or a (N, heads, T, T) mask selects no targets.
_MAX_DIM = 2


def is_pair(batch: Any) -> bool:
    """Whether a batch is (inputs, targets)."""
    return isinstance(batch, tuple | list) and len(batch) == _PAIR


def target_tensors(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch that may determine which targets count, by name, the likeliest first.

    In a pair these are the targets. In a mapping they are the tensors named as targets, then masks and integer tensors,
    since a loss that receives the whole batch may use any of them; in a batch of several tensors, integer ones.
    """
    return {str(name): value for name, value in _named_targets(batch) if isinstance(value, Tensor) and value.dim()}


def other_tensors(batch: Any) -> frozenset[str]:
    """Return the names of `target_tensors` that nothing marks as targets, such as masks and tokens."""
    if is_pair(batch):
        return frozenset()
    return frozenset(name for name in target_tensors(batch) if not _is_named_as_target(name))


def _named_targets(batch: Any) -> Iterable[tuple[Any, Any]]:
    if is_pair(batch):
        targets = batch[1]
        if isinstance(targets, Mapping):
            return targets.items()
        return enumerate(targets) if isinstance(targets, list | tuple) else [("", targets)]
    items = list(batch.items() if isinstance(batch, Mapping) else _of_several(batch))
    named = [(name, value) for name, value in items if _is_named_as_target(name)]
    names = {name for name, _ in named}
    return [*named, *((name, value) for name, value in items if name not in names and _may_count(str(name), value))]


def _of_several(batch: Any) -> Iterable[tuple[int, Any]]:
    """Return the tensors of a batch of several, by their places, the last first: labels usually come last."""
    is_several = isinstance(batch, list | tuple) and all(isinstance(part, Tensor) for part in batch)
    return reversed(list(enumerate(batch))) if is_several else ()


def _is_named_as_target(name: Any) -> bool:
    return any(word in str(name) for word in _TARGET_WORDS)


def _may_count(name: str, value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dim() > _MAX_DIM:
        return False
    is_integer = not (value.is_floating_point() or value.is_complex())
    return is_integer or any(word in name for word in _COUNTING_WORDS)


def tallies_of(how: Weighting, window: Window, sizes: Sequence[int], *, in_full: bool = False) -> list[Tally]:
    """Return the tally of each micro-batch of a cut.

    Args:
        how: The weighting.
        window: The samples.
        sizes: The cut.
        in_full: Whether the tallies must be comparable with those of other windows, and not only with each other.
    """
    if how.over is Over.WEIGHED:
        stops = list(itertools.accumulate(sizes))
        return [window.weight(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    if not how.needs_targets:
        return list(sizes)
    if not window.is_nested:
        stops = list(itertools.accumulate(sizes))
        ends = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        return [how.tally(stop - start, target_tensors(window.seen(start, stop))) for start, stop in ends]
    is_even = not in_full and window.is_plain and len(window.groups()) == 1
    if is_even and all(how.counts_all(target_tensors(part)) for part in window):
        return list(sizes)  # the usual case, and far cheaper: all samples have the same weight
    tallies, start = [], 0
    for size in sizes:
        parts = window.parts(start, start + size)
        tallies.append(sum(how.tally(samples, target_tensors(part)) for part, samples in parts))
        start += size
    return tallies


def tallies_of_each(hows: Sequence[Weighting], window: Window, start: int, stop: int) -> Tensor:
    """Return the tally of each of a window's samples `start` to `stop`, shape (weightings, samples)."""
    if not window.is_plain:
        samples = [target_tensors(window.cut(row, row + 1)) for row in range(start, stop)]
        return torch.tensor([[float(how.tally(1, named)) for named in samples] for how in hows])
    parts = [(target_tensors(part), samples) for part, samples in window.parts(start, stop)]
    return torch.stack([torch.cat([how.tally_each(samples, named) for named, samples in parts]) for how in hows])


def constants_of(window: Window, start: int, stop: int) -> frozenset[tuple[str, float]]:
    """Return the target tensors of samples `start` to `stop` that hold a single value, with that value."""
    parts = [constants(target_tensors(part)) for part, _ in window.parts(start, stop)]
    return frozenset.intersection(*parts)
