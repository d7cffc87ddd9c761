"""Weighs micro-batches whose share of a window is known before they run: the whole, that of their samples, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch._subclasses import FakeTensor

from autoaccum._loss.graph_reader import read, stop, weight_at_once
from autoaccum._loss.knowledge import RecheckWindow, changed
from autoaccum._loss.settling import nothing_counts
from autoaccum._loss.summands import BY_SAMPLES, Reduction
from autoaccum._loss.torch_losses import everything_counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue


class Number(NamedTuple):
    """How a number counts that is reported beside the losses of a micro-batch.

    Attributes:
        factor: What it is multiplied by.
        weight: What the micro-batch adds to the weight, or a function that returns it once the window is complete; None
            for a number that is summed.
    """

    factor: float | Tensor
    weight: Callable[[], float | Tensor] | float | None = None


class SingleMicroBatch:
    """A micro-batch that is the whole window, so that every loss is as it is."""

    # Whether `weigh_at_once` may see what the only loss adds.
    is_quick: bool = False

    def __init__(self, knowledge: LossKnowledge) -> None:
        self._knowledge = knowledge

    def enter(self, start: int, samples: int, batch: Any) -> None:
        """Begin the micro-batch."""

    def leave(self) -> None:
        """End it."""

    def weigh(self, loss: LossValue) -> Tensor:
        """Return the loss.

        Raises:
            InvalidInputError: Nothing counts in it, if that can be seen without waiting for a device.
        """
        refuse_nothing(self._knowledge, loss)
        return loss.value / loss.weight if loss.is_sum else loss.value  # type: ignore[operator]

    def weigh_at_once(self, name: str, value: Tensor, samples: int) -> Tensor | None:  # noqa: ARG002
        """As for those that are quick: nothing is seen at once."""
        return None

    def number_of(self, losses: Sequence[LossValue]) -> Number:  # noqa: ARG002 - as of a window
        """As for `WindowWeights`."""
        return Number(1.0, 1.0)


class BySamples(SingleMicroBatch):
    """Micro-batches of a window in which every loss is a mean over samples."""

    is_quick = True

    def __init__(self, knowledge: LossKnowledge, samples: int) -> None:
        self._knowledge = knowledge
        self._samples = samples
        self._share = 1.0

    def enter(self, start: int, samples: int, batch: Any) -> None:  # noqa: ARG002 - as of a window
        """Begin the micro-batch of so many samples."""
        self._share = samples / self._samples

    def weigh(self, loss: LossValue) -> Tensor:
        """Return what a loss of the micro-batch adds to the window's.

        Raises:
            RecheckWindow: It states a weight.
        """
        if loss.is_sum:
            raise RecheckWindow(changed(loss.name, "is a (sum, weight) pair, and was not there when it was checked"))
        return loss.value if self._share == 1.0 else loss.value * self._share

    def weigh_at_once(self, _name: str, value: Tensor, samples: int) -> Tensor:
        """Return what the only loss adds, given its value and the samples."""
        return value if samples == self._samples else value * (samples / self._samples)

    def number_of(self, losses: Sequence[LossValue]) -> Number:  # noqa: ARG002 - as of a window
        """As for `WindowWeights`."""
        return Number(self._share, self._share)


class Nothing(SingleMicroBatch):
    """Samples that count for nothing, of a process that makes a pass since others make it."""

    def weigh(self, loss: LossValue) -> Tensor:
        """Return 0, with a gradient: what nothing counts in may be divided by 0, which would make NaN of it."""
        for summand in read(loss.value) if loss.value.requires_grad else ():
            stop(summand)
        return loss.value.nan_to_num() * 0.0

    def number_of(self, losses: Sequence[LossValue]) -> Number:  # noqa: ARG002 - as of a window
        """As for `WindowWeights`."""
        return Number(0.0, 0.0)


def go_by_samples(knowledge: LossKnowledge, loss: object, window: Window) -> bool:
    """Whether every loss of a window is a mean over its samples: all targets count, or the arguments say it."""
    if knowledge.is_torch_loss:
        (known,) = next(iter(knowledge.summands.values()))
        is_mean = known.reduction is Reduction.MEAN
        return is_mean and window.is_known_pair and everything_counts(loss, window.plain_batch()[1])
    is_stated = knowledge.default is BY_SAMPLES and bool(knowledge.summands)
    return is_stated and all(known is BY_SAMPLES for _, known in knowledge.items())


def refuse_nothing(knowledge: LossKnowledge, loss: LossValue) -> None:
    """Reject a window of one micro-batch in which nothing counts, if that can be seen without waiting for a device."""
    weight, value = loss.weight, loss.value
    if weight is not None:
        is_empty = (not isinstance(weight, Tensor) or weight.is_cpu) and not float(weight)
    elif knowledge.default is not None or isinstance(value, FakeTensor) or not value.requires_grad:
        return
    else:
        is_empty = not weight_at_once(value) and any(
            isinstance(one.weight, float) and not one.weight for one in read(value)
        )
    if is_empty:
        raise nothing_counts(loss.name)
