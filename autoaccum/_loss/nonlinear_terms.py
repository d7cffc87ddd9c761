"""Finds entries that a model reports with its loss and that no weighting of parts gives for the whole.

Such an entry may be a term of the loss (a router's load-balancing loss, times a coefficient). If it is too large to
hide in rounding, no weighting fits the loss either; but one fits what is left of the loss without that term.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from autoaccum._loss.counting import target_tensors
from autoaccum._loss.weighting import Over, Weighting, shares

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from autoaccum._loss.observation import Attempt, Rows
    from autoaccum._loss.reduction_candidates import Split

# The least share of a loss that must be left without its term.
_LEFT = 0.1
# Rounding beyond this hides the difference between weightings.
_HALF = 1e-3
# A misfit that rounding explains, but seldom.
_DOUBTFUL = 10.0
# Splits that are made, and how many must agree on it at least.
_SPLITS = 6
_LEAST = 3


def bent_entries(attempt: Attempt, known: Iterable[Weighting] = (), *, is_certain: bool = False) -> list[str]:
    """Return the names of the reported entries that no usual weighting of the parts gives for the sample.

    Args:
        attempt: A few samples, and their losses.
        known: Further weightings, of the losses.
        is_certain: Whether some term is known to bend the loss, so that the slightest doubt names an entry.
    """
    most = _DOUBTFUL if is_certain else math.inf
    first = attempt.observed[0]
    hows = [*_usual(attempt), Weighting(Over.SUM), *known]
    whole, *parts = first.reported
    names = [name for name, term in whole.items() if term.over is None and all(name in part for part in parts)]
    return [name for name in names if attempt.can_be_split and _is_bent(first.split(name), hows, most)]


class Rest(NamedTuple):
    """What is left of a loss without a term that bends it.

    Attributes:
        how: Its weighting.
        term: The value of the term for the sample.
    """

    how: Weighting
    term: float


def rest_of(name: str, attempt: Attempt) -> Rest | None:
    """Return what is left of a loss without a bent entry, if a weighting fits that; None if none does."""
    entries = bent_entries(attempt)
    observed = attempt.more(_each_against_the_rest(attempt)) if entries else []
    if len(observed) < _LEAST:
        return None
    fits = [
        _fit([one.split(name) for one in observed], [one.split(entry) for one in observed], how, entry)
        for how in (*_usual(attempt), Weighting(Over.SUM))
        for entry in entries
    ]
    best = min(fits, key=lambda fit: fit.misfit)
    whole, term = attempt.value_of(name), best.coefficient * float(attempt.observed[0].reported[0][best.entry].value)
    rounding = observed[0].split(name).rounding
    # If nothing is left, both hardly change from one sample to the next, and any coefficient does.
    is_found = best.misfit <= rounding.most and abs(whole - term) >= _LEFT * abs(whole)
    return Rest(best.how, term) if is_found and rounding.most < _HALF else None


def _each_against_the_rest(attempt: Attempt) -> list[Rows]:
    rows = [row for part in attempt.splits[0] for row in part]
    return [[[one], [row for row in rows if row != one]] for one in rows[:_SPLITS]]


def _usual(attempt: Attempt) -> list[Weighting]:
    """Return the weightings of ordinary losses, the likeliest first."""
    found = []
    for name, targets in target_tensors(attempt.sample.cut(0, attempt.sample.samples)).items():
        is_counted = not (targets.is_floating_point() or targets.dtype is torch.bool)
        overs = (Over.COUNTED, Over.SHIFTED) if is_counted and targets.dim() > 1 else (Over.COUNTED,)
        found += [Weighting(over, target=name) for over in overs] if is_counted else []
        found.append(Weighting(Over.ELEMENTS, target=name))
    return [*found, Weighting(Over.SAMPLES)]


def _is_bent(split: Split, hows: Sequence[Weighting], most: float) -> bool:
    return math.isfinite(split.whole) and all(split.misfit(how) >= most for how in hows)


class _Fit(NamedTuple):
    misfit: float
    coefficient: float
    how: Weighting
    entry: str


def _fit(of_loss: Sequence[Split], of_entry: Sequence[Split], how: Weighting, entry: str) -> _Fit:
    """Return the coefficient of an entry that leaves a loss of this weighting, and the largest relative misfit."""
    lacks = [(_lack(loss, how), _lack(term, how)) for loss, term in zip(of_loss, of_entry, strict=True)]
    norm = sum(term**2 for _, term in lacks)
    is_finite = math.isfinite(norm + sum(loss for loss, _ in lacks))
    if not is_finite or not norm or not all(split.whole for split in of_loss):
        return _Fit(math.inf, 0.0, how, entry)
    coefficient = sum(loss * term for loss, term in lacks) / norm
    misfits = [abs(loss - coefficient * term) for loss, term in lacks]
    return _Fit(
        max(misfit / abs(split.whole) for misfit, split in zip(misfits, of_loss, strict=True)), coefficient, how, entry
    )


def _lack(split: Split, how: Weighting) -> float:
    """Return what the parts lack of the whole."""
    tallies = [how.tally(samples, named) for samples, named in zip(split.samples, split.named, strict=True)]
    if not any(tallies):
        return math.nan
    factors = shares(how, tallies, 0)
    return split.whole - sum(factor * part for factor, part in zip(factors, split.parts, strict=True) if factor)
