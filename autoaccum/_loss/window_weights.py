"""Weighs the micro-batches of one window, so that their gradients add up to that of the window's loss.

The loss of a window is the sum over its summands of (sum of S) / W, where W is the sum of the micro-batches' weights w.
W is known only after the last micro-batch, so each runs backward with w / P, where P predicts W: by what the batch
counts, or else by the last check. Where P / W is one number for all summands, gradients are multiplied by it once.
Otherwise the window is made again with P = W.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from autoaccum._loss.batch_counts import ELEMENTS, LABELS, SAMPLES, TARGETS, counts_of
from autoaccum._loss.graph_reader import has_only_weights_of_0, read, stop, weight_at_once
from autoaccum._loss.knowledge import RecheckWindow
from autoaccum._loss.loss_values import in_full
from autoaccum._loss.summands import SAME_WEIGHT, Known, Reduction, Source, is_same
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
# The relative difference of the summands' P / W up to which they are one number.
_ONE_NUMBER = 1e-6
# The relative difference of a window's weights, of two passes through it, from which a warning tells of it.
_MOVES = 1e-3
_ROUNDING = 1e-14  # of double precision
_HOST = torch.device("cpu")


class RemakeWindow(Exception):  # noqa: N818 - it is no error of the user's
    """The weights of a window were predicted wrong: it is made again with its true ones."""

    def __init__(self, totals: Mapping[SummandKey, float]) -> None:
        super().__init__("weights were predicted wrong")
        self.totals = totals


class WindowWeights:
    """The weights of one window, or of this process's part of it.

    Args:
        knowledge: What is known of the losses; what the micro-batches show beyond is added to it.
        window: The samples.
        is_alone: Whether a single micro-batch is the whole window, so that every loss is as it is.
        totals: What `predicted` gives for the whole window, of which these samples are a part; None if for them.
        is_exact: Whether `totals` are the weights themselves, as a pass has shown them.
        has_to_pass: Whether a loss in which nothing counts has a backward pass all the same.

    Attributes:
        predicted: What predicts W of each summand that has a weight: a count of the batch, or W itself.
        found: The weights w of each in the micro-batches.
    """

    def __init__(
        self,
        knowledge: LossKnowledge,
        window: Window,
        *,
        is_alone: bool = False,
        totals: Mapping[SummandKey, float] | None = None,
        is_exact: bool = False,
        has_to_pass: bool = False,
    ) -> None:
        self._knowledge = knowledge
        self._window = window
        self._is_alone = is_alone
        self._are_known = is_exact
        self._has_to_pass = has_to_pass
        self._is_lone = sum(map(len, knowledge.summands.values())) == 1
        self.predicted = dict(predicted(knowledge, window) if totals is None else totals)
        self.found: dict[SummandKey, list[float | Tensor]] = {}
        self._units: dict[SummandKey, float] = {}  # the weight of one that is counted, in the first micro-batch
        self._scales: dict[SummandKey, float] = {}  # by how much that exceeds what it was in the check
        self._exists: dict[str, bool] = {}  # whether losses are finite in the micro-batches in which nothing counts
        self._divided: dict[SummandKey, float] = {}  # what each sum was divided by first
        self._counts: dict[Count, float] = {}  # of the current micro-batch
        self._at = (0, 0)
        self._parts: list[tuple[int, int]] = []

    # --- a micro-batch ------------------------------------------------------------------------------------------------

    def weigh(self, loss: LossValue, start: int, samples: int) -> Tensor | None:
        """Return what a loss of the micro-batch from sample `start` on adds to the window's; None for nothing.

        Raises:
            RecheckWindow: It is not what is known of it.
            InvalidInputError: It is divided by no finite number, or by 0 although something counts.
        """
        value = loss.value
        if self._is_alone:
            self._refuse_nothing(loss)
            return value / loss.weight if loss.is_sum else value  # type: ignore[operator]
        if not value.requires_grad:
            return value  # the caller says of a loss that it has no gradient
        self._at, self._counts = (start, start + samples), {}
        self._parts.append(self._at)
        known = self._known_of(loss)
        if len(known) == 1 and (only := self._only_weight(loss, known[0])) is not None:
            return only
        summands = self._read(loss, known)
        factors = [
            self._factor(loss, number, one, each)
            for number, (one, each) in enumerate(zip(known, summands, strict=True))
        ]
        return self._scaled(loss, summands, factors, known, samples)

    def note(self, loss: LossValue, start: int, samples: int) -> None:
        """Note the weights of a loss of a micro-batch, in a pass that goes forward alone."""
        self._at, self._counts = (start, start + samples), {}
        known = self._known_of(loss)
        for number, (one, summand) in enumerate(zip(known, self._read(loss, known), strict=True)):
            if one.is_weighed:
                self._add(loss, number, one, summand)

    def _known_of(self, loss: LossValue) -> Sequence[Known]:
        known = self._knowledge.summands.get(loss.name)
        if known is None:
            raise RecheckWindow(changed(loss.name, "was not there"), is_known=loss.weight is not None)
        return known

    def _only_weight(self, loss: LossValue, known: Known) -> Tensor | None:
        """Return the weighed loss if it has one weight, which is had without a look at its graph; None otherwise."""
        key = loss.name, 0
        if known.source is Source.STATED and loss.weight is not None:
            self.found.setdefault(key, []).append(loss.weight)
            total = self.prediction(key) if key in self.predicted else self._predict_late(key, loss.weight)
            return loss.value * (1.0 / total) if loss.is_sum else loss.value * (float(loss.weight) / total)
        if known.source is Source.COUNTED and known.is_weighed:
            weight = self._counted(loss.name, known)
            self.found.setdefault(key, []).append(weight)
            return loss.value * (weight / self.prediction(key)) if weight else None
        if not known.is_weighed and (known.source is Source.COUNTED or self._knowledge.is_stated):
            return loss.value
        if (weight_or_none := weight_at_once(loss.value)) and known.is_weighed:
            self.found.setdefault(key, []).append(weight_or_none)
            return loss.value * (weight_or_none / self.prediction(key))
        return None

    def _predict_late(self, key: SummandKey, weight: Any) -> float:
        """Return a prediction for a loss that states its weight, and of which nothing is known before."""
        each = abs(float(weight)) / (self._at[1] - self._at[0]) if isinstance(weight, float | int) else 1.0
        self.predicted[key] = power_of_two(each * self._window.samples)
        return self.predicted[key]

    def _read(self, loss: LossValue, known: Sequence[Known]) -> list[ReadTerm]:
        """Return the summands of a loss, with their weights on the host if there are several or a divisor.

        Raises:
            RecheckWindow: They are others than when it was checked.
        """
        summands = read(loss.value)
        if len(known) == 1 and known[0].source is Source.COUNTED:
            return summands[:1]
        if len(summands) != len(known):
            how = f"had {len(known)} terms when it was checked, and now has {len(summands)}"
            raise RecheckWindow(changed(loss.name, how))
        # The gradient of a division by 0 is NaN, even times 0.
        if len(summands) > 1 or any(one.divisor is not None for one in summands):
            for one in summands:
                one.weight = float(one.weight) if isinstance(one.weight, Tensor) else one.weight
                one.divisor = float(one.divisor) if isinstance(one.divisor, Tensor) else one.divisor
        self._compare_graphs(loss.name, summands)
        return summands

    def _compare_graphs(self, name: str, summands: Sequence[ReadTerm]) -> None:
        """Compare how a loss is computed with what it was in windows that were checked.

        Raises:
            RecheckWindow: It is another function.
        """
        if self._knowledge.is_stated:
            return
        weights = [one.weight for one in summands]
        if any(isinstance(one, float) and not (one and math.isfinite(one)) for one in weights):
            return  # nothing counts
        form = [(one.is_counted, one.divisor is None, one.end and one.end.name()) for one in summands]
        if self._knowledge.note_graph(name, tuple(form)):
            return
        of_one_sample = self._at[1] - self._at[0] == 1 and all(one == 1.0 for one in weights)
        if not of_one_sample:  # a mean that is not divided where there is one
            raise RecheckWindow(changed(name, "ends in other operations than when it was checked"))

    def _factor(self, loss: LossValue, number: int, known: Known, summand: ReadTerm) -> float | Tensor:
        """Return what a summand is multiplied by: w / P, or 1 for a sum."""
        if not known.is_weighed:
            self._compare_sum((loss.name, number), summand)
            return 1.0
        divisor = self._add(loss, number, known, summand)
        if not isinstance(divisor, Tensor) and (not divisor or math.isinf(divisor)):
            return 0.0  # what is multiplied by 0 is not there
        return divisor / self.prediction((loss.name, number))

    def _add(self, loss: LossValue, number: int, known: Known, summand: ReadTerm) -> Any:
        """Note the weight of a summand; return what its value has been divided by, which may be max(k, n) of n."""
        weight: Any
        if known.source is Source.STATED:
            weight = divisor = loss.weight
        elif known.source is Source.COUNTED or known.reduction is not Reduction.MEAN:
            weight = divisor = self._counted(loss.name, known)
        else:
            weight = divisor = summand.weight
            if divisor is None:
                raise RecheckWindow(changed(loss.name, "has a graph that cannot be read, as compiled code has none"))
            if isinstance(divisor, float) and math.isnan(divisor):
                raise InvalidInputError(f"loss {loss.name!r} divides by NaN; look for NaN among the weights")
            if not isinstance(divisor, Tensor):
                weight = self._true_weight(loss, number, known, summand)
        self.found.setdefault((loss.name, number), []).append(weight)
        return divisor

    def _true_weight(self, loss: LossValue, number: int, known: Known, summand: ReadTerm) -> float:
        """Return the weight of a mean by its graph: n in place of max(k, n), and 0 for what is multiplied by 0."""
        weight, key = float(summand.weight), (loss.name, number)
        if not weight or math.isinf(weight):
            return 0.0
        is_one, is_divisor = summand.divisor == 1.0, known.is_divisor and bool(summand.divisor)
        counts = self._count(known.hints) if known.hints else {}
        base, expected = (float(summand.divisor or 0.0), counts) if is_divisor else (weight, counts)
        if counts and not is_divisor:
            scale = 1.0 if is_one else self._scales.setdefault(key, _scale(known, weight, counts))
            expected = {count: n * known.hints[count] * scale for count, n in counts.items()}
        room = _ONE_NUMBER * abs(self.prediction(key))
        fit = {count for count, n in expected.items() if is_same(base, n) or abs(base - n) <= room}
        if is_one and not (fit if not is_divisor else counts):
            return self._of_divisor_1(loss, known, weight)
        if is_divisor and not fit:
            return self._of_clamp(loss, number, known, base, expected, weight)
        if is_divisor and is_one and min(expected.values()) < 1.0:
            self._knowledge.warn(_clamped(loss.name))  # what some count may be max(1, n) of another
        elif len(fit) < len(expected):
            self._narrow(loss.name, number, fit)
        if is_divisor and base < known.smallest:
            self._knowledge.replace(loss.name, number, smallest=base)
        if key not in self._units and (n := counts.get(self._hint(known), 0.0)):  # type: ignore[arg-type]
            self._units[key] = weight / n
        return weight

    def _of_clamp(
        self,
        loss: LossValue,
        number: int,
        known: Known,
        divisor: float,
        counts: Mapping[Count, float],
        weight: float,
    ) -> float:
        """Return the weight of a mean that no hint explains: n where max(k, n) is read; otherwise as it is read."""
        below = {count: n for count, n in counts.items() if n < divisor}
        if not below or not (divisor in (known.least, 1.0) or divisor <= known.smallest * (1 + SAME_WEIGHT)):
            self._narrow(loss.name, number, set())
            return weight
        if len(below) < len(counts):
            self._narrow(loss.name, number, set(below))
        numbers = list(below.values())
        if divisor not in (known.least, 1.0) or not is_same(min(numbers), max(numbers)):
            self._knowledge.warn(_clamped(loss.name))
        if divisor != known.least:
            self._knowledge.replace(loss.name, number, least=divisor)
        return min(numbers) * weight / divisor

    def _of_divisor_1(self, loss: LossValue, known: Known, weight: float) -> float:
        """Return the weight of a mean of which nothing tells whether its divisor of 1 is max(1, 0)."""
        if len(self._knowledge.summands[loss.name]) == 1 and not float(loss.value.detach()):
            return 0.0
        if not known.is_guess:
            self._knowledge.warn(_clamped(loss.name))
        return weight

    def _narrow(self, name: str, number: int, fit: AbstractSet[Count]) -> None:
        hints = self._knowledge.summands[name][number].hints
        self._knowledge.replace(name, number, hints={count: each for count, each in hints.items() if count in fit})

    def _compare_sum(self, key: SummandKey, summand: ReadTerm) -> None:
        """Warn if a sum is divided by different numbers; where it is 0, nothing counts."""
        weight = summand.weight
        if self._knowledge.is_stated or not isinstance(weight, float) or not weight or not math.isfinite(weight):
            return
        if not is_same(weight, self._divided.setdefault(key, weight)):
            self._knowledge.warn(
                f"loss {key[0]!r} was a sum, divided by one number, when it was checked, and is divided by different "
                "numbers in the micro-batches of a window, which are added all the same: its gradient may differ from "
                "the whole batch's; return a (sum, weight) pair"
            )

    def _scaled(
        self,
        loss: LossValue,
        summands: Sequence[ReadTerm],
        factors: Sequence[float | Tensor],
        known: Sequence[Known],
        samples: int,
    ) -> Tensor | None:
        """Return a loss with its summands multiplied by their factors, which its backward pass applies."""
        value, first = loss.value, factors[0]
        if isinstance(first, Tensor):  # a single summand; where nothing counts, its value is NaN
            return torch.where(first == 0, 0.0, value * first)
        if not all(factors):
            self._note_nothing(loss, [one for one, factor in zip(summands, factors, strict=True) if not factor])
        if all(factor == first or is_same(factor, first, 1e-12) for factor in factors):  # type: ignore[arg-type]
            if not first:
                self._stop(summands)
                return None
            return value if first == 1.0 else value * first
        # The number is reported by samples; beside a sum, once in each micro-batch.
        share = 1.0 if not all(one.is_weighed for one in known) else samples / self._samples
        for one, factor in zip(summands, factors, strict=True):
            if factor != share:
                one.node.register_prehook(_scaling(float(factor) / share))
            if not factor:
                loss.may_be_nan = True
                stop(one)
        return value * share

    @property
    def _samples(self) -> float:
        return float(self._window.samples)

    def _note_nothing(self, loss: LossValue, empty: Sequence[ReadTerm]) -> None:
        """Note whether a loss in which nothing counts exists, as one divided by max(1, n) does.

        Raises:
            InvalidInputError: It is divided by 0 although something counts.
        """
        if isinstance(loss.value, FakeTensor):
            return
        value = loss.value.detach()
        is_smoothed = len(empty) > 1 and any(has_only_weights_of_0(one.end) for one in empty)
        if is_smoothed or bool(value.isinf()):
            raise InvalidInputError(
                f"loss {loss.name!r} divides by 0 in a micro-batch in which something counts: weights that cancel out "
                "there, or classes of weight 0 with label_smoothing, so what these samples add to the whole batch is "
                "lost; return the (sum, weight) pair"
            )
        self._exists[loss.name] = self._exists.get(loss.name, True) and bool(value.isfinite())

    def _stop(self, summands: Sequence[ReadTerm]) -> None:
        """Let no gradient pass of a loss in which nothing counts: a division by 0 makes NaN of 0."""
        for one in summands if self._has_to_pass else ():
            stop(one)

    def _refuse_nothing(self, loss: LossValue) -> None:
        """Reject a window of one micro-batch in which nothing counts, if that can be seen without waiting."""
        weight = loss.weight
        if weight is not None:
            if (not isinstance(weight, Tensor) or weight.is_cpu) and not float(weight):
                raise nothing_counts(f"the weight of loss {loss.name!r} is 0")
            return
        value = loss.value
        if self._knowledge.default is not None or isinstance(value, FakeTensor) or not value.requires_grad:
            return
        if not weight_at_once(value) and any(isinstance(one.weight, float) and not one.weight for one in read(value)):
            raise nothing_counts(f"what loss {loss.name!r} is divided by is 0")

    # --- predictions --------------------------------------------------------------------------------------------------

    def prediction(self, key: SummandKey) -> float:
        """Return P of a summand."""
        # That of a single summand is an exact count: what it is multiplied by cancels out at the end.
        return (self.predicted[key] or 1.0) * (1.0 if self._is_lone or self._are_known else self._unit(key))

    def _unit(self, key: SummandKey) -> float:
        """Return the weight of one that is counted, of the hint by which a summand's weight is predicted."""
        name, number = key
        known = self._knowledge.summands[name][number]
        return self._units.get(key) or known.hints.get(self._hint(known), 1.0)  # type: ignore[arg-type]

    def _hint(self, known: Known) -> Count | None:
        return hint_of(known, self._window)

    # --- what the batch counts ----------------------------------------------------------------------------------------

    def _count(self, wanted: Mapping[Count, float]) -> dict[Count, float]:
        """Return some counts of the current micro-batch."""
        missing = wanted.keys() - self._counts.keys()
        if missing:
            self._counts |= counted(self._window, *self._at, frozenset(missing))
        return {count: self._counts[count] for count in sorted(wanted)}

    def _counted(self, name: str, known: Known) -> float:
        """Return the weight of a summand of which the batch says it.

        Raises:
            RecheckWindow: Counts that have weighed all samples so far alike do not weigh these alike.
        """
        if known.reduction is not Reduction.MEAN:
            return float(self._at[1] - self._at[0])
        numbers = self._count(known.hints)
        if len(numbers) > 1:
            totals = counted(self._window, 0, self._window.samples, frozenset(numbers))
            shares = [n / (totals[count] or 1.0) for count, n in numbers.items()]
            if not all(is_same(one, shares[0]) for one in shares):
                raise RecheckWindow(
                    InvalidInputError(
                        f"what loss {name!r} is divided by cannot be read from its graph, and several counts of the "
                        "batch explained it that differ in this window; return a (sum, weight) pair"
                    )
                )
        first = min(numbers)
        return numbers[first] * known.hints[first]

    # --- after the window ---------------------------------------------------------------------------------------------

    def totals(self) -> dict[SummandKey, float | Tensor]:
        """Return the weight of each summand, added up over these samples."""
        found: dict[SummandKey, float | Tensor] = {}
        for key, weights in self.found.items():
            total: Any = sum(weights[1:], start=weights[0])
            on_device = isinstance(total, Tensor) and not total.is_cpu
            found[key] = in_full(total) if on_device else float(total)
        return found

    def _at_least(self, key: SummandKey, weight: float) -> float:
        """Return the weight of a summand over the window: of max(k, n), that of n micro-batches together is known."""
        name, number = key
        least = self._knowledge.summands[name][number].least
        return max(weight, least * self._unit(key)) if least else weight

    def exists(self, name: str) -> bool:
        """Whether a loss is finite wherever nothing counts in it."""
        return self._exists.get(name, False)

    def correction(self, totals: Mapping[SummandKey, float | Tensor] | None = None) -> float | Tensor:
        """Return what gradients and losses are multiplied by: P / W, one number for all summands.

        Args:
            totals: The weights of the whole window; None if these samples are all of it.

        Raises:
            RemakeWindow: It is not one number.
            InvalidInputError: Nothing counts in the window, and its loss does not exist.
        """
        found = self.totals() if totals is None else totals
        has_sum = any(not one.is_weighed for known in self._knowledge.summands.values() for one in known)
        if self._is_alone:
            return 1.0
        self._look_for_clamped_sums()
        if not found:
            return 1.0
        if len(found) == 1 and not has_sum:
            ((key, only),) = found.items()
            if isinstance(only, Tensor):  # which is not waited for
                return self.prediction(key) / only
        weights = {key: self._at_least(key, float(weight)) for key, weight in found.items()}
        for (name, _), weight in weights.items():
            if not weight and not self.exists(name):
                raise nothing_counts(f"what loss {name!r} is divided by is 0")
        ratios = [self.prediction(key) / weight for key, weight in weights.items() if weight] + [1.0] * has_sum
        self._settle(ratios, weights)
        return 1.0 if has_sum or not ratios or is_same(ratios[0], 1.0, _ROUNDING) else ratios[0]

    def _look_for_clamped_sums(self) -> None:
        """Warn of sums that may be divided by max(k, n), where n is at most k in all micro-batches, and more in all."""
        for name, number in self._divided:
            known = self._knowledge.summands[name][number]
            if known.is_weighed or not known.hints or not self._window.is_nested:
                continue
            totals = counted(self._window, 0, self._window.samples, frozenset(known.hints))
            more = frozenset(count for count, n in totals.items() if n > known.least and n.is_integer())
            if not more:
                continue
            parts = [counted(self._window, *part, more) for part in self._parts]
            told = {count for count in more if any(part[count] > known.least for part in parts)}
            if more - told:
                self._knowledge.warn_of_divisor(name, known.least)
            self._narrow(name, number, known.hints.keys() - more)

    def _settle(self, ratios: Sequence[float], weights: Mapping[SummandKey, float]) -> None:
        """See to it that the summands' P / W are one number; once they are W themselves, another is told of.

        Raises:
            RemakeWindow: They are not one number.
        """
        off = max(ratios, default=1.0) - min(ratios, default=1.0)
        largest = max(map(abs, ratios), default=1.0)
        if not self._are_known:
            is_off = off > _ONE_NUMBER * largest
            self._knowledge.failures = self._knowledge.failures + 1 if is_off else 0
            if is_off:
                raise RemakeWindow(weights)
        elif off > _MOVES * largest:
            self._knowledge.warn(
                "what the loss is divided by is not the same in two passes over a window, so its gradient may differ "
                "from the whole batch's; return (sum, weight) pairs"
            )


