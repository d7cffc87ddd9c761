"""Compares what a loss gave for some samples with what it gave for two parts: do the sums add up, do the weights?

A summand is S / w. Where S adds up and w does too, it is a mean; where S adds up and w is the same in all, a sum; where
the gradients themselves are the same, no sample changes it. Where S adds up and w is max(k, n), a count of the batch
says n. Anything else compares samples with each other, and micro-batches do not give its gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autoaccum._loss.batch_counts import ELEMENTS, LABELS, POSITIVE, SAMPLES, SHIFTED, SUM
from autoaccum._loss.observation import differ
from autoaccum._loss.summands import BY_SAMPLES, SAME_WEIGHT, Known, Reduction, Source, hinted, hints_of, is_same

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.graph_reader import Summand
    from autoaccum._loss.observation import Observation

# Passes of other random numbers differ by less than so many times what two of the same samples differ by, where that is
# known of so many parameters; and values, which are less random, by this part of them.
_SPREADS, _FOR_SPREAD, _NEARLY = 6.0, 4, 0.15
# The ways of counting that may stand for a weight which the graph does not say; what a mask keeps does not, but is
# compared with them from then on.
_TOLD_BY_BATCH = (LABELS, ELEMENTS, SAMPLES[0])
# The ways of counting what a loss divides by as max(k, n).
_OF_MASKS = (LABELS, SHIFTED, SUM, POSITIVE)


def compare(
    whole: Observation, parts: Sequence[Observation], again: Observation | None, tolerance: float
) -> list[Known]:
    """Return how each summand of a loss is put together.

    Args:
        whole: Of all samples.
        parts: Of two parts of them.
        again: Once more of all samples, with other random numbers; None if it was not tried.
        tolerance: The relative difference that rounding may cause.
    """
    spread = again if again is not None and differ(whole, again, tolerance) else None
    if len({len(one.summands) for one in (whole, *parts)}) > 1:
        whole, parts = whole.as_one(), [part.as_one() for part in parts]
    runs = [whole, *parts]
    return [_Compared(number, runs, tolerance, spread).known() for number in range(len(whole.summands))]


class _Compared:
    """One summand of all samples beside that of the parts.

    Args:
        number: The summand.
        runs: All samples, then the parts.
        tolerance: The relative difference that rounding may cause.
        again: All samples with other random numbers, where they make a difference.
    """

    def __init__(self, number: int, runs: Sequence[Observation], tolerance: float, again: Observation | None) -> None:
        self._number, self._runs = number, runs
        self._summands = [run.summands[number] for run in runs]
        self._gradients = [run.gradients[number] for run in runs]
        self._added = [self._gradients]  # what has to add up
        if len(runs[0].summands) == 1:  # otherwise the value of a summand is not known
            self._added.append([torch.tensor([run.value], dtype=torch.float64) for run in runs])
        self._tolerance = tolerance
        self._sums_add = self._contradicts = False
        self._is_random = again is not None
        is_alike = again is not None and len(again.summands) == len(runs[0].summands)
        self._again = again.gradients[number] if again is not None and is_alike else self._gradients[0]

    def known(self) -> Known:
        """Return how the summand is put together."""
        if chooses(self._number, self._runs) or (self._is_random and self._is_normalised()):
            return replace(self._unconfirmed(), contradicts=True)
        weights = [one.weight for one in self._summands]
        is_read = None not in weights
        if is_read and (mean := self._clamped(weights) or self._mean(weights)) is not None:
            return mean
        if self._is_constant():
            return replace(BY_SAMPLES, reduction=Reduction.CONSTANT)
        if not is_read:
            return self._unread()
        if all(is_same(one, weights[0]) for one in weights) and self._is_sum():
            return sum_of(self._summands[0], self._runs[0])
        found = replace(self._unconfirmed(), source=Source.GRAPH, sums_add=self._sums_add)
        return replace(found, contradicts=self._contradicts)

    def _unconfirmed(self) -> Known:
        """Return what is not confirmed, and whether its parts make the whole rather added than averaged."""
        whole, *parts = self._gradients
        shares = [run.samples / self._runs[0].samples for run in self._runs[1:]]
        mean = _sum([share * part for share, part in zip(shares, parts, strict=True)])
        adds = float((_sum(parts) - whole).norm()) < float((mean - whole).norm())
        return replace(BY_SAMPLES, reduction=Reduction.UNCONFIRMED, adds=adds)

    def _clamped(self, weights: Sequence[float]) -> Known | None:
        """Return a mean over the n of a max(k, n) that the passes have computed; None for anything else."""
        clamp = clamp_of(self._runs, self._number, [one.divisor for one in self._summands])
        if clamp is None or not self._add_up([one / weights[0] for one in weights[1:]]):
            return None
        each = [weight / float(one.divisor or 1.0) for weight, one in zip(weights, self._summands, strict=True)]
        counted = [n * own for n, own in zip(clamp.counted, each, strict=True)]
        mean = Known(Reduction.MEAN, per_sample=abs(counted[0]) / self._runs[0].samples)
        found = hinted(mean, counted, clamp.counted, [run.counts for run in self._runs])
        if not found.hints and min(clamp.counted) < clamp.least:  # of which nothing tells n
            return replace(self._unconfirmed(), source=Source.GRAPH, sums_add=True)
        return replace(found, least=clamp.least) if found.per_divisor else None

    def _mean(self, weights: Sequence[float]) -> Known | None:
        """Return a summand whose weights add up, but for those of max(k, n); None if they do not."""
        whole, *parts = weights
        if not whole:
            return None
        shares = [one / whole for one in parts]
        if not self._add_up(shares):
            self._contradicts = not self._is_random and not self._adds_up(self._gradients, shares)
            return None
        source, tolerance = Source.GRAPH, SAME_WEIGHT
        if self._runs[0].is_stated:  # weights in a pair may have half precision
            source, tolerance = Source.STATED, self._tolerance
        mean = Known(Reduction.MEAN, source, per_sample=abs(whole) / self._runs[0].samples)
        if is_same(sum(parts), whole, tolerance):
            return self._hinted(mean, weights)
        self._sums_add, least = not self._is_random, min(parts, key=abs)
        if self._is_random or not least or is_same(least, whole) or not self._summands[0].divisor:
            return None
        found = self._hinted(replace(mean, least=least), weights)
        return found if found.hints else None

    def _hinted(self, known: Known, weights: Sequence[float]) -> Known:
        """Return a mean with the counts of the batch that predict its weights."""
        return hinted(known, weights, [one.divisor for one in self._summands], [run.counts for run in self._runs])

    def _is_normalised(self) -> bool:
        """Whether a softmax is taken over all samples, as that of a contrastive loss."""
        return _go_through_all([run.normalised_over[self._number] for run in self._runs])

    def _is_constant(self) -> bool:
        return are_same(self._number, self._runs, self._tolerance)

    def _is_sum(self) -> bool:
        """Whether the parts add up to the whole: as far as can be seen, where passes are random."""
        whole, *parts = self._gradients
        if not all(float(one.norm()) for one in parts):  # a mean of the other part is a sum, too
            return not float(whole.norm())
        if not self._is_random:
            return self._add_up([1.0] * len(parts))
        if len(whole) >= _FOR_SPREAD:
            rounding = self._tolerance * float(sum(one.norm() for one in self._gradients))
            spread = float((self._again - whole).norm())
            if float((_sum(parts) - whole).norm()) > _SPREADS * spread + rounding:
                return False
        return all(
            abs(float(_sum(parts) - whole)) <= _NEARLY * float(_sum([one.abs() for one in (whole, *parts)]))
            for whole, *parts in self._added[1:]
        )

    def _add_up(self, factors: Sequence[float]) -> bool:
        """Whether gradients and values of the parts, times these factors, add up to those of the whole."""
        return self._is_random or all(self._adds_up(one, factors) for one in self._added)

    def _adds_up(self, runs: Sequence[Tensor], factors: Sequence[float]) -> bool:
        whole, *parts = runs
        pairs = zip(factors, parts, strict=True)
        scaled = torch.stack([factor * one if factor else torch.zeros_like(one) for factor, one in pairs])
        room = self._tolerance * float(scaled.norm(dim=1).sum() + whole.norm())
        return float((scaled.sum(0) - whole).norm()) <= room  # False where it is NaN

    def _unread(self) -> Known:
        """Return a summand that cannot be read: a sum, or what labels, elements or samples say, if they agree."""
        unknown = self._unconfirmed()
        whole, *parts = self._runs
        if (
            self._is_random
            or any(one.is_nonlinear for one in self._summands)
            or not all(float(one.norm()) for one in self._gradients[1:])
        ):
            return unknown  # their agreement says nothing
        shares = {
            count: tuple(part.counts.get(count, 0.0) / total for part in parts)
            for count, total in whole.counts.items()
            if total > 0 and count[0] in (*_TOLD_BY_BATCH, SUM)
        }
        # What counts nothing in a part that has a gradient says nothing of it.
        fitting = {count: of_parts for count, of_parts in shares.items() if all(of_parts) and self._add_up(of_parts)}
        is_sum = self._add_up([1.0] * len(parts))
        if not any(count[0] in _TOLD_BY_BATCH for count in fitting):
            return replace(unknown, reduction=Reduction.SUM) if is_sum else unknown
        first = next(iter(fitting.values()))
        pairs = [pair for of_parts in fitting.values() for pair in zip(of_parts, first, strict=True)]
        if is_sum or not all(is_same(one, its) for one, its in pairs):
            return unknown  # it would be a guess
        return Known(Reduction.MEAN, Source.COUNTED, dict.fromkeys(fitting, 1.0))


class SeenClamp(NamedTuple):
    """A divisor of max(k, n), or several times that, which passes have computed.

    Attributes:
        least: The divisor where n is less than k.
        counted: What the divisor of each of the passes is without the clamp.
    """

    least: float
    counted: Sequence[float]


def clamp_of(runs: Sequence[Observation], number: int, divisors: Sequence[Any]) -> SeenClamp | None:
    """Return the max(k, n), whose n adds up, that gave the divisors of all samples and of two parts; None if none did.

    Args:
        runs: The passes.
        number: The summand.
        divisors: What it is divided by in each; 0 or None for nothing.
    """
    clamps = [one for run in runs for one in run.clamps[number : number + 1] if one is not None]
    if len(clamps) < len(runs) or not all(divisors):
        return None
    is_computed = all(one.is_computed for one in clamps)
    for place in (0, 1):
        counted, (least, *others) = ([one.numbers[at] for one in clamps] for at in (place, 1 - place))
        whole, *parts = counted
        if not least > SAME_WEIGHT * whole > 0 or any(other != least for other in others):
            continue
        each = [float(divisor) / max(least, n) for n, divisor in zip(counted, divisors, strict=True)]
        # A comparison of which nothing comes is no clamp.
        is_seen = is_computed or min(counted) < least
        if is_seen and is_same(sum(parts), whole) and all(is_same(one, each[0]) for one in each):
            return SeenClamp(least * each[0], [n * each[0] for n in counted])
    return None


def chooses(number: int, runs: Sequence[Observation]) -> bool:
    """Whether a summand chooses among all samples: from as many elements as in all parts together."""
    return _go_through_all([run.chosen_from[number] for run in runs])


def _go_through_all(lengths: Sequence[Sequence[int]]) -> bool:
    """Whether a function goes along as many elements as in all parts together, given those of all samples first."""
    is_alike = len({len(one) for one in lengths}) == 1  # not by one call for each sample
    return is_alike and any(all(parts) and sum(parts) == whole for whole, *parts in zip(*lengths, strict=True))


def are_same(number: int, runs: Sequence[Observation], tolerance: float) -> bool:
    """Whether a summand has one gradient in all runs, which is not 0."""
    first, *others = (run.gradients[number] for run in runs)
    norm = float(first.norm())
    return norm > 0 and all(float((one - first).norm()) <= tolerance * (float(one.norm()) + norm) for one in others)


def sum_of(summand: Summand, run: Observation) -> Known:
    """Return a sum, which may be divided by a number of the batch."""
    weight = abs(float(summand.weight or 0.0))
    # Without a divisor the 1 is that of a plain sum, and a number of the batch is 1 by accident.
    is_divided = summand.divisor is not None or not is_same(weight, 1.0)
    number = next((at for at, one in run.numbers.items() if is_divided and is_same(one, weight)), None)
    divisor = abs(float(summand.divisor or 0.0))
    if number is not None or not divisor:
        return Known(Reduction.SUM, per_sample=weight, number=number)
    # What was no more than the divisor may be what max(k, n) counts.
    hints = {count: 1.0 for count, n in run.counts.items() if count[0] in _OF_MASKS and n <= divisor and n.is_integer()}
    return Known(Reduction.SUM, hints=hints, per_sample=weight, least=divisor)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


# --- where no two parts of samples can be compared: nothing counts in one, or one sample fits -------------------------


def by_graph(summand: Summand) -> Known:
    """Return what the graph of some samples suggests of a summand."""
    if summand.weight is None:
        return Known(Reduction.UNCONFIRMED, Source.COUNTED, is_guess=True)
    if summand.is_counted or not summand.weight:
        return Known(Reduction.MEAN, per_sample=abs(float(summand.weight)), is_guess=True)
    return Known(Reduction.SUM, is_guess=True)


def says_nothing(number: int, known: Known, runs: Sequence[Observation]) -> bool:
    """Whether a summand says nothing in some run, since nothing counts there.

    Not where gradients do not add up: a loss of pairs of samples is 0 where there are none.
    """
    if known.contradicts and all(bool(run.gradients[number].isfinite().all()) for run in runs):
        return False
    return any(
        run.is_dead(number) and (known.reduction is not Reduction.MEAN or run.summands[number].weight == 0.0)
        for run in runs
    )


def is_told(number: int, guess: Known, runs: Sequence[Observation]) -> bool:
    """Whether the graph says what a summand is, where a part of the samples does not.

    So it is where weights are 0 in which nothing counts, where it is divided by a number of the batch, or an operator
    of torch reduces it; and where nothing counts at all, it makes no difference.
    """
    whole = runs[0]
    return (
        whole.is_dead(number)
        or guess.number is not None
        or hasattr(whole.summands[number].end, "_saved_reduction")
        or all(_counts_nothing(run.summands[number]) for run in runs if run.is_dead(number))
    )


def _counts_nothing(summand: Summand) -> bool:
    """Whether nothing counts in a summand, by its graph.

    Not where a mean over some number is multiplied by 0; of a mean that is divided by a number again, nobody knows.
    """
    return summand.weight == 0.0 and not summand.divisor and not summand.is_mean


def guess_of(runs: Sequence[Observation]) -> list[Known]:
    """Return what the graphs of all samples suggest of their summands, where a part of them says nothing.

    Nothing counts there, so a divisor that is the same in all is no count, unless it is 1, as of max(1, n).
    """
    found = []
    for summands in zip(*(run.summands for run in runs), strict=True):
        weights, divisors = [one.weight for one in summands], [one.divisor for one in summands]
        is_same_in_all = (
            None not in weights and None not in divisors and all(is_same(one, weights[0]) for one in weights)
        )
        is_number = is_same_in_all and divisors[0] not in (0.0, 1.0)
        found.append(replace(sum_of(summands[0], runs[0]), is_guess=True) if is_number else by_graph(summands[0]))
    return found


def of_singles(
    by_summand: Sequence[Sequence[Summand]], counts: Sequence[Mapping[Count, float]], whole: Observation
) -> list[Known]:
    """Return what the graphs of single samples suggest of summands.

    They are sums, if all are divided by the same in all samples, one of them by a number or a count of the whole.
    """
    sums = [replace(sum_of(summands[0], whole), is_guess=True) for summands in by_summand]
    divisors = [summands[0].divisor for summands in by_summand]
    is_of_whole = any(
        one.number is not None or any(divisor and is_same(number, float(divisor)) for number in whole.counts.values())
        for one, divisor in zip(sums, divisors, strict=True)
    )
    if is_of_whole and all(_is_constant(summands, counts) for summands in by_summand):
        return sums
    return [_of_single(list(summands), counts) for summands in by_summand]


def _is_constant(summands: Sequence[Summand], counts: Sequence[Mapping[Count, float]]) -> bool:
    """Whether a summand of several single samples is divided by one number, which is no count of theirs."""
    weights, divisors = [one.weight for one in summands], [float(one.divisor or 0.0) for one in summands]
    return (
        len(summands) > 1
        and all(divisors)
        and None not in weights
        and all(is_same(one, weights[0]) for one in weights)
        and 1.0 not in hints_of(divisors, counts).values()
    )


def _of_single(summands: Sequence[Summand], counts: Sequence[Mapping[Count, float]]) -> Known:
    """Return what the graphs of single samples suggest of a summand that may be a mean."""
    guess, weights = by_graph(summands[0]), [float(one.weight or 0.0) for one in summands]
    if guess.reduction is not Reduction.MEAN or any(one.weight is None for one in summands):
        return guess
    return hinted(guess, weights, [one.divisor for one in summands], counts)
