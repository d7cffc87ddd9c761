"""The weights of one summand in the micro-batches of one window, and what predicts their sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autoaccum._loss.batch_counts import ELEMENTS, LABELS, POSITIVE, SAMPLES, SUM, TARGETS, counts_in, counts_of
from autoaccum._loss.knowledge import RecheckWindow, changed
from autoaccum._loss.loss_values import in_full
from autoaccum._loss.settling import ONE_NUMBER
from autoaccum._loss.summands import Known, Reduction, Source, is_same
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.graph_reader import ReadTerm
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.summands import SummandKey

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


class SummandWeights:
    """One summand in one window.

    Weights are what the micro-batches' graphs say. At the end of the window they are compared with the counts of the
    batch that have predicted their sum, of which they are multiples: `explain`.

    Args:
        key: The summand.
        knowledge: What is known of it; what the micro-batches show beyond is added.
        window: The samples.
        predicted: What `predicted` gives for all samples of which these are a part, or its weight W; None if these are
            all.
        has_unit: Whether `predicted` counts something that has a weight; otherwise it is a weight, or any power of it.
        has_to_pass: Whether processes run passes together, and none may begin a window again by itself.
    """

    def __init__(
        self,
        key: SummandKey,
        knowledge: LossKnowledge,
        window: Window,
        predicted: float | None,
        *,
        has_unit: bool = False,
        has_to_pass: bool = False,
    ) -> None:
        self.key = key
        self._knowledge = knowledge
        self._window = window
        self._hint = hint_of(self.known, window)
        self._number = None if predicted is not None else _by_hint(self._hint, window)
        self._predicted = (self._number or _by_check(self.known, window) if predicted is None else predicted) or 1.0
        self._has_unit = has_unit
        self._has_to_pass = has_to_pass
        # What max(1, n) gives where nothing counts, and max(k, n).
        self._clamps, self._is_counted = {*self.known.hints.values(), self.known.least}, self.known.is_counted
        self._reads: list[_Read] = []  # to be explained
        self.found: list[float | Tensor] = []
        self.divisor: Any = 1.0  # what the last micro-batch was divided by
        self._fixed: float | None = None  # P, once a micro-batch was divided by it
        self._each = 1.0 if self._hint is None else self.known.hints.get(self._hint, 1.0)
        self._factor: float | None = None  # w over what hints predict, in the first micro-batch
        self._numbers: dict[Count, float] = {}  # the counts of the first micro-batch, where they are the weights
        self._made: list[dict[Count, float]] = []  # counts of what a split has made, where they may explain a sum
        self._divided: tuple[float, Any] | None = None  # what a sum was divided by first, and its divisor

    @property
    def known(self) -> Known:
        """What is known of the summand."""
        return self._knowledge.summands[self.key[0]][self.key[1]]

    @property
    def prediction(self) -> float:
        """P, which stands for W until that is known."""
        if self._fixed is not None:
            return self._fixed
        return self._predicted * self._each * self._per_number() if self._has_unit else self._predicted

    @property
    def least(self) -> float:
        """The least in magnitude that the window's weight can be."""
        return self.known.least * self._per_number()

    def _per_number(self) -> float:
        return (self.known.per_divisor or 1.0) if self._factor is None else self._factor

    def fix(self) -> float:
        """Return P, by which a micro-batch is divided: it stays the same from now on."""
        self._fixed = self.prediction
        return self._fixed

    def total(self) -> float | Tensor:
        """Return the weights, added up over these samples."""
        total: Any = sum(self.found[1:], start=self.found[0])
        return in_full(total) if isinstance(total, Tensor) and not total.is_cpu else float(total)

    def weight_of(self, place: int) -> float | Tensor:
        """Return the weight of a micro-batch; a part of k, where all of max(k, n) is k."""
        weight = self.found[place]
        return weight if isinstance(weight, Tensor) or any(self.found) else self.least / len(self.found)

    # --- a micro-batch ------------------------------------------------------------------------------------------------

    def add(self, loss: LossValue, summand: ReadTerm, part: MicroBatch) -> Any:
        """Note the weight of a summand; return what its value has been divided by, which may be max(k, n) of n.

        Raises:
            RecheckWindow: It is not what is known of it.
        """
        known, weight = self.known, summand.weight
        divisor = weight
        if known.source is Source.STATED:
            weight = divisor = loss.weight
        elif known.source is Source.COUNTED or known.reduction is not Reduction.MEAN:
            weight = divisor = self._counted(known, part)
        elif divisor is None:
            if not known.hints or known.is_guess:
                raise RecheckWindow(changed(loss.name, "has a graph that cannot be read, as compiled code has none"))
            weight = divisor = self._counted(known, part)  # of compiled code, which was checked as it is written
        elif not isinstance(divisor, Tensor):
            weight = self._read(loss, known, summand, part)
        self.found.append(weight)
        self.divisor = divisor
        return divisor

    def counts_as(self, summand: ReadTerm, part: MicroBatch) -> bool:
        """Whether the weight of a summand is one of the counts that have been its weight."""
        hints, number = self.known.hints, (summand.divisor if self.known.per_divisor else None) or summand.weight
        return isinstance(number, float) and any(
            is_same(number, n * hints[count]) for count, n in self._counts(part).items()
        )

    def _counts(self, part: MicroBatch) -> dict[Count, float]:
        hints = frozenset(self.known.hints)
        return counted(self._window, part.start, part.stop, hints, part.batch) if hints else {}

    def _counted(self, known: Known, part: MicroBatch) -> float:
        """Return the weight of a summand of which the batch says it.

        Raises:
            RecheckWindow: Counts that have weighed all samples so far alike do not weigh these alike.
        """
        if known.reduction is not Reduction.MEAN:
            return float(part.stop - part.start)
        numbers = self._counts(part)
        self._numbers = self._numbers or numbers
        times = [n / (self._numbers[count] or 1.0) for count, n in numbers.items()]
        if not times or not all(is_same(one, times[0]) for one in times):
            raise RecheckWindow(
                InvalidInputError(
                    f"what loss {self.key[0]!r} is divided by cannot be read from its graph, and no count of the "
                    "batch, or several that differ in this window, have explained it; return a (sum, weight) pair"
                )
            )
        first = min(numbers)
        return numbers[first] * known.hints[first] * (known.per_divisor or 1.0)

    def _read(self, loss: LossValue, known: Known, summand: ReadTerm, part: MicroBatch) -> float:
        """Return the weight of a mean by its graph; 0 for what is multiplied by 0."""
        weight, divisor = float(summand.weight), float(summand.divisor or 0.0)
        if math.isnan(weight):
            raise InvalidInputError(f"loss {loss.name!r} divides by NaN; look for NaN among the weights")
        if not weight or math.isinf(weight):
            return 0.0
        if self._knowledge.is_torch_loss:
            return weight  # an operator of torch counts, and is never clamped
        number = (divisor if known.per_divisor else 0.0) or weight
        if self._factor is None:
            self._factor = weight / number if known.per_divisor else self._per_count(weight, part)
        may_be_clamped = number in self._clamps or (divisor == 1.0 and not self._is_counted)
        is_only = len(self._knowledge.summands[loss.name]) == 1
        value = loss.value.detach().clone() if may_be_clamped and is_only else None
        counts = None
        if part.batch is not None:  # what a split has made it may make otherwise another time
            counts, part = self._counts(part), MicroBatch(part.start, part.stop)
        self._reads.append(_Read(len(self.found), part, number, divisor, counts, value))
        return weight

    def _is_least(self, number: float) -> bool:
        return any(is_same(number, one) for one in self._clamps)

    def _per_count(self, weight: float, part: MicroBatch) -> float | None:
        """Return a weight over that of the check, of what is counted; None if nothing is."""
        if self._hint is None or not self._has_unit:
            return None
        n = counted(self._window, *part[:2], frozenset([self._hint]), part.batch)[self._hint]
        return weight / (n * self._each) if n else None

    # --- what explains the weights of a window ------------------------------------------------------------------------

    def explain(self) -> bool:
        """Compare weights with what the batch counts, and put n in place of a greater k, as in max(k, n).

        Returns:
            Whether n is 0 in all micro-batches, so that the loss is 0 and exists.

        Raises:
            RecheckWindow: Nothing explains them, in a window for which no check was tried.
        """
        if not self._reads:
            return False
        if not (self.known.hints and self._explains_sum(self.known, self._reads)):
            if not self._is_counted:
                self._look_for_ones(self._reads)
            if self.known.hints:
                self._explain_each(self.known, self._reads)
        return not any(self.found)

    def _explain_each(self, known: Known, reads: Sequence[_Read]) -> None:
        """Find the counts that explain the micro-batches of a window, each by itself."""
        counts = [self._counts(read.part) if read.counts is None else read.counts for read in reads]
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
        self._narrow(fit | clamps.keys())
        if not clamps:
            return
        parts = [[min(1.0, n / number) for number, n in compared[hint]] for hint in clamps]
        is_known = all(self._is_least(one) and known.hints[hint] == 1.0 for hint, one in clamps.items())
        is_seen = any(map(any, parts)) or all(read.value is None or _is_zero(read) for read in reads)
        if fit or not (is_known and is_seen) or any(not all(map(is_same, parts[0], own)) for own in parts):
            self._knowledge.said.of_clamp(self.key[0])  # what one count says may be max(1, n) of another
        if not fit:
            self._knowledge.replace(self.key, least=min(clamps.values(), key=abs))
            for read, *own in zip(reads, *parts, strict=True):
                self.found[read.place] *= min(own)

    def _may_count(self, hint: Count, pairs: Sequence[tuple[float, float]], reads: Sequence[_Read]) -> bool:
        """Whether a count may be n in max(k, n): what is above 0, unless of a mask, not where it is 0 and the loss not.

        It counts what is not 0 until something is less.
        """
        is_mask = hint[0] != POSITIVE or (SUM, hint[1]) in self.known.hints
        return is_mask or all(n or _is_zero(read) for read, (_, n) in zip(reads, pairs, strict=True))

    def _look_for_ones(self, reads: Sequence[_Read]) -> None:
        """Warn of a divisor of 1 of which nothing tells whether it is max(1, 0), as the loss is 0, or not known."""
        ones = [read for read in reads if read.divisor == 1.0 and (read.value is None or _is_zero(read))]
        if ones and not (self.known.is_guess and self._knowledge.is_tried_now):
            self._knowledge.said.of_clamp(self.key[0])
        for read in ones:
            if read.value is not None:
                self.found[read.place] = 0.0

    def _explains_sum(self, known: Known, reads: Sequence[_Read]) -> bool:
        """Whether the sum of weights is what hints predict, as it is in almost every window."""
        if reads[0].counts is not None:
            return False
        window, total = self._window, sum(read.number for read in reads)
        wanted = frozenset(one for one in known.hints if _is_free(one, window)) or frozenset(known.hints)
        is_counted = bool(self._number) and wanted == {self._hint}
        numbers: Any = {self._hint: self._number} if is_counted else counted(window, 0, window.samples, wanted)
        return all(is_same(total, n * known.hints[one]) for one, n in numbers.items())

    def _narrow(self, fit: AbstractSet[Count]) -> None:
        """Keep only the hints that fit.

        Raises:
            RecheckWindow: None of them does, in a window for which no check was tried.
        """
        hints = self.known.hints
        may_begin_again = not self._knowledge.is_tried_now and not self._has_to_pass
        if hints and not fit and may_begin_again:  # it may be another function
            how = "is divided by another number than the batch counts, which it was divided by when it was checked"
            raise RecheckWindow(changed(self.key[0], how))
        if hints and not fit and not self._knowledge.is_checked_now and not self._has_to_pass:
            self._knowledge.said.of_unchecked(self.key[0])
        if len(fit) < len(hints):
            self._knowledge.replace(self.key, hints={count: each for count, each in hints.items() if count in fit})

    # --- sums ---------------------------------------------------------------------------------------------------------

    def compare_sum(self, summand: ReadTerm, part: MicroBatch) -> None:
        """Warn if a sum is divided by different numbers; where it is 0, nothing counts."""
        weight = summand.weight
        if part.batch is not None and self.known.hints:
            self._made.append(counts_in(part.batch, part.stop - part.start))
        if not isinstance(weight, float) or not weight or not math.isfinite(weight):
            return
        self._divided = (weight, summand.divisor) if self._divided is None else self._divided
        if not is_same(weight, self._divided[0]):
            self._knowledge.said.warn(
                f"loss {self.key[0]!r} was a sum, divided by one number, when it was checked, and is divided by "
                "different numbers in the micro-batches of a window, which are added all the same: its gradient may "
                "differ from the whole batch's; return a (sum, weight) pair"
            )

    def of_sum(self, parts: Sequence[MicroBatch]) -> tuple[float, dict[Count, tuple[float, float]]] | None:
        """Return a sum's divisor, which may be max(k, n), and all counts in `parts` with the most in one.

        None if it is none, or no count that is known was at most its divisor.
        """
        if self.known.is_weighed or not self.known.hints or self._divided is None:
            return None
        counts = self._made or [counts_of(self._window, *part[:2]) for part in parts]
        numbers = {count: [of_part.get(count, 0.0) for of_part in counts] for count in sorted(counts[0])}
        divisor = float(self._divided[1] or 0.0)
        return divisor, {count: (sum(found), max(found)) for count, found in numbers.items()}


