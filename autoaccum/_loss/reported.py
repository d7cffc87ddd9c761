"""Averages over a window the values that a loss reports besides its total, such as its parts or an accuracy.

Each micro-batch and each rank adds a sum and a weight, so the mean is over the samples that have the entry, however
they are cut and distributed. A plain number has the weight of its total; a (sum, weight) pair and a vector of
per-sample values have their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._loss.loss_forms import Weighting
from autoaccum._loss.terms import Form, in_full

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from autoaccum._loss.loss_weights import Factors, LossWeights
    from autoaccum._loss.terms import Term

# Kinds of named numbers that ranks sum over a window. Those up to WEIGHT are multiplied by the weight of a rank's part;
# the others are summed unweighted.
LOSS, SUM, TOTAL, WEIGHT, OWN_TOTAL, OWN_WEIGHT = range(6)
Slot = tuple[int, str]
_PAIRS = ((TOTAL, WEIGHT), (OWN_TOTAL, OWN_WEIGHT))


def note(
    terms: Sequence[Term],
    samples: int,
    factors: Factors,
    weights: LossWeights,
    into: dict[Slot, list[Any]],
) -> None:
    """Record the values that one micro-batch reports."""
    losses = [term for term in terms if not term.is_reported]
    weight, is_sum = _like_total(losses, factors, weights)
    for term in terms:
        if not term.is_reported:
            continue
        # A sum over many samples is inaccurate in half precision.
        value = in_full(term.value)
        if term.over is Form.PAIR:
            _append(into, OWN_TOTAL, term.name, value, term.weight)
        elif term.over is Form.VECTOR:
            _append(into, OWN_TOTAL, term.name, value * samples, float(samples))
        elif is_sum:
            into.setdefault((SUM, term.name), []).append(value * weight)
        elif not (isinstance(weight, float) and weight == 0.0):  # otherwise a mean over nothing, which is NaN
            _append(into, TOTAL, term.name, value * weight, weight)


def means(slots: Mapping[Slot, Any]) -> dict[str, Tensor]:
    """Return the reported values of a window by name, from its sums and weights; losses are left out."""
    found = {name: value for (kind, name), value in slots.items() if kind == SUM}
    for total, weight in _PAIRS:
        for (kind, name), value in slots.items():
            if kind == total:
                found[name] = value / slots[weight, name]
    return {name: value for name, value in found.items() if (LOSS, name) not in slots}


def _append(into: dict[Slot, list[Any]], kind: int, name: str, total: Any, weight: Any) -> None:
    into.setdefault((kind, name), []).append(total)
    into.setdefault((kind + 1, name), []).append(weight)


def _like_total(losses: Sequence[Term], factors: Factors, weights: LossWeights) -> tuple[Any, bool]:
    """Return the weight of a plain number of this micro-batch, and whether it is summed without averaging."""
    if factors.alone:
        return 1.0, False
    weight: Any = factors.usual
    is_sum = weights.weighting is Weighting.SUM
    if len(losses) == 1:
        (loss,) = losses
        if len(own := factors.terms.get(loss.name, [])) == 1:
            weight, is_sum = own[0], weights.forms[loss.name][0].form is Form.SUM
        elif loss.weight is not None:
            total = 1.0 / weights.provisional_total(loss.name)
            weight, is_sum = loss.weight * factors.pairs.get(loss.name, total), False
        elif loss.over is Form.VECTOR:
            weight = factors.of_samples
    return weight * factors.scale, is_sum