def counted(window: Window, start: int, stop: int, wanted: frozenset[Count]) -> dict[Count, float]:
    """Return counts of samples `start` to `stop` (exclusive) of a window, of which one may be its split's weight."""
    found: dict[Count, float] = {OF_SPLIT: window.weight(start, stop)} if OF_SPLIT in wanted else {}
    if SAMPLES in wanted:
        found[SAMPLES] = float(stop - start)
    rest = wanted - found.keys()
    return found | counts_of(window, start, stop, rest) if rest else found


# --- predictions ------------------------------------------------------------------------------------------------------


def predicted(knowledge: LossKnowledge, window: Window) -> dict[SummandKey, float]:
    """Return what predicts the weight of each summand over a window: a count of the batch, or a power of two.

    Anything else would depend on the samples of the last check, and the optimizer step to the last bit with it.
    """
    return {
        (name, number): _predicted(one, window)
        for name, known in knowledge.summands.items()
        for number, one in enumerate(known)
        if one.is_weighed
    }


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


def _scale(known: Known, weight: float, counts: Mapping[Count, float]) -> float:
    """Return by how much a weight exceeds what it was for each that is counted, as that of a changed factor."""
    expected = [n * known.hints[count] for count, n in counts.items()]
    if not expected[0] or any(is_same(weight, one) for one in expected):
        return 1.0
    return weight / expected[0]


def _scaling(factor: float) -> Any:
    def scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else one * factor for one in gradients)

    return scaled


# --- errors -----------------------------------------------------------------------------------------------------------


def nothing_counts(why: str) -> InvalidInputError:
    """Return the error for a window in which nothing counts."""
    return InvalidInputError(
        f"no target of this window counts ({why}), so the mean loss over it does not exist (a division by 0); leave "
        "such samples out"
    )


def changed(name: str, how: str) -> InvalidInputError:
    """Return the error for a loss that is not what it was when it was checked."""
    return InvalidInputError(
        f"loss {name!r} {how}; return the same form in every micro-batch (a term of 0 where nothing counts), a (sum, "
        "weight) pair, or pass loss_reduction="
    )


def _clamped(name: str) -> str:
    return (
        f"loss {name!r} divides by more in a micro-batch than is counted there, as max(1, n) does where n is 0: such "
        "micro-batches then count too much; return the (sum, weight) pair with n itself"
    )
