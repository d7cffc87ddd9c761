"""Compares what the graphs of a window say of a summand with what the batch counts, once, at the end of the window."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autoaccum._loss.batch_counts import ELEMENTS, POSITIVE, SAMPLES, SUM, counts_in, counts_of
from autoaccum._loss.knowledge import RecheckWindow, changed
from autoaccum._loss.settling import ONE_NUMBER, are_unlike, has_unlike_factors
from autoaccum._loss.summands import is_same

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.summands import Known, SummandKey

# What split.weight counts.
OF_SPLIT: Count = ("split.weight", "")
_HOST = torch.device("cpu")


class MicroBatch(NamedTuple):
    """Samples `start` to `stop` (exclusive) of a window, and what a split of the user's has made of them."""

    start: int
    stop: int
    batch: Any = None


class _Read(NamedTuple):
    """What a micro-batch's graph says of a mean.

    Attributes:
        place: Its number in the window.
        part: The micro-batch.
        number: What hints predict: the divisor, since a factor of the loss may change from step to step, or the weight.
        divisor: That divisor, 0 for none.
        counts: Those of the batch; None where the window can be asked for them at any time.
        value: The loss, where its divisor may be max(k, n) and it has no other summand.
    """

    place: int
    part: MicroBatch
    number: float
    divisor: float
    counts: Mapping[Count, float] | None
    value: Tensor | None


