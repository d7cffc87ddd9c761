"""What is known of the summands of a loss: how each is put together from micro-batches.

Every loss of a micro-batch is a list of summands S / w. S adds up over micro-batches, and so does w, where the summand
is a mean: the summand of the window is (sum of S) / (sum of w).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from autoaccum._loss.batch_counts import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autoaccum._data.nesting import Path
    from autoaccum._loss.batch_counts import Count

# The relative difference of weights, which are counts, or sums in single precision.
SAME_WEIGHT = 1e-5
# A summand: the name of its loss, and its number in it.
SummandKey = tuple[str, int]


class Reduction(Enum):
    """How the values of micro-batches make that of the window."""

    MEAN = "a mean"
    SUM = "a sum"
    CONSTANT = "the same for all samples"
    UNCONFIRMED = "not confirmed"


class Source(Enum):
    """Where the weight of a summand comes from."""

    GRAPH = "its graph"
    STATED = "the loss, a (sum, weight) pair or a vector"
    COUNTED = "the batch"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a summand.

    Attributes:
        reduction: How it is put together. What is constant or not confirmed counts by samples.
        source: Where its weight w comes from.
        hints: Counts of the batch that predict the divisor that the graph holds, or else w, each with the number of
            one that is counted, which may be negative.
        per_divisor: What w was of that divisor in the last check; 0 if hints predict w, which is no multiple of one.
        per_sample: The w of a sample in the last check, in magnitude.
        least: The divisor, or w, where n is less than k in max(k, n); 0 if nothing is clamped. Of a sum its divisor,
            which none of the hints has exceeded.
        is_guess: Whether the graph suggests it, and no check has compared parts in which something counts.
        adds: Of what is not confirmed: whether its parts make the whole rather added than averaged.
        sums_add: Of what is not confirmed: whether its sums add up, and its weights alone do not.
        contradicts: Of what is not confirmed: whether gradients of the parts, times their weights, do not add up.
        number: Of a sum: where the batch carries the number that it is divided by.
    """

    reduction: Reduction
    source: Source = Source.GRAPH
    hints: Mapping[Count, float] = field(default_factory=dict)
    per_divisor: float = 0.0
    per_sample: float = 1.0
    least: float = 0.0
    is_guess: bool = False
    adds: bool = False
    sums_add: bool = False
    contradicts: bool = False
    number: Path | None = None

    @property
    def is_weighed(self) -> bool:
        """Whether a weight says how much of the window a micro-batch is; a sum is added."""
        return self.reduction is not Reduction.SUM

    @property
    def is_counted(self) -> bool:
        """Whether the batch counts what it is divided by: a part of a count fits by accident."""
        return any(each.is_integer() for each in self.hints.values())

    @property
    def kind(self) -> tuple[Reduction, Source]:
        """What must be the same in all windows, and on all ranks."""
        return self.reduction, self.source


BY_SAMPLES = Known(Reduction.MEAN, Source.COUNTED, {SAMPLES: 1.0})
STATED = Known(Reduction.MEAN, Source.STATED)
ADDED = Known(Reduction.SUM)


def hinted(
    known: Known, weights: Sequence[float], divisors: Sequence[Any], counts: Sequence[Mapping[Count, float]]
) -> Known:
    """Return a mean with the counts that predict its weights.

    Args:
        known: What is known of it; its `least` is that of the weights.
        weights: The w of all samples of a check, then of parts of them.
        divisors: The divisors that the graphs hold; None for none.
        counts: What the batch counts in each.
    """
    each = weights[0] / divisors[0] if all(divisors) else 0.0
    if each and not all(is_same(w, each * divisor) for w, divisor in zip(weights, divisors, strict=True)):
        each = 0.0
    unit = each or 1.0
    least = known.least / unit
    return replace(known, hints=hints_of([w / unit for w in weights], counts, least), per_divisor=each, least=least)


def hints_of(
    numbers: Sequence[float], counts: Sequence[Mapping[Count, float]], least: float = 0.0
) -> dict[Count, float]:
    """Return the counts that numbers are multiples of, each with the number for one that is counted.

    Args:
        numbers: Of all samples of a check, then of parts of them.
        counts: What the batch counts in each.
        least: The number that is in place of a smaller count, as in max(k, n); 0 for none.
    """
    whole = numbers[0]
    found: dict[Count, float] = {}
    for count, n in counts[0].items():
        if n and whole:
            each = whole / n
            each = float(round(each)) if is_same(each, round(each)) else each
            pairs = [(number / each, of_run.get(count, 0.0)) for number, of_run in zip(numbers, counts, strict=True)]
            is_clamp = each == 1.0 or is_same(each, least)  # max(k, n), or several times max(1, n)
            if least and (not is_clamp or all(own.get(count) == own[SAMPLES] for own in counts)):
                continue  # a part that is k tells nothing of it
            if all(is_same(number, own) or (own < number and is_same(number * each, least)) for number, own in pairs):
                found[count] = each
    return found


def is_same(weight: float, other: float, tolerance: float = SAME_WEIGHT) -> bool:
    """Whether two weights differ by rounding alone; False if one is NaN."""
    return abs(weight - other) <= tolerance * max(abs(weight), abs(other))


def merged(mine: Sequence[Known], theirs: Sequence[Known]) -> tuple[Known, ...] | None:
    """Return what a check knows of the summands of a loss with what was known; None if they contradict each other."""
    if [one.kind for one in mine] != [one.kind for one in theirs]:
        sure, its = _is_sure(mine), _is_sure(theirs)
        return None if sure is its else tuple(mine if sure else theirs)
    surer, other = (mine, theirs) if _is_sure(mine) else (theirs, mine)
    return tuple(
        replace(
            one,
            hints=one.hints if its.is_guess and not one.is_guess else _of_both(one.hints, its.hints),
            least=max(one.least, its.least),
        )
        for one, its in zip(surer, other, strict=True)
    )


def narrowed(known: Sequence[Known], by: Sequence[Known]) -> tuple[Known, ...]:
    """Return what is known of summands with the hints that single samples have left, where any is left."""
    pairs = zip(known, by, strict=True)
    return tuple(replace(one, hints=_of_both(one.hints, its.hints) or one.hints) for one, its in pairs)


def _is_sure(known: Iterable[Known]) -> bool:
    return not any(one.is_guess for one in known)


def _of_both(mine: Mapping[Count, float], theirs: Mapping[Count, float]) -> dict[Count, float]:
    """Return the hints of two checks: those that are the same part of the weight in both, if there are any."""
    common = {count: each for count, each in mine.items() if count in theirs}
    return {count: each for count, each in common.items() if is_same(each, theirs[count])} or common


def in_words(known: Sequence[Known]) -> str:
    """Return the reductions of a loss's summands, for a message."""
    return " + ".join(one.reduction.value for one in known)
