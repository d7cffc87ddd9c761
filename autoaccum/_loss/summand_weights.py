"""The weights of one summand in the micro-batches of one window, and what predicts their sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autoaccum._loss.batch_counts import ELEMENTS, LABELS, SAMPLES, TARGETS, counts_in, counts_of
from autoaccum._loss.explaining import MicroBatch, Reads, counted, is_free
from autoaccum._loss.knowledge import RecheckWindow, changed
from autoaccum._loss.loss_values import in_full
from autoaccum._loss.summands import Known, Reduction, Source, is_same
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.graph_reader import Summand
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.summands import SummandKey


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
        passes_together: Whether processes run passes together, and none may begin a window again by itself.
    """

    def __init__(
        self,
        key: SummandKey,
        knowledge: LossKnowledge,
        window: Window,
        predicted: float | None,
        *,
        has_unit: bool = False,
        passes_together: bool = False,
    ) -> None:
        self.key = key
        self._knowledge = knowledge
        self._window = window
        self._hint = hint_of(self.known, window)
        by_window = 0.0 if predicted is not None else _by_hint(self._hint, window) or _by_check(self.known, window)
        self._predicted = predicted or by_window or 1.0
        self._has_unit = has_unit
        self._reads = Reads(key, knowledge, window, passes_together=passes_together)
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

    def add(self, loss: LossValue, summand: Summand, part: MicroBatch) -> Any:
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

    def counts_as(self, summand: Summand, part: MicroBatch) -> bool:
        """Whether the weight of a summand is one of the counts that have been its weight."""
        hints, number = self.known.hints, (summand.divisor if self.known.per_divisor else None) or summand.weight
        return isinstance(number, float) and any(
            is_same(number, n * hints[count]) for count, n in self._reads.counts(part).items()
        )

    def _counted(self, known: Known, part: MicroBatch) -> float:
        """Return the weight of a summand of which the batch says it.

        Raises:
            RecheckWindow: Counts that have weighed all samples so far alike do not weigh these alike.
        """
        if known.reduction is not Reduction.MEAN:
            return float(part.stop - part.start)
        numbers = self._reads.counts(part)
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

    def _read(self, loss: LossValue, known: Known, summand: Summand, part: MicroBatch) -> float:
        """Return the weight of a mean by its graph; 0 for what is multiplied by 0."""
        weight, divisor = float(summand.weight), float(summand.divisor or 0.0)
        if math.isnan(weight):
            raise InvalidInputError(f"loss {loss.name!r} divides by NaN; look for NaN among the weights")
        if not weight or math.isinf(weight):
            if weight and divisor:
                self._reads.add_zero(len(self.found), part)
            return 0.0
        if self._knowledge.is_torch_loss:
            return weight  # an operator of torch counts, and is never clamped
        number = (divisor if known.per_divisor else 0.0) or weight
        if self._factor is None:
            self._factor = weight / number if known.per_divisor else self._per_count(weight, part)
        self._reads.add(len(self.found), part, loss, number, divisor)
        return weight

    def _per_count(self, weight: float, part: MicroBatch) -> float | None:
        """Return a weight over that of the check, of what is counted; None if nothing is."""
        if self._hint is None or not self._has_unit:
            return None
        n = counted(self._window, *part[:2], frozenset([self._hint]), part.batch)[self._hint]
        return weight / (n * self._each) if n else None

    def explain(self) -> bool:
        """As `Reads.explain`, of these weights."""
        return self._reads.explain(self.found)

    def unit(self) -> float:
        """Return the weight over what these samples count, by hints that explain it; 0 for no such hint."""
        hint = hint_of(self.known, self._window) if self._reads.are_compared and self.known.hints else None
        n = 0.0 if hint is None or not self._window.is_nested else _by_hint(hint, self._window) * self.known.hints[hint]
        return float(self.total()) / n if n else 0.0

    # --- sums ---------------------------------------------------------------------------------------------------------

    def compare_sum(self, summand: Summand, part: MicroBatch) -> None:
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
    free = [count for count in hints if is_free(count, window)]
    if not free and (LABELS, TARGETS) in hints and window.is_nested:
        return ELEMENTS, TARGETS  # of cross entropy, without waiting for the device
    return min(free, key=lambda one: (hints[one] != 1.0, one), default=None)


def power_of_two(number: float) -> float:
    """Return the power of two that is nearest to a number; 1 for what is none."""
    return 2.0 ** round(math.log2(number)) if 0 < number < math.inf else 1.0
