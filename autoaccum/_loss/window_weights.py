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

from autoaccum._loss.graph_reader import ReadTerm, has_only_weights_of_0, read, stop, weight_at_once
from autoaccum._loss.knowledge import RecheckWindow, changed
from autoaccum._loss.summand_weights import ONE_NUMBER, SummandWeights, power_of_two, predicted
from autoaccum._loss.summands import Source, is_same
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.summands import Known, SummandKey

# The relative difference of a window's weights, in two passes through it, from which a warning tells of it.
_MOVES = 1e-3
_ROUNDING = 1e-14  # of double precision


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
        self._is_exact = is_exact
        self._has_to_pass = has_to_pass
        self._predicted = predicted(knowledge, window) if totals is None else totals
        self._weights: dict[SummandKey, SummandWeights] = {}
        self._exists: dict[str, bool] = {}  # whether losses are finite in the micro-batches in which nothing counts
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
        self._parts.append((start, start + samples))
        known = self._known(loss)
        summands = self._summands(loss, known)
        factors = [self._factor(loss, n, known[n], summand) for n, summand in enumerate(summands)]
        return self._scaled(loss, summands, factors, has_sum=not all(one.is_weighed for one in known))

    def note(self, loss: LossValue, start: int, samples: int) -> None:
        """Note the weights of a loss of a micro-batch, in a pass that goes forward alone."""
        known = self._known(loss)
        for number, summand in enumerate(self._summands(loss, known)):
            if known[number].is_weighed:
                self._of((loss.name, number)).add(loss, summand, (start, start + samples))

    def _known(self, loss: LossValue) -> Sequence[Known]:
        known = self._knowledge.summands.get(loss.name)
        if known is None or (known[0].source is Source.STATED) is not (loss.weight is not None):
            raise RecheckWindow(changed(loss.name, "was not there when it was checked"))
        return known

    def _of(self, key: SummandKey) -> SummandWeights:
        """Return the weights of a summand."""
        if key not in self._weights:
            # That of a single summand is an exact count: what it is multiplied by cancels out at the end.
            has_unit = not self._is_exact and len(self._predicted) + self._knowledge.has_sum > 1
            total = self._predicted.get(key, power_of_two(self._window.samples))
            self._weights[key] = SummandWeights(key, self._knowledge, self._window, total, has_unit=has_unit)
        return self._weights[key]

    def _summands(self, loss: LossValue, known: Sequence[Known]) -> list[ReadTerm]:
        """Return the summands of a loss, with their weights on the host if there are several or a divisor.

        Raises:
            RecheckWindow: They are others than when it was checked.
        """
        (first, *others), is_stated = known, self._knowledge.is_stated
        if not others and (first.source is not Source.GRAPH or (is_stated and not first.is_weighed)):
            return [ReadTerm(loss.value.grad_fn, None)]  # without a look at its graph
        if not others and first.is_weighed and (weight := weight_at_once(loss.value)):
            return [ReadTerm(loss.value.grad_fn, weight)]
        summands = read(loss.value)
        if len(summands) != len(known):
            how = f"had {len(known)} terms when it was checked, and now has {len(summands)}"
            raise RecheckWindow(changed(loss.name, how))
        # The gradient of a division by 0 is NaN, even times 0.
        if others or any(one.divisor is not None for one in summands):
            for one in summands:
                one.weight = float(one.weight) if isinstance(one.weight, Tensor) else one.weight
                one.divisor = float(one.divisor) if isinstance(one.divisor, Tensor) else one.divisor
        if not is_stated:
            self._compare_graphs(loss.name, summands)
        return summands

    def _compare_graphs(self, name: str, summands: Sequence[ReadTerm]) -> None:
        """Compare how a loss is computed with what it was in windows that were checked.

        Raises:
            RecheckWindow: It is another function.
        """
        weights = [one.weight for one in summands]
        if any(isinstance(one, float) and not (one and math.isfinite(one)) for one in weights):
            return  # nothing counts
        form = tuple((one.is_counted, one.divisor is None, one.end and one.end.name()) for one in summands)
        start, end = self._parts[-1] if self._parts else (0, 0)
        of_one_sample = end - start == 1 and all(one == 1.0 for one in weights)
        if (
            not self._knowledge.note_graph(name, form) and not of_one_sample
        ):  # a mean that is not divided where there is one
            raise RecheckWindow(changed(name, "ends in other operations than when it was checked"))

    def _factor(self, loss: LossValue, number: int, known: Known, summand: ReadTerm) -> float | Tensor:
        """Return what a summand is multiplied by: w / P, or 1 for a sum."""
        weights = self._of((loss.name, number))
        if not known.is_weighed:
            weights.compare_sum(summand)
            return 1.0
        divisor = weights.add(loss, summand, self._parts[-1])
        if loss.is_sum:
            return 1.0 / weights.prediction
        if not isinstance(divisor, Tensor) and (not divisor or math.isinf(divisor)):
            return 0.0  # what is multiplied by 0 is not there
        return divisor / weights.prediction

    def _scaled(
        self, loss: LossValue, summands: Sequence[ReadTerm], factors: Sequence[float | Tensor], *, has_sum: bool
    ) -> Tensor | None:
        """Return a loss with its summands multiplied by their factors, which its backward pass applies."""
        value, first = loss.value, factors[0]
        if isinstance(first, Tensor):  # a single summand; where nothing counts, its value is NaN
            return torch.where(first == 0, 0.0, value * first)
        empty = [summand for summand, factor in zip(summands, factors, strict=True) if not factor]
        if empty:
            self._note_nothing(loss, empty)
        if all(factor == first or is_same(factor, first, 1e-12) for factor in factors):  # type: ignore[arg-type]
            for one in summands if empty and self._has_to_pass else ():
                stop(one)
            return None if empty else value if first == 1.0 else value * first
        # The number is reported by samples; beside a sum, once in each micro-batch.
        start, end = self._parts[-1]
        share = 1.0 if has_sum else (end - start) / self._window.samples
        for one, factor in zip(summands, factors, strict=True):
            if factor != share:
                one.node.register_prehook(_scaling(float(factor) / share))
            if not factor:
                loss.may_be_nan = True
                stop(one)
        return value * share

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

    def _refuse_nothing(self, loss: LossValue) -> None:
        """Reject a window of one micro-batch in which nothing counts, if that can be seen without waiting."""
        weight, value = loss.weight, loss.value
        if weight is not None:
            is_empty = (not isinstance(weight, Tensor) or weight.is_cpu) and not float(weight)
        elif self._knowledge.default is not None or isinstance(value, FakeTensor) or not value.requires_grad:
            return
        else:
            is_empty = not weight_at_once(value) and any(
                isinstance(one.weight, float) and not one.weight for one in read(value)
            )
        if is_empty:
            raise nothing_counts(f"what loss {loss.name!r} is divided by is 0")

    # --- after the window ---------------------------------------------------------------------------------------------

    def totals(self) -> dict[SummandKey, float | Tensor]:
        """Return the weight of each summand, added up over these samples."""
        return {key: one.total() for key, one in self._weights.items() if one.found}

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
        found, has_sum = self.totals() if totals is None else totals, self._knowledge.has_sum
        for one in self._weights.values():
            if not one.known.is_weighed:
                one.look_for_clamp(self._parts)
        if len(found) == 1 and not has_sum:
            ((key, only),) = found.items()
            if isinstance(only, Tensor):  # which is not waited for
                return self._of(key).prediction / only
        weights = {key: self._of(key).at_least(float(weight)) for key, weight in found.items()}
        for (name, _), weight in weights.items():
            if not weight and not self.exists(name):
                raise nothing_counts(f"what loss {name!r} is divided by is 0")
        ratios = [self._of(key).prediction / weight for key, weight in weights.items() if weight]
        ratios += [1.0] * (has_sum or not ratios)
        self._settle(ratios, weights)
        return 1.0 if has_sum or is_same(ratios[0], 1.0, _ROUNDING) else ratios[0]

    def _settle(self, ratios: Sequence[float], weights: Mapping[SummandKey, float]) -> None:
        """See to it that the summands' P / W are one number; once P is W of an earlier pass, tell of another.

        Raises:
            RemakeWindow: They are not one number.
        """
        off = (max(ratios) - min(ratios)) / max(map(abs, ratios))
        if not self._is_exact:
            self._knowledge.failures = self._knowledge.failures + 1 if off > ONE_NUMBER else 0
            if off > ONE_NUMBER:
                raise RemakeWindow(weights)
        elif off > _MOVES:
            self._knowledge.warn(
                "what the loss is divided by is not the same in two passes over a window, so its gradient may differ "
                "from the whole batch's; return (sum, weight) pairs"
            )


def _scaling(factor: float) -> Any:
    def scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else one * factor for one in gradients)

    return scaled


def nothing_counts(why: str) -> InvalidInputError:
    """Return the error for a window in which nothing counts."""
    return InvalidInputError(
        f"no target of this window counts ({why}), so the mean loss over it does not exist (a division by 0); leave "
        "such samples out"
    )
