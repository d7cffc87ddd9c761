"""What the losses of an evaluation add up to: the sum S and the weight w of some samples."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from autoaccum._data.nesting import numbers_in
from autoaccum._loss.batch_counts import in_words
from autoaccum._loss.explaining import counted
from autoaccum._loss.knowledge import RecheckWindow, changed
from autoaccum._loss.summands import Reduction, Source, is_same
from autoaccum._loss.window_weights import WindowWeights

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.summands import Known

# The least weight: 0 divided by it is 0.
_LEAST = sys.float_info.min


class Share(NamedTuple):
    """How a loss of some samples counts in the mean over all.

    Attributes:
        factor: What it is multiplied by for its sum.
        weight: What the samples add to the weight of all.
        least: The least in magnitude that the weight of all can be: k, in max(k, n).
    """

    factor: Any
    weight: Any
    least: float = 0.0


def is_read(knowledge: LossKnowledge) -> bool:
    """Whether the graph of a loss says its weight, so that an evaluation needs one."""
    return any(known.source is Source.GRAPH and known.is_weighed for _, known in knowledge.items())


def is_ambiguous(knowledge: LossKnowledge, window: Window) -> bool:
    """Whether counts that a mean may be divided by, which were alike when it was checked, differ in some samples.

    Not so where further checks have told no more of them, several times.
    """
    hinted = [known for _, known in knowledge.items() if known.source is Source.GRAPH and len(known.hints) > 1]
    return any(not _are_same(_weights_of(known, window).values()) for known in hinted) and knowledge.asks_again(hinted)


def share_of(knowledge: LossKnowledge, loss: LossValue, window: Window) -> Share:
    """Return how a loss of some samples counts.

    Raises:
        RecheckWindow: It is not what is known of it.
    """
    if loss.weight is not None:
        return Share(1.0 if loss.is_sum else loss.weight, loss.weight)
    known = knowledge.summands.get(loss.name)
    if known is None:
        raise RecheckWindow(changed(loss.name, "was not there when it was checked"))
    return _of_number(knowledge, loss, known, window)


def _of_number(knowledge: LossKnowledge, loss: LossValue, known: Sequence[Known], window: Window) -> Share:
    """Return how a loss counts that is a number."""
    samples = float(window.samples)
    if (number := known[0].number) is not None:
        span = window.spans[0]
        value = numbers_in(span.piece.batch)[number]
        return Share(value, value * span.samples / span.piece.samples)
    if not any(one.is_weighed for one in known):
        _look_for_clamp(knowledge, loss.name, known[0], window)
        return Share(1.0, samples)
    if len(known) > 1:
        return _of_several(knowledge, loss, known, window)
    (only,) = known
    if only.source is Source.GRAPH and not loss.value.requires_grad:
        return _without_graph(knowledge, loss, only, window)
    weights = WindowWeights(knowledge, window)
    weights.enter(0, window.samples, None)
    (divisor,) = weights.note(loss)
    if not isinstance(divisor, Tensor) and math.isinf(divisor):
        return Share(0.0, 0.0, _LEAST)  # what is multiplied by 0 is 0, also where nothing else is evaluated
    return Share(divisor, *weights.total_of(loss.name))


def _look_for_clamp(knowledge: LossKnowledge, name: str, known: Known, window: Window) -> None:
    """Warn of a sum that may be divided by max(k, n), once an evaluation has counted more than its divisor."""
    totals = knowledge.now.counted_in_sums
    for count, n in counted(window, 0, window.samples, frozenset(known.hints)).items() if known.hints else ():
        totals[count] = totals.get(count, 0.0) + n
        if totals[count] > known.least:
            knowledge.said.of_divisor(name, known.least, is_only=len(knowledge.items()) == 1)


def _of_several(knowledge: LossKnowledge, loss: LossValue, known: Sequence[Known], window: Window) -> Share:
    """Return how a loss of several summands counts, whose values are not known: by what all share, or by samples."""
    weight = float(window.samples)
    if loss.value.requires_grad:
        weights, noted = WindowWeights(knowledge, window), list[Any]()
        weights.enter(0, window.samples, None)
        with suppress(RecheckWindow):  # of a penalty, which is computed from outputs here, and not from parameters
            noted = weights.note(loss)
        if noted and all(one.reduction is Reduction.MEAN and one.per_sample for one in known):
            each = [knowledge.each_sample((loss.name, number)) for number in range(len(known))]
            units = [abs(float(weight)) / of_sample for weight, of_sample in zip(noted, each, strict=True)]
            if all(is_same(one, units[0]) for one in units):
                return Share(units[0], units[0])
        weight = 0.0 if not all(noted) and bool(loss.value.detach().isnan()) else weight
    knowledge.said.warn(
        f"loss {loss.name!r} has terms that are divided by numbers of their own, of which an evaluation knows the sum "
        "alone: it weighs micro-batches by their samples; return the terms by name"
    )
    return Share(weight, weight)


def _without_graph(knowledge: LossKnowledge, loss: LossValue, known: Known, window: Window) -> Share:
    """Return how a loss counts that the model computes itself: by what it was divided by in training."""
    value = loss.value.detach()
    weights = _weights_of(known, window)
    if not weights:
        knowledge.said.warn(
            f"loss {loss.name!r} is evaluated by the model itself, and what it is divided by is no count of the batch: "
            "the evaluation's mean weighs micro-batches by their samples"
        )
        return Share(float(window.samples), float(window.samples))
    if not all(weights.values()):
        if math.isnan(number := float(value)):
            return Share(0.0, 0.0)
        # Something counts where a mean is not 0.
        weights = {count: n for count, n in weights.items() if n or not number} or weights
    if not _are_same(weights.values()):
        counts = " or ".join(sorted(map(in_words, weights)))
        knowledge.said.warn(
            f"what loss {loss.name!r} is divided by could be {counts}, which differ in an evaluation: it weighs "
            "micro-batches by the least; return a (sum, weight) pair"
        )
    weight, least = min(weights.values()), known.least * (known.per_divisor or 1.0)
    return Share(max(weight, least, key=abs), weight, least)


def _weights_of(known: Known, window: Window) -> dict[Count, float]:
    """Return the weight of a mean by each of its hints: by those of which it is a multiple, if there are any."""
    hints = {count: each for count, each in known.hints.items() if each.is_integer()} or known.hints
    numbers = counted(window, 0, window.samples, frozenset(hints)) if hints else {}
    return {count: number * hints[count] * (known.per_divisor or 1.0) for count, number in numbers.items()}


def _are_same(weights: Iterable[float]) -> bool:
    first, *others = weights
    return all(is_same(one, first) for one in others)
