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

from autoaccum._loss.batch_counts import SAMPLES
from autoaccum._loss.explaining import MicroBatch
from autoaccum._loss.graph_reader import Summand, has_only_weights_of_0, read, stop, weight_at_once
from autoaccum._loss.knowledge import RecheckWindow, changed
from autoaccum._loss.known_shares import Number
from autoaccum._loss.settling import PartWeights, settle
from autoaccum._loss.summand_weights import SummandWeights, power_of_two
from autoaccum._loss.summands import Reduction, Source, is_same
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.settling import Totals
    from autoaccum._loss.summands import Known, SummandKey

_READ = Reduction.MEAN, Source.GRAPH
_COMPILED = "CompiledFunctionBackward"  # the node of compiled code, whose graph says nothing


class WindowWeights:
    """The weights of one window, or of this process's part of it.

    Args:
        knowledge: What is known of the losses; what the micro-batches show beyond is added to it.
        window: The samples.
        totals: Of the whole window, of which these samples are a part, or of an earlier pass; None if not known.
        passes_together: Whether processes run passes together: a loss in which nothing counts has a backward pass all
            the same, and nothing that one of them reads makes its predictions differ from the others'.
        compares: Whether what cross entropy counts is compared with what the batch counts, which it seldom differs
            from.

    Attributes:
        is_quick: As for `SingleMicroBatch`.
    """

    def __init__(
        self,
        knowledge: LossKnowledge,
        window: Window,
        totals: Totals | None = None,
        *,
        passes_together: bool = False,
        compares: bool = True,
    ) -> None:
        self._knowledge = knowledge
        self._window = window
        self._samples = window.samples if totals is None else totals.samples
        self._is_exact = totals is not None and totals.is_exact
        self._passes_together = passes_together
        self._totals = None if totals is None else totals.weights
        self._weights: dict[SummandKey, SummandWeights] = {}
        self._exists: dict[str, bool] = {}  # whether losses are finite in the micro-batches in which nothing counts
        self._parts: list[MicroBatch] = []
        is_read = [known.kind for _, known in knowledge.items()] == [_READ]
        self.is_quick = is_read and not compares and totals is None
        self._is_nested = window.is_nested

    # --- a micro-batch ------------------------------------------------------------------------------------------------

    def enter(self, start: int, samples: int, batch: Any) -> None:
        """Begin the micro-batch of so many samples from sample `start` on."""
        part = MicroBatch(start, start + samples)
        self._parts.append(part)
        # What a split has made it may make otherwise another time.
        self._now = part if self._is_nested else part._replace(batch=batch)

    def leave(self) -> None:
        """End it; its batch is not needed any more."""
        self._now = self._parts[-1]

    def weigh(self, loss: LossValue) -> Tensor | None:
        """Return what a loss of the micro-batch adds to the window's; None for nothing.

        Raises:
            RecheckWindow: It is not what is known of it.
            InvalidInputError: It is divided by no finite number, or by 0 although something counts.
        """
        if not loss.value.requires_grad:
            return loss.value  # the caller says of a loss that it has no gradient
        known = self._known(loss)
        if self.is_quick and (value := self.weigh_at_once(loss.name, loss.value, 0)) is not None:
            return value
        summands = self._summands(loss, known)
        factors = [self._factor(loss, n, known[n], summand) for n, summand in enumerate(summands)]
        return self._scaled(loss, summands, factors, has_sum=not all(one.is_weighed for one in known))

    def weigh_at_once(self, name: str, value: Tensor, _samples: int) -> Tensor | None:
        """Return what the only loss adds, where it is a mean over classes; None for anything else."""
        weight = weight_at_once(value)
        if not weight:
            return None
        only = self._of((name, 0))
        only.found.append(weight)
        only.divisor = weight
        return value * (weight / only.prediction)

    def note(self, loss: LossValue) -> list[Any]:
        """Note the weights of a loss, in a pass that goes forward alone; return what each summand is divided by."""
        known = self._known(loss)
        return [
            self._of((loss.name, number)).add(loss, summand, self._now) if known[number].is_weighed else 1.0
            for number, summand in enumerate(self._summands(loss, known))
        ]

    def _known(self, loss: LossValue) -> Sequence[Known]:
        known = self._knowledge.summands.get(loss.name)
        if known is None or (known[0].source is Source.STATED) is not (loss.weight is not None):
            raise RecheckWindow(changed(loss.name, "was not there when it was checked"))
        return known

    def _of(self, key: SummandKey) -> SummandWeights:
        """Return the weights of a summand."""
        if key not in self._weights:
            # What all processes have to divide by alike is known before any of them reads a loss.
            total = None if self._totals is None else self._totals.get(key, power_of_two(self._samples))
            # That of a single summand is an exact count: what it is multiplied by cancels out at the end.
            has_unit = not self._is_exact and not self._passes_together and len(self._knowledge.items()) > 1
            self._weights[key] = SummandWeights(
                key,
                self._knowledge,
                self._window,
                total,
                has_unit=has_unit,
                passes_together=self._passes_together,
            )
        return self._weights[key]

    def _summands(self, loss: LossValue, known: Sequence[Known]) -> list[Summand]:
        """Return the summands of a loss, with their weights on the host if there are several or a divisor.

        Raises:
            RecheckWindow: They are others than when it was checked.
        """
        (first, *others), is_stated = known, self._knowledge.is_stated
        is_counted = first.source is Source.COUNTED and first.reduction is Reduction.MEAN
        if not others and (first.source is Source.STATED or is_counted or (is_stated and not first.is_weighed)):
            return [Summand(loss.value.grad_fn, None)]  # without a look at its graph
        if not others and first.reduction is Reduction.MEAN and (weight := weight_at_once(loss.value)):
            return [Summand(loss.value.grad_fn, weight)]
        summands = read(loss.value)
        if self._knowledge.is_torch_loss:
            summands = summands[:1]  # all have the same divisor
        if len(summands) != len(known):
            now = _compiled(summands) or f"has {len(summands)}"
            raise RecheckWindow(changed(loss.name, f"had {len(known)} terms when it was checked, and now {now}"))
        # The gradient of a division by 0 is NaN, even times 0.
        if others or any(one.divisor is not None for one in summands):
            for one in summands:
                one.weight = float(one.weight) if isinstance(one.weight, Tensor) else one.weight
                one.divisor = float(one.divisor) if isinstance(one.divisor, Tensor) else one.divisor
        if not is_stated:
            self._compare_graphs(loss.name, known, summands)
        return summands

    def _compare_graphs(self, name: str, known: Sequence[Known], summands: Sequence[Summand]) -> None:
        """Compare how a loss is computed with what it was in windows that were checked.

        Raises:
            RecheckWindow: It is another function.
        """
        weights = [one.weight for one in summands]
        if any(isinstance(one, float) and not (one and math.isfinite(one)) for one in weights) or _compiled(summands):
            return  # nothing counts, or nothing is to be seen
        form = tuple((one.is_counted, one.divisor is None, one.end and one.end.name()) for one in summands)
        is_new = not self._knowledge.note_graph(name, form)
        is_one = self._now.stop - self._now.start == 1 and all(SAMPLES in one.hints for one in known)
        if is_one and all(one == 1.0 for one in weights):
            return  # a mean over samples that is not divided where there is one
        for number, (one, its) in enumerate(zip(summands, known, strict=True)):
            is_mean = its.reduction is Reduction.MEAN and its.source is Source.GRAPH and not its.is_guess
            if is_mean and not one.is_counted and not self._of((name, number)).counts_as(one, self._now):
                raise RecheckWindow(changed(name, "is a sum in a micro-batch, and was a mean when it was checked"))
        if is_new:
            raise RecheckWindow(changed(name, "ends in other operations than when it was checked"))

    def _factor(self, loss: LossValue, number: int, known: Known, summand: Summand) -> float | Tensor:
        """Return what a summand is multiplied by: w / P, or 1 for a sum."""
        weights = self._of((loss.name, number))
        if not known.is_weighed:
            weights.compare_sum(summand, self._now)
            return 1.0
        divisor = weights.add(loss, summand, self._now)
        if loss.is_sum:
            return 1.0 / weights.fix()
        if not isinstance(divisor, Tensor) and (not divisor or math.isinf(divisor)):
            return 0.0  # what is multiplied by 0 is not there
        return divisor / weights.fix()

    def _scaled(
        self, loss: LossValue, summands: Sequence[Summand], factors: Sequence[float | Tensor], *, has_sum: bool
    ) -> Tensor | None:
        """Return a loss with its summands multiplied by their factors, which its backward pass applies."""
        value, first = loss.value, factors[0]
        if isinstance(first, Tensor):  # a single summand; where nothing counts, its value is NaN
            return torch.where(first == 0, 0.0, value * first)
        if first and len(factors) == 1:
            return value if first == 1.0 else value * first
        empty = [summand for summand, factor in zip(summands, factors, strict=True) if not factor]
        if empty and self._knowledge.is_torch_loss:
            empty = summands = read(value)
        if empty and self._knowledge.summands[loss.name][0].source is not Source.COUNTED:
            self._note_nothing(loss, empty)
        if all(factor == first or is_same(factor, first, 1e-12) for factor in factors):  # type: ignore[arg-type]
            for one in summands if empty and self._passes_together else ():
                stop(one)
            return None if empty else value if first == 1.0 else value * first
        # The number is reported by samples; beside a sum, once in each micro-batch.
        share = 1.0 if has_sum else (self._now.stop - self._now.start) / self._samples
        for one, factor in zip(summands, factors, strict=True):
            if factor != share:
                one.node.register_prehook(_scaling(float(factor) / share))
            if not factor:
                loss.may_be_nan = True
                stop(one)
        return value * share

    def _note_nothing(self, loss: LossValue, empty: Sequence[Summand]) -> None:
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

    def number_of(self, losses: Sequence[LossValue]) -> Number:
        """Return how a number counts that is reported beside the losses of the micro-batch.

        As the only loss does, or else by samples.
        """
        own = [self._of(key) for key, known in self._knowledge.items() if len(losses) == 1 and key[0] == losses[0].name]
        if self._knowledge.adds_all or (len(own) == 1 and not own[0].known.is_weighed):
            return Number(1.0)
        if len(own) != 1:
            share = (self._now.stop - self._now.start) / self._samples
            return Number(share, share)
        weights = own[0]
        place, prediction = len(weights.found) - 1, weights.prediction
        return Number(weights.divisor / prediction, lambda: weights.weight_of(place) / prediction)

    # --- after the window ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Compare the weights of all micro-batches with what the batch counts.

        Raises:
            RecheckWindow: The loss is not what is known of it.
        """
        for weights in self._weights.values():
            if weights.explain():
                self._exists.setdefault(weights.key[0], True)

    def totals(self) -> dict[SummandKey, float]:
        """Return the weight of each summand, added up over these samples."""
        return {key: float(one.total()) for key, one in self._weights.items() if one.found}

    def message(self, *, is_part: bool = True) -> PartWeights:
        """Return what this process's part tells of the window's weights; less, if it is the whole."""
        found = {key: one for key, one in self._weights.items() if one.found}
        return PartWeights(
            {key: (float(one.total()), one.prediction, one.least) for key, one in found.items()},
            self._exists,
            {key: own for key, one in self._weights.items() if (own := one.of_sum(self._parts)) is not None},
            {key: one.unit() for key, one in found.items()} if is_part and self._window.holds_numbers() else {},
        )

    def correction(self) -> float | Tensor:
        """Return what gradients and losses of the whole window are multiplied by: P / W, one number for all summands.

        Raises:
            NotSettled: It is not one number.
            InvalidInputError: Nothing counts in the window, and its loss does not exist.
        """
        only = next(iter(self._weights.values())) if len(self._weights) == 1 else None
        if only is not None and only.found and only.known.is_weighed and not self._knowledge.has_sum:
            total = only.total()
            if isinstance(total, Tensor):  # which is not waited for; where it is 0, there is nothing to correct
                return torch.where(total == 0, 1.0, only.prediction / total)
            if total == only.prediction and not only.least:  # as in almost every window
                return 1.0
        return settle(self._knowledge, [self.message(is_part=False)], is_exact=self._is_exact)[0]

    def total_of(self, name: str) -> tuple[float | Tensor, float]:
        """Return the weight of a loss that has a single summand, and the least that it can be in a window.

        Raises:
            RecheckWindow: The loss is not what is known of it.
        """
        weights = self._of((name, 0))
        weights.explain()
        return weights.total(), weights.least

    def of_gradient(self) -> tuple[Sequence[float], float]:
        """Return each micro-batch's weight in the mean gradient, and what to divide the gradient by for a mean.

        Several summands have no common weight: that of the samples stands for it.
        """
        sizes = [float(part.stop - part.start) for part in self._parts]
        if self._knowledge.adds_all:
            return sizes, float(self._window.samples)
        if len(self._weights) == 1:
            (only,) = self._weights.values()
            weights = [float(weight) for weight in only.found]
            return weights, sum(weights) / only.prediction
        return sizes, sum(sizes) / self._samples


def _compiled(summands: Sequence[Summand]) -> str:
    """Return what to say where a loss is compiled code; "" if it is not."""
    is_compiled = any(one.weight is None and one.end is not None and one.end.name() == _COMPILED for one in summands)
    return "has a graph that cannot be read, as compiled code has none" if is_compiled else ""


def _scaling(factor: float) -> Any:
    def scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else one * factor for one in gradients)

    return scaled
