"""The weights of one summand in the micro-batches of one window, and what predicts their sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autoaccum._loss.batch_counts import ELEMENTS, LABELS, SAMPLES, TARGETS, counts_in, counts_of
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
        number: What counts of the batch have to explain: the divisor, where they have been that, or else the weight.
        counts: Those of the batch; None where the window can be asked for them at any time.
        is_zero: Whether the loss is 0, as where nothing counts; None if it was not looked at.
    """

    place: int
    part: MicroBatch
    number: float
    counts: Mapping[Count, float] | None
    is_zero: bool | None = None


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
        self._reads: list[_Read] = []  # to be explained
        self.found: list[float | Tensor] = []
        self._fixed: float | None = None  # P, once a micro-batch was divided by it
        self._unit: float | None = None  # the weight of one that is counted, in the first micro-batch
        self._numbers: dict[Count, float] = {}  # the counts of the first micro-batch, where they are the weights
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
        return self._predicted * self._weight_of_one() if self._has_unit else self._predicted

    @property
    def least(self) -> float:
        """The least in magnitude that the window's weight can be."""
        return self.known.least * self._weight_of_one() if self.known.least else 0.0

    def _weight_of_one(self) -> float:
        """Return the weight of one that is counted, of the hint by which W is predicted."""
        return unit_of(self.known, self._window) if self._unit is None else self._unit

    def fix(self) -> float:
        """Return P, by which a micro-batch is divided: it stays the same from now on."""
        self._fixed = self.prediction
        return self._fixed

    def total(self) -> float | Tensor:
        """Return the weights, added up over these samples."""
        total: Any = sum(self.found[1:], start=self.found[0])
        return in_full(total) if isinstance(total, Tensor) and not total.is_cpu else float(total)

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
        return divisor

    def counts_as(self, summand: ReadTerm, part: MicroBatch) -> bool:
        """Whether the weight of a summand is one of the counts that have been its weight."""
        hints, weight = self.known.hints, summand.weight
        return isinstance(weight, float) and any(
            is_same(weight, n * hints[count]) for count, n in self._counts(part).items()
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
        return numbers[first] * known.hints[first]

    def _read(self, loss: LossValue, known: Known, summand: ReadTerm, part: MicroBatch) -> float:
        """Return the weight of a mean by its graph: n in place of max(k, n), and 0 for what is multiplied by 0."""
        weight, divisor = float(summand.weight), float(summand.divisor or 0.0)
        if math.isnan(weight):
            raise InvalidInputError(f"loss {loss.name!r} divides by NaN; look for NaN among the weights")
        if not weight or math.isinf(weight):
            return 0.0
        if summand.divisor is None and self._knowledge.is_torch_loss:
            return weight  # an operator of torch counts, and is never clamped
        if self._unit is None and (known.is_divisor or self._has_unit):
            self._unit = self._unit_of(known, weight, divisor, part)
        number = divisor if known.is_divisor and divisor else weight
        # What a split has made it may make otherwise another time.
        counts, is_zero = None if part.batch is None else self._counts(part), None
        if divisor in (1.0, known.least or 1.0):  # it may be max(k, n)
            counts = self._counts(part)
            expected = [n if known.is_divisor else n * known.hints[count] for count, n in counts.items()]
            below = [n for n in counts.values() if n < divisor] if known.is_divisor else []
            if len(self._knowledge.summands[loss.name]) == 1:
                is_zero = not float(loss.value.detach())
            if not (below or divisor != 1.0 or any(is_same(number, n) for n in expected)):
                return self._of_divisor_1(loss, known, weight, is_zero=is_zero)
            if below and not any(is_same(divisor, n) for n in expected):
                if not is_same(min(below), max(below)):
                    self._knowledge.said.of_clamp(loss.name)
                number, weight = min(below), min(below) * weight / divisor
                self._knowledge.replace(self.key, least=divisor)
        self._reads.append(_Read(len(self.found), part._replace(batch=None), number, counts, is_zero))
        return weight

    def _unit_of(self, known: Known, weight: float, divisor: float, part: MicroBatch) -> float | None:
        """Return the weight of one that is counted, in a micro-batch; None if nothing is."""
        if known.is_divisor and divisor:
            return weight / divisor
        hint = self._hint
        number = 0.0 if hint is None else counted(self._window, *part[:2], frozenset([hint]), part.batch)[hint]
        return weight / number if number else None

    def _of_divisor_1(self, loss: LossValue, known: Known, weight: float, *, is_zero: bool | None) -> float:
        """Return the weight of a mean of which nothing tells whether its divisor of 1 is max(1, 0)."""
        if is_zero:
            return 0.0
        if not known.is_guess:
            self._knowledge.said.of_clamp(loss.name)
        return weight

    # --- what explains the weights of a window ------------------------------------------------------------------------

    def explain(self) -> bool:
        """Compare weights with what the batch counts; return False where they were of a new max(k, n).

        Raises:
            RecheckWindow: Nothing explains them, in a window for which no check was tried.
        """
        reads, known = self._reads, self.known
        if not reads or not known.hints:
            return True
        smallest = min(read.number for read in reads)
        if self._explains_sum(known, reads):
            return True
        counts = [self._counts(read.part) if read.counts is None else read.counts for read in reads]
        by_hint = {
            hint: [(read.number, of_read[hint]) for read, of_read in zip(reads, counts, strict=True)]
            for hint in known.hints
        }
        if not known.is_divisor:
            fit = {hint for hint, pairs in by_hint.items() if _fits(pairs, known.hints[hint])}
            # A factor may change from step to step.
            fit = fit or {hint for hint, pairs in by_hint.items() if _fits(pairs, _quotient(pairs))}
            if not fit and any(_fits(pairs, known.hints[hint], {smallest}) for hint, pairs in by_hint.items()):
                self._knowledge.said.of_clamp(self.key[0])
            self._narrow(fit)
            return True
        fit = {hint for hint, pairs in by_hint.items() if _fits(pairs, 1.0)}
        clamped = {hint for hint, pairs in by_hint.items() if _fits(pairs, 1.0, {1.0, known.least, smallest})}
        # Where nothing counts, a loss is 0.
        nothing = [at for at, read in enumerate(reads) if read.number and read.is_zero is False]
        clamped = {hint for hint in clamped if all(counts[at][hint] for at in nothing)}
        self._narrow(clamped)
        if fit == clamped:
            return True
        numbers = [[of_read[hint] for hint in clamped] for of_read in counts]
        least = {read.number for read, own in zip(reads, numbers, strict=True) if not is_same(read.number, min(own))}
        if fit or least - {1.0, known.least} or not all(is_same(min(own), max(own)) for own in numbers):
            self._knowledge.said.of_clamp(self.key[0])  # what one count says may be max(1, n) of another
        if fit:
            return True
        is_new = max(least) != known.least
        self._knowledge.replace(self.key, least=max(least))
        for read, own in zip(reads, numbers, strict=True):
            self.found[read.place] *= min(1.0, min(own) / read.number) if read.number else 1.0
        return not is_new

    def _explains_sum(self, known: Known, reads: Sequence[_Read]) -> bool:
        """Whether the sum of weights is what hints predict, as it is in almost every window."""
        if reads[0].counts is not None:
            return False
        hint = self._hint
        if hint is not None and hint in known.hints and self._number and not self._knowledge.is_tried_now:
            numbers = {hint: self._number}
        else:
            free = frozenset(hint for hint in known.hints if _is_free(hint, self._window))
            numbers = counted(self._window, 0, self._window.samples, free or frozenset(known.hints))
        total = sum(read.number for read in reads)
        return all(is_same(total, n if known.is_divisor else n * known.hints[hint]) for hint, n in numbers.items())

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

    def compare_sum(self, summand: ReadTerm) -> None:
        """Warn if a sum is divided by different numbers; where it is 0, nothing counts."""
        weight = summand.weight
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
        if self.known.is_weighed or not self.known.hints or not self._window.is_nested or self._divided is None:
            return None
        counts = [counts_of(self._window, *part[:2]) for part in parts]
        numbers = {count: [of_part.get(count, 0.0) for of_part in counts] for count in sorted(counts[0])}
        divisor = float(self._divided[1] or 0.0)
        return divisor, {count: (sum(found), max(found)) for count, found in numbers.items()}


def _fits(pairs: Sequence[tuple[float, float]], scale: float, least: AbstractSet[float] = frozenset()) -> bool:
    """Whether each number is a count times a scale, or one of `least` that exceeds it, but for rounding."""
    room = ONE_NUMBER * sum(abs(number) for number, _ in pairs)
    return all(
        is_same(number, n * scale) or abs(number - n * scale) <= room or (n < number and number in least)
        for number, n in pairs
    )


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
    return known.hints.get(hint, 1.0) if hint is not None else 1.0


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