class Reads:
    """What the graphs of the micro-batches of one window say of one mean.

    Args:
        key: The summand.
        knowledge: What is known of it; what the window shows beyond is added.
        window: The samples.
        passes_together: Whether processes run passes together, and none may begin a window again by itself.
    """

    def __init__(self, key: SummandKey, knowledge: LossKnowledge, window: Window, *, passes_together: bool) -> None:
        self._key = key
        self._knowledge = knowledge
        self._window = window
        self._passes_together = passes_together
        # What max(1, n) gives where nothing counts, and max(k, n).
        self._clamps = {*self.known.hints.values(), self.known.least}
        self._reads: list[_Read] = []
        self._zeros: list[tuple[int, MicroBatch]] = []  # micro-batches of which a mean is multiplied by 0

    @property
    def known(self) -> Known:
        """What is known of the summand."""
        return self._knowledge.summands[self._key[0]][self._key[1]]

    def add(self, place: int, part: MicroBatch, loss: LossValue, number: float, divisor: float) -> None:
        """Note what the graph of a micro-batch says, as `_Read` has it."""
        may_be_clamped = divisor == 1.0 or self._is_least(number)
        is_only = len(self._knowledge.summands[loss.name]) == 1
        value = loss.value.detach().clone() if may_be_clamped and is_only else None
        counts = None
        if part.batch is not None:  # what a split has made it may make otherwise another time
            counts, part = self.counts(part), MicroBatch(part.start, part.stop)
        self._reads.append(_Read(place, part, number, divisor, counts, value))

    def add_zero(self, place: int, part: MicroBatch) -> None:
        """Note a micro-batch of which a mean is multiplied by 0, so that its graph does not say the weight."""
        self._zeros.append((place, part))

    @property
    def are_compared(self) -> bool:
        """Whether the weights of all micro-batches were compared with what the batch counts, but for those of 0."""
        return bool(self._reads)

    def counts(self, part: MicroBatch) -> dict[Count, float]:
        """Return what a micro-batch counts by the hints."""
        hints = frozenset(self.known.hints)
        return counted(self._window, part.start, part.stop, hints, part.batch) if hints else {}

    def explain(self, found: list[Any]) -> bool:
        """Compare divisors with what the batch counts, and put n in place of a greater k, as in max(k, n).

        Args:
            found: The weights of the micro-batches, which are changed.

        Returns:
            Whether n is 0 in all micro-batches, so that the loss is 0 and exists.

        Raises:
            RecheckWindow: Nothing explains them, in a window for which no check was tried.
            InvalidInputError: Nothing does, though a check has confirmed what is known.
        """
        if not self._reads:
            return False
        self._compare_factors(found)
        if not (self.known.hints and self._explains_sum(self.known, self._reads)):
            if self.known.hints:
                self._explain_each(self.known, self._reads, found)
            if not self.known.is_counted:
                self._look_for_clamps(found)
        self._count_zeros(found)
        return not any(found)

    def _compare_factors(self, found: Sequence[Any]) -> None:
        """Compare what a divisor is multiplied by in the micro-batches, which is one number in a check.

        Raises:
            RecheckWindow: It is not, for the first time in a window.
            InvalidInputError: It is not, though a check has confirmed it again.
        """
        pairs = [(found[read.place], read.number) for read in self._reads] if self.known.per_divisor else []
        if _fits(pairs, _quotient(pairs)):
            return
        if self._knowledge.may_ask and not self._passes_together:
            self._ask(pairs, "is multiplied by unlike numbers in the micro-batches of a window")
        self._refuse_unlike([pairs])

    def _refuse_unlike(self, compared: Iterable[Sequence[tuple[float, float]]]) -> None:
        """Reject divisors that are unlike multiples of every count, unless another check may still explain them."""
        is_known = self._window.carries_numbers() or self._knowledge.is_confirmed_again
        if is_known and all(are_unlike([number / n for number, n in pairs if n]) for pairs in compared):
            raise has_unlike_factors(self._key[0])

    def _ask(self, pairs: Sequence[tuple[float, float]], how: str) -> None:
        """Ask for a check of samples whose numbers are unlike parts of a count.

        Raises:
            RecheckWindow: Always.
        """
        self._knowledge.now.contrasting = _contrasting(pairs, [read.part for read in self._reads])
        raise RecheckWindow(changed(self._key[0], how))

    def _count_zeros(self, found: list[Any]) -> None:
        """Put what hints count in place of the weights of means that are multiplied by 0, beside others that are not.

        So is a masked mean that is multiplied by the part which the mask keeps: all elements count.
        """
        each = [found[read.place] / read.number for read in self._reads if found[read.place]]
        is_one = all(is_same(one, each[0]) for one in each)
        for place, part in self._zeros:
            weights = [n * self.known.hints[hint] for hint, n in self.counts(part).items()]
            if not (weights and is_one and all(is_same(one, weights[0]) for one in weights)):
                self._knowledge.said.of_unchecked(self._key[0])
            found[place] = min(weights, default=0.0) * (self.known.per_divisor or 1.0)

    def _explain_each(self, known: Known, reads: Sequence[_Read], weights: list[Any]) -> None:
        """Find the counts that explain the micro-batches of a window, each by itself."""
        counts = [self.counts(read.part) if read.counts is None else read.counts for read in reads]
        compared = {
            hint: [(read.number / each, of_read[hint]) for read, of_read in zip(reads, counts, strict=True)]
            for hint, each in known.hints.items()
        }
        fit = {hint for hint, pairs in compared.items() if _fits(pairs)}
        if not fit and not known.per_divisor:  # a factor may change from step to step
            fit = {hint for hint, pairs in compared.items() if _fits(pairs, _quotient(pairs))}
        clamps = {
            hint: found * known.hints[hint]
            for hint, pairs in compared.items()
            if hint not in fit and known.per_divisor  # an operator of torch counts, and is never clamped
            if self._may_count(hint, pairs, reads) and (found := _least_of(pairs))
            # Beside another explanation, a k that is new is a guess, unless some micro-batch has as many.
            if not fit or self._is_least(found * known.hints[hint]) or not all(n < found for _, n in pairs)
        }
        # A count, or several times a count, explains a divisor better than a part of another, which fits by accident.
        if whole := {hint for hint in fit | clamps.keys() if known.hints[hint].is_integer()}:
            fit, clamps = fit & whole, {hint: one for hint, one in clamps.items() if hint in whole}
        self._narrow(fit | clamps.keys(), compared)
        if not clamps:
            return
        parts = [[min(1.0, n / number) for number, n in compared[hint]] for hint in clamps]
        is_known = all(self._is_least(one) and known.hints[hint] == 1.0 for hint, one in clamps.items())
        is_seen = any(map(any, parts)) or all(read.value is None or _is_zero(read) for read in reads)
        is_seen = is_seen and all(len(_zeros(compared[hint], reads)) <= 1 for hint in clamps)
        if fit or not (is_known and is_seen) or any(not all(map(is_same, parts[0], own)) for own in parts):
            self._knowledge.said.of_clamp(self._key[0])  # what one count says may be max(1, n) of another
        if not fit:
            self._knowledge.replace(self._key, least=min(clamps.values(), key=abs))
            for read, *own in zip(reads, *parts, strict=True):
                weights[read.place] *= min(own)

    def _may_count(self, hint: Count, pairs: Sequence[tuple[float, float]], reads: Sequence[_Read]) -> bool:
        """Whether a count may be n in max(k, n): what is above 0, unless of a mask, not where it is 0 and the loss not.

        It counts what is not 0 until something is less.
        """
        is_mask = hint[0] != POSITIVE or (SUM, hint[1]) in self.known.hints
        return is_mask or all(n or _is_zero(read) for read, (_, n) in zip(reads, pairs, strict=True))

    def _look_for_clamps(self, found: list[Any]) -> None:
        """Warn of a divisor of 1, or k, of which nothing tells whether it is max(1, n), or max(k, n).

        A 1 is none where the loss is not 0 and divisors are counts, unless a check has seen max(1, n).
        """
        divisors, least = {read.divisor for read in self._reads}, self.known.least
        are_counts = len(divisors) > 1 and all(map(float.is_integer, divisors))
        clamped = [
            read
            for read in self._reads
            if (read.divisor == 1.0 and (read.value is None or _is_zero(read) or not are_counts))
            or (least and (least != 1.0 or not self.known.hints) and is_same(read.divisor, least))
        ]
        if clamped and not (self.known.is_guess and self._knowledge.now.is_tried):
            self._knowledge.said.of_clamp(self._key[0])
        for read in clamped:
            if _is_zero(read):
                found[read.place] = 0.0

    def _explains_sum(self, known: Known, reads: Sequence[_Read]) -> bool:
        """Whether the sum of weights is what hints predict, as it is in almost every window."""
        if reads[0].counts is not None:
            return False
        if known.least and any(_is_zero(read) and is_same(read.number, known.least) for read in reads):
            return False  # where n is 0, k adds up by accident
        window, total = self._window, sum(read.number for read in reads)
        each = known.hints.get(SAMPLES)
        if each and not all(is_same(read.number, each * (read.part.stop - read.part.start)) for read in reads):
            return False  # a sum that is the same by accident
        wanted = frozenset(one for one in known.hints if is_free(one, window)) or frozenset(known.hints)
        numbers = counted(window, 0, window.samples, wanted)
        return all(is_same(total, n * known.hints[one]) for one, n in numbers.items())

    def _narrow(
        self,
        fit: AbstractSet[Count],
        compared: Mapping[Count, Sequence[tuple[float, float]]],
    ) -> None:
        """Keep only the hints that fit.

        Raises:
            RecheckWindow: None of them does, for the first time in a window: a check is due of what does not fit.
            InvalidInputError: None of them does, though a check has confirmed them again.
        """
        hints = self.known.hints
        if hints and not fit and self._knowledge.may_ask and not self._passes_together:
            # It may be another function, or samples that were tried were alike by accident.
            fitting = [sum(_are_one(number, n, pairs) for number, n in pairs) for pairs in compared.values()]
            closest = [*compared.values()][fitting.index(max(fitting))]
            how = "is divided by another number than the batch counts, which it was divided by when it was checked"
            self._ask(closest, how)
        if hints and not fit:
            self._refuse_unlike(compared.values())
        if hints and not fit and not self._knowledge.is_checked_now and not self._passes_together:
            self._knowledge.said.of_unchecked(self._key[0])
        if len(fit) < len(hints):
            self._knowledge.replace(self._key, hints={count: each for count, each in hints.items() if count in fit})

    def _is_least(self, number: float) -> bool:
        return any(is_same(number, one) for one in self._clamps)


