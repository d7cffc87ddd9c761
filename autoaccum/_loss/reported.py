"""Averages over a window the values that a loss reports besides its total, such as its parts or an accuracy.

Each micro-batch and each rank adds a sum and a weight, so the mean is over the samples that have the entry, however
they are cut and distributed. A plain number has the weight of its total; a (sum, weight) pair and a vector of
per-sample values have their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from autoaccum._loss.loss_values import in_full

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autoaccum._loss.known_shares import SingleMicroBatch
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.window_weights import WindowWeights

# Kinds of named numbers that ranks sum over a window. Those up to WEIGHT are multiplied by the weight of a rank's part;
# the others are summed unweighted.
LOSS, SUM, TOTAL, WEIGHT, OWN_TOTAL, OWN_WEIGHT = range(6)
Slot = tuple[int, str]
_PAIRS = ((TOTAL, WEIGHT), (OWN_TOTAL, OWN_WEIGHT))


def note(
    values: Sequence[LossValue], samples: int, weights: SingleMicroBatch | WindowWeights, into: dict[Slot, list[Any]]
) -> None:
    """Record the values that one micro-batch reports, as sums with their weights."""
    counts = weights.number_of([one for one in values if not one.is_reported])
    entry: tuple[Tensor, Any]
    for one in values:
        if not one.is_reported:
            continue
        # A sum over many samples is inaccurate in half precision.
        value = in_full(one.value)
        if one.is_sum:
            kind, entry = OWN_TOTAL, (value, one.weight)
        elif one.weight is not None:  # of a vector
            kind, entry = OWN_TOTAL, (value * samples, float(samples))
        else:
            kind, entry = SUM if counts.weight is None else TOTAL, (value * counts.factor, counts.weight)
        into.setdefault((kind, one.name), []).append(entry)


def sums_of(noted: Mapping[Slot, Sequence[tuple[Tensor, Any]]]) -> dict[Slot, Any]:
    """Return the sums and weights of a window, once its weights are known."""
    found: dict[Slot, Any] = {}
    for (kind, name), entries in noted.items():
        for value, own in entries:
            weight = own() if callable(own) else own
            if kind == TOTAL and not isinstance(weight, Tensor) and not weight and bool(value.isnan()):
                continue  # a mean over nothing; what is divided by max(1, 0) adds its sum
            found[kind, name] = found.get((kind, name), 0.0) + value
            if kind != SUM:
                found[kind + 1, name] = found.get((kind + 1, name), 0.0) + weight
    return found


def means(slots: Mapping[Slot, Any]) -> dict[str, Tensor]:
    """Return the reported values of a window by name, from its sums and weights; losses are left out."""
    found = {name: value for (kind, name), value in slots.items() if kind == SUM}
    for total, weight in _PAIRS:
        for (kind, name), value in slots.items():
            if kind == total:
                found[name] = value / slots[weight, name]
    return {name: value for name, value in found.items() if (LOSS, name) not in slots}