def _is_zero(read: _Read) -> bool:
    """Whether a loss is known to be 0."""
    return read.value is not None and not read.value


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


# --- predictions ------------------------------------------------------------------------------------------------------


def all_predicted(knowledge: LossKnowledge, window: Window, *, in_units: bool) -> dict[SummandKey, float]:
    """Return what predicts the weight of each summand over a window, `in_units` of what is counted or as a weight."""
    weighed = [(key, known) for key, known in knowledge.items() if known.is_weighed]
    return {key: predicted(known, window) * (1.0 if in_units else unit_of(known, window)) for key, known in weighed}


def unit_of(known: Known, window: Window) -> float:
    """Return the weight of one that the hint counts by which a summand is predicted."""
    hint = hint_of(known, window)
    return known.hints.get(hint, 1.0) * (known.per_divisor or 1.0) if hint is not None else 1.0


def predicted(known: Known, window: Window) -> float:
    """Return what predicts the weight of a summand over a window: a count of the batch, or a power of two.

    Anything else would depend on the samples of the last check, and the optimizer step to the last bit with it.
    """
    return _by_hint(hint_of(known, window), window) or _by_check(known, window)


def _by_hint(hint: Count | None, window: Window) -> float:
    """Return what a window counts by the hint that predicts the weight of a summand; 0 for nothing."""
    return 0.0 if hint is None else counted(window, 0, window.samples, frozenset([hint]))[hint]


def _by_check(known: Known, window: Window) -> float:
    return power_of_two(known.per_sample * window.samples)


def hint_of(known: Known, window: Window) -> Count | None:
    """Return the count that predicts the weight of a summand over a window; None if there is none."""
    hints = known.hints if known.reduction is Reduction.MEAN else {SAMPLES: 1.0}
    free = [count for count in hints if _is_free(count, window)]
    if not free and (LABELS, TARGETS) in hints and window.is_nested:
        return ELEMENTS, TARGETS  # of cross entropy, without waiting for the device
    return min(free, key=lambda one: (hints[one] != 1.0, one), default=None)


def _is_free(count: Count, window: Window) -> bool:
    """Whether something is counted without waiting for a device, and without memory for what a split makes."""
    if count in (SAMPLES, OF_SPLIT):
        return True
    return window.is_nested and (count[0] == ELEMENTS or window.is_on(_HOST))


def power_of_two(number: float) -> float:
    """Return the power of two that is nearest to a number; 1 for what is none."""
    return 2.0 ** round(math.log2(number)) if 0 < number < math.inf else 1.0
