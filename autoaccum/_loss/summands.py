"""What is known of the summands of a loss: how each is put together from micro-batches.

Every loss of a micro-batch is a list of summands S / w. S adds up over micro-batches, and so does w, where the summand
is a mean: the summand of the window is (sum of S) / (sum of w).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

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
        hints: Counts of the batch that predict w, each with the w of one that is counted, which may be negative.
        is_divisor: Whether the divisor that the graph holds is what the hints count; w may be a multiple of it.
        per_sample: The w of a sample in the last check, in magnitude.
        least: The k of max(k, n), where n is what the hints count; 0 if nothing is clamped. Of a sum its divisor, which
            none of the hints has exceeded.
        is_guess: Whether the graph suggests it, and no check has compared parts in which something counts.
        adds: Of what is not confirmed: whether its parts make the whole rather added than averaged.
        number: Of a sum: where the batch carries the number that it is divided by.
    """

    reduction: Reduction
    source: Source = Source.GRAPH
    hints: Mapping[Count, float] = field(default_factory=dict)
    is_divisor: bool = False
    per_sample: float = 1.0
    least: float = 0.0
    is_guess: bool = False
    adds: bool = False
    number: Path | None = None

    @property
    def is_weighed(self) -> bool:
        """Whether a weight says how much of the window a micro-batch is; a sum is added."""
        return self.reduction is not Reduction.SUM

    @property
    def kind(self) -> tuple[Reduction, Source]:
        """What must be the same in all windows, and on all ranks."""
        return self.reduction, self.source


BY_SAMPLES = Known(Reduction.MEAN, Source.COUNTED, {SAMPLES: 1.0})
STATED = Known(Reduction.MEAN, Source.STATED)
ADDED = Known(Reduction.SUM)


def by_samples(reduction: Reduction) -> Known:
    """Return a summand that counts by samples."""
    return replace(BY_SAMPLES, reduction=reduction)


def hints_of(weights: Sequence[float], counts: Sequence[Mapping[Count, float]]) -> dict[Count, float]:
    """Return the counts that predict weights, each with the weight of one that is counted.

    Args:
        weights: The w of all samples of a check, then of parts of them.
        counts: What the batch counts in each.
    """
    whole = weights[0]
    found: dict[Count, float] = {}
    for count, number in counts[0].items():
        if number and whole:
            each = 1.0 if is_same(whole / number, 1.0) else whole / number
            if all(is_same(w, of_run.get(count, 0.0) * each) for w, of_run in zip(weights, counts, strict=True)):
                found[count] = each
    return found


def counts_of_divisor(
    divisors: Sequence[float], counts: Sequence[Mapping[Count, float]], least: float = 0.0
) -> list[Count]:
    """Return the counts that divisors are; or, where `least` was read, less than it, as of max(least, n)."""
    return [
        count
        for count in counts[0]
        if all(
            is_same(divisor, number) or (divisor == least and number < least)
            for divisor, number in zip(divisors, (of_run.get(count, 0.0) for of_run in counts), strict=True)
        )
    ]


def is_same(weight: float, other: float, tolerance: float = SAME_WEIGHT) -> bool:
    """Whether two weights differ by rounding alone; False if one is NaN."""
    return abs(weight - other) <= tolerance * max(abs(weight), abs(other))


def merged(mine: Sequence[Known], theirs: Sequence[Known]) -> tuple[Known, ...] | None:
    """Return what two checks, or two ranks, know of the summands of a loss; None if they contradict each other."""
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
