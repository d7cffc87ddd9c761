"""Averages over a window what a loss reports besides its total: its parts, an accuracy.

Each micro-batch and each rank adds a sum and a weight, so that the mean is over the samples that have the entry,
however they are cut and distributed. A plain number weighs as its total does; a (sum, weight) pair and a vector of
per-sample values have their own weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._loss.weighting import Over, in_full

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from autoaccum._loss.objective import Factors
    from autoaccum._loss.terms import Term
    from autoaccum._loss.weighting import Weighting

# What ranks add up of a window: kinds of numbers, each with a name. Those up to WEIGHT are multiplied by what a rank's
# part weighs; the others count for themselves.
LOSS, SUM, TOTAL, WEIGHT, OWN_TOTAL, OWN_WEIGHT = range(6)
Slot = tuple[int, str]
_PAIRS = ((TOTAL, WEIGHT), (OWN_TOTAL, OWN_WEIGHT))


def note(
    terms: Sequence[Term],
    samples: int,
    factors: Factors,
    weighting_of: Callable[[str], Weighting],
    into: dict[Slot, list[Any]],
) -> None:
    """Note what one micro-batch reports.

    Args:
        terms: What came out of one forward pass, losses and reported entries.
        samples: Samples in the micro-batch.
        factors: What its losses are multiplied by.
        weighting_of: Returns what the loss of a name runs over.
        into: The sums and weights to add to.
    """
    losses = [term for term in terms if not term.is_reported]
    weight, is_sum = _like_total(losses, factors, weighting_of)
    for term in terms:
        if not term.is_reported:
            continue
        # In half precision a sum over many samples is off.
        value = in_full(term.value)
        if term.over is Over.PAIR:
            _append(into, OWN_TOTAL, term.name, value, term.weight)
        elif term.over is Over.VECTOR:
            _append(into, OWN_TOTAL, term.name, value * samples, float(samples))
        elif is_sum:
            into.setdefault((SUM, term.name), []).append(value * weight)
        elif not (isinstance(weight, float) and weight == 0.0):  # else the mean over nothing, which is not a number
            _append(into, TOTAL, term.name, value * weight, weight)


def means(slots: Mapping[Slot, Any]) -> dict[str, Tensor]:
    """Return what a window reports, by name, from its sums and weights; what is a loss too is left out."""
    found = {name: value for (kind, name), value in slots.items() if kind == SUM}
    for total, weight in _PAIRS:
        for (kind, name), value in slots.items():
            if kind == total:
                found[name] = value / slots[weight, name]
    return {name: value for name, value in found.items() if (LOSS, name) not in slots}


def _append(into: dict[Slot, list[Any]], kind: int, name: str, total: Any, weight: Any) -> None:
    into.setdefault((kind, name), []).append(total)
    into.setdefault((kind + 1, name), []).append(weight)


def _like_total(losses: Sequence[Term], factors: Factors, weighting_of: Callable[[str], Weighting]) -> tuple[Any, bool]:
    """Return what a plain number of this micro-batch weighs, and whether it is added up as it is."""
    is_sum = bool(losses) and all(weighting_of(term.name).over is Over.SUM for term in losses)
    if len(losses) != 1:
        return factors.usual, is_sum
    (loss,) = losses
    if loss.over is Over.PAIR:
        if factors.alone:
            return 1.0, False
        return loss.weight * factors.named.get(loss.name, factors.provisional), False  # type: ignore[operator]
    return factors.of(loss.name), is_sum
