"""What graphs suggest of summands where no two parts of samples can be compared: nothing counts in one, or one fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoaccum._loss.comparison import sum_of
from autoaccum._loss.summands import Known, Reduction, Source, hinted, hints_of, is_same

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.graph_reader import ReadTerm
    from autoaccum._loss.observation import Observation


def by_graph(summand: ReadTerm) -> Known:
    """Return what the graph of some samples suggests of a summand."""
    if summand.weight is None:
        return Known(Reduction.UNCONFIRMED, Source.COUNTED, is_guess=True)
    if summand.is_counted or not summand.weight:
        return Known(Reduction.MEAN, per_sample=abs(float(summand.weight)), is_guess=True)
    return Known(Reduction.SUM, is_guess=True)


def says_nothing(number: int, known: Known, runs: Sequence[Observation]) -> bool:
    """Whether a summand says nothing in some run, since nothing counts there."""
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
        or all(run.summands[number].weight == 0.0 for run in runs if run.is_dead(number))
    )


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
    by_summand: Sequence[Sequence[ReadTerm]], counts: Sequence[Mapping[Count, float]], whole: Observation
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


def _is_constant(summands: Sequence[ReadTerm], counts: Sequence[Mapping[Count, float]]) -> bool:
    """Whether a summand of several single samples is divided by one number, which is no count of theirs."""
    weights, divisors = [one.weight for one in summands], [float(one.divisor or 0.0) for one in summands]
    return (
        len(summands) > 1
        and all(divisors)
        and None not in weights
        and all(is_same(one, weights[0]) for one in weights)
        and 1.0 not in hints_of(divisors, counts).values()
    )


def _of_single(summands: Sequence[ReadTerm], counts: Sequence[Mapping[Count, float]]) -> Known:
    """Return what the graphs of single samples suggest of a summand that may be a mean."""
    guess, weights = by_graph(summands[0]), [float(one.weight or 0.0) for one in summands]
    if guess.reduction is not Reduction.MEAN or any(one.weight is None for one in summands):
        return guess
    return hinted(guess, weights, [one.divisor for one in summands], counts)
