"""The weights of one summand in the micro-batches of one window, and what predicts their sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._loss.batch_counts import ELEMENTS, LABELS, SAMPLES, TARGETS, counts_of
from autoaccum._loss.knowledge import RecheckWindow, changed
from autoaccum._loss.loss_values import in_full
from autoaccum._loss.summands import SAME_WEIGHT, Known, Reduction, Source, is_same
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.graph_reader import ReadTerm
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.summands import SummandKey

# What split.weight counts.
OF_SPLIT: Count = ("split.weight", "")
# The relative difference up to which quotients of predicted and true weights are one number.
ONE_NUMBER = 1e-6
_HOST = torch.device("cpu")


class SummandWeights:
    """One summand in one window.

    Args:
        key: The summand.
        knowledge: What is known of it; what the micro-batches show beyond is added.
        window: The samples.
        predicted: What `predicted` gives for it, or its weight W.
        has_unit: Whether `predicted` counts something that has a weight; otherwise it is a weight, or any power of it.
    """

    def __init__(
        self, key: SummandKey, knowledge: LossKnowledge, window: Window, predicted: float, *, has_unit: bool
    ) -> None:
        self.key = key
        self._knowledge = knowledge
        self._window = window
        self._predicted = predicted or 1.0
        self._has_unit = has_unit
        self.found: list[float | Tensor] = []
        self._unit: float | None = None  # the weight of one that is counted, in the first micro-batch
        self._scale: float | None = None  # by how much it exceeds what it was in the check
        self._divided: float | None = None  # what a sum was divided by first

    @property
    def known(self) -> Known:
        """What is known of the summand."""
        return self._knowledge.summands[self.key[0]][self.key[1]]

    @property
    def prediction(self) -> float:
        """P, which stands for W until that is known."""
        return self._predicted * self.unit if self._has_unit else self._predicted

    @property
    def unit(self) -> float:
        """The weight of one that is counted, of the hint by which W is predicted."""
        if self._unit is not None:
            return self._unit
        known = self.known
        hint = hint_of(known, self._window)
        return known.hints.get(hint, 1.0) if hint is not None else 1.0

    def total(self) -> float | Tensor:
        """Return the weights, added up over these samples."""
        total: Any = sum(self.found[1:], start=self.found[0])
        return in_full(total) if isinstance(total, Tensor) and not total.is_cpu else float(total)

    def at_least(self, total: float) -> float:
        """Return the weight of the window, given that of the micro-batches: max(k, n) of all n together."""
        known = self.known
        return max(total, known.least * self.unit) if known.least and known.is_weighed else total

    # --- a micro-batch ------------------------------------------------------------------------------------------------

    def add(self, loss: LossValue, summand: ReadTerm, part: tuple[int, int]) -> Any:
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
            raise RecheckWindow(changed(loss.name, "has a graph that cannot be read, as compiled code has none"))
        elif not isinstance(divisor, Tensor):
            weight = self._true_weight(loss, known, summand, part)
        self.found.append(weight)
        return divisor

    def _counted(self, known: Known, part: tuple[int, int]) -> float:
        """Return the weight of a summand of which the batch says it.

        Raises:
            RecheckWindow: Counts that have weighed all samples so far alike do not weigh these alike.
        """
        if known.reduction is not Reduction.MEAN:
            return float(part[1] - part[0])
        numbers = counted(self._window, *part, frozenset(known.hints))
        if len(numbers) > 1:
            totals = counted(self._window, 0, self._window.samples, frozenset(numbers))
            shares = [n / (totals[count] or 1.0) for count, n in numbers.items()]
            if not all(is_same(one, shares[0]) for one in shares):
                raise RecheckWindow(
                    InvalidInputError(
                        f"what loss {self.key[0]!r} is divided by cannot be read from its graph, and several counts of "
                        "the batch explained it that differ in this window; return a (sum, weight) pair"
                    )
                )
        first = min(numbers)
        return numbers[first] * known.hints[first]

    def _true_weight(self, loss: LossValue, known: Known, summand: ReadTerm, part: tuple[int, int]) -> float:
        """Return the weight of a mean by its graph: n in place of max(k, n), and 0 for what is multiplied by 0."""
        weight = float(summand.weight)
        if math.isnan(weight):
            raise InvalidInputError(f"loss {loss.name!r} divides by NaN; look for NaN among the weights")
        if not weight or math.isinf(weight):
            return 0.0
        is_one, is_divisor = summand.divisor == 1.0, known.is_divisor and bool(summand.divisor)
        counts = counted(self._window, *part, frozenset(known.hints)) if known.hints else {}
        base, expected = (float(summand.divisor or 0.0), counts) if is_divisor else (weight, counts)
        if counts and not is_divisor:
            expected = {count: n * known.hints[count] for count, n in counts.items()}
            if self._scale is None:
                self._scale = _scale_of(weight, expected)
            expected = {count: n * (1.0 if is_one else self._scale) for count, n in expected.items()}
        room = ONE_NUMBER * abs(self.prediction)
        fit = {count for count, n in expected.items() if is_same(base, n) or abs(base - n) <= room}
        if is_one and not (counts if is_divisor else fit):
            return self._of_divisor_1(loss, known, weight)
        if is_divisor and not fit:
            return self._of_clamp(known, base, counts, weight)
        if is_divisor and is_one and min(counts.values()) < 1.0:
            self._knowledge.warn_of_clamp(loss.name)  # what one count says may be max(1, n) of another
        else:
            self._narrow(fit)
        if is_divisor and base < known.smallest:
            self._knowledge.replace(self.key, smallest=base)
        hint = hint_of(known, self._window)
        if self._unit is None and hint is not None and counts.get(hint):
            self._unit = weight / counts[hint]
        return weight

    def _of_clamp(self, known: Known, divisor: float, counts: Mapping[Count, float], weight: float) -> float:
        """Return the weight of a mean that no hint explains: n where max(k, n) is read; otherwise as it is read."""
        below = {count: n for count, n in counts.items() if n < divisor}
        if not below or not (divisor in (known.least, 1.0) or divisor <= known.smallest * (1 + SAME_WEIGHT)):
            self._narrow(set())
            return weight
        self._narrow(below.keys())
        numbers = list(below.values())
        if divisor not in (known.least, 1.0) or not is_same(min(numbers), max(numbers)):
            self._knowledge.warn_of_clamp(self.key[0])
        self._knowledge.replace(self.key, least=divisor)
        return min(numbers) * weight / divisor

    def _of_divisor_1(self, loss: LossValue, known: Known, weight: float) -> float:
        """Return the weight of a mean of which nothing tells whether its divisor of 1 is max(1, 0)."""
        if len(self._knowledge.summands[loss.name]) == 1 and not float(loss.value.detach()):
            return 0.0
        if not known.is_guess:
            self._knowledge.warn_of_clamp(loss.name)
        return weight

    def _narrow(self, fit: AbstractSet[Count]) -> None:
        """Keep only the hints that fit.

        Raises:
            RecheckWindow: None of them does, in a window for which no check was tried.
        """
        hints = self.known.hints
        if hints and not fit and not self._knowledge.is_tried_now:  # it may be another function
            how = "is divided by another number than the batch counts, which it was divided by when it was checked"
            raise RecheckWindow(changed(self.key[0], how))
        if hints and not fit and not self._knowledge.is_checked_now:
            self._knowledge.warn_of_unchecked(self.key[0])
        if len(fit) < len(hints):
            self._knowledge.replace(self.key, hints={count: each for count, each in hints.items() if count in fit})

    # --- sums ---------------------------------------------------------------------------------------------------------

    def compare_sum(self, summand: ReadTerm) -> None:
        """Warn if a sum is divided by different numbers; where it is 0, nothing counts."""
        weight = summand.weight
        if not isinstance(weight, float) or not weight or not math.isfinite(weight):
            return
        self._divided = weight if self._divided is None else self._divided
        if not is_same(weight, self._divided):
            self._knowledge.warn(
                f"loss {self.key[0]!r} was a sum, divided by one number, when it was checked, and is divided by "
                "different numbers in the micro-batches of a window, which are added all the same: its gradient may "
                "differ from the whole batch's; return a (sum, weight) pair"
            )

    def look_for_clamp(self, parts: list[tuple[int, int]]) -> None:
        """Warn of a sum that may be divided by max(k, n), where n is at most k in all `parts`, and more in all."""
        known = self.known
        if not known.hints or not self._window.is_nested:
            return
        totals = counted(self._window, 0, self._window.samples, frozenset(known.hints))
        more = frozenset(count for count, n in totals.items() if n > known.least and n.is_integer())
        if not more:
            return
        counts = [counted(self._window, *part, more) for part in parts]
        if any(all(of_part[count] <= known.least for of_part in counts) for count in more):
            self._knowledge.warn_of_divisor(self.key[0], known.least)
        hints = {count: each for count, each in known.hints.items() if count not in more}
        self._knowledge.replace(self.key, hints=hints)


def _scale_of(weight: float, expected: Mapping[Count, float]) -> float:
    """Return by how much a weight exceeds what is expected, as that of a factor which changes from step to step."""
    first = next(iter(expected.values()))
    return 1.0 if not first or any(is_same(weight, one) for one in expected.values()) else weight / first


def counted(window: Window, start: int, stop: int, wanted: frozenset[Count]) -> dict[Count, float]:
    """Return counts of samples `start` to `stop` (exclusive) of a window in order, `OF_SPLIT` among them."""
    found: dict[Count, float] = {OF_SPLIT: window.weight(start, stop)} if OF_SPLIT in wanted else {}
    if SAMPLES in wanted:
        found[SAMPLES] = float(stop - start)
    if rest := wanted - found.keys():
        found |= counts_of(window, start, stop, rest)
    return {count: found[count] for count in sorted(wanted)}


# --- predictions ------------------------------------------------------------------------------------------------------


def predicted(knowledge: LossKnowledge, window: Window) -> dict[SummandKey, float]:
    """Return what predicts the weight of each summand over a window: a count of the batch, or a power of two.

    Anything else would depend on the samples of the last check, and the optimizer step to the last bit with it.
    """
    return {key: _predicted(known, window) for key, known in knowledge.items() if known.is_weighed}


def _predicted(known: Known, window: Window) -> float:
    hint = hint_of(known, window)
    if hint is not None and (number := counted(window, 0, window.samples, frozenset([hint]))[hint]):
        return number
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