def _contrasting(pairs: Sequence[tuple[float, float]], parts: Sequence[MicroBatch]) -> tuple[list[int], list[int]]:
    """Return the samples of which a number is the least of a count, and the others, the greatest first."""
    quotients = [number / n if n else math.inf for number, n in pairs]
    order = sorted(zip(quotients, parts, strict=True), reverse=True)
    rows = [(is_same(quotient, order[-1][0]), row) for quotient, part in order for row in range(*part[:2])]
    return [row for is_least, row in rows if is_least], [row for is_least, row in rows if not is_least]


def _is_zero(read: _Read) -> bool:
    """Whether a loss is known to be 0."""
    return read.value is not None and not read.value


def _zeros(pairs: Sequence[tuple[float, float]], reads: Sequence[_Read]) -> set[bool]:
    """Return whether the loss is 0 where a count is 0: there and not there, if it counts something else."""
    return {_is_zero(read) for read, (_, n) in zip(reads, pairs, strict=True) if not n and read.value is not None}


def _fits(pairs: Sequence[tuple[float, float]], scale: float = 1.0) -> bool:
    """Whether each number is a count times a scale, but for rounding."""
    return all(_are_one(number, n * scale, pairs) for number, n in pairs)


def _are_one(number: float, n: float, pairs: Sequence[tuple[float, float]]) -> bool:
    return is_same(number, n) or abs(number - n) <= ONE_NUMBER * sum(abs(one) for one, _ in pairs)


def _least_of(pairs: Sequence[tuple[float, float]]) -> float:
    """Return k, where each number is max(k, n) of a count n, and some n is less than k; 0 for none."""
    least = min(number for number, _ in pairs)
    others = [(number, n) for number, n in pairs if not _are_one(number, n, pairs)]
    return least if others and all(is_same(number, least) and n < number for number, n in others) else 0.0


def _quotient(pairs: Sequence[tuple[float, float]]) -> float:
    """Return what numbers are of counts, all together."""
    of_counts = sum(n for _, n in pairs)
    return sum(number for number, _ in pairs) / of_counts if of_counts else 0.0


def counted(window: Window, start: int, stop: int, wanted: frozenset[Count], batch: Any = None) -> dict[Count, float]:
    """Return counts of samples `start` to `stop` (exclusive) of a window in order, `OF_SPLIT` among them.

    Those of what a split has made of them are of `batch`, if it is known: it may be otherwise another time.
    """
    found: dict[Count, float] = {OF_SPLIT: window.weight(start, stop)} if OF_SPLIT in wanted else {}
    if SAMPLES in wanted:
        found[SAMPLES] = float(stop - start)
    if rest := wanted - found.keys():
        found |= counts_of(window, start, stop, rest) if batch is None else counts_in(batch, stop - start, rest)
    return {count: found.get(count, 0.0) for count in sorted(wanted)}


def is_free(count: Count, window: Window) -> bool:
    """Whether something is counted without waiting for a device, and without memory for what a split makes."""
    if count in (SAMPLES, OF_SPLIT):
        return True
    return window.is_nested and (count[0] == ELEMENTS or window.is_on(_HOST))
