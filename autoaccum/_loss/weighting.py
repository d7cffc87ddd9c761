"""Weights micro-batches within the loss of their window, by their targets. Calls no model.

A mean loss over a window is `sum_i w_i l_i / sum_i w_i`, where w_i is 1 for each sample, 0 or 1 for each token, or the
weight of the target's class. The mean over one micro-batch has the same form, so the window's loss is the mean of the
micro-batches' losses, each weighted by its own sum of w_i. A loss that is a sum needs no weights: its micro-batches are
added.

Targets are tallied in integers and only then converted to a weight. The weight of a window is therefore bitwise
identical for every cut, and so is the factor of a micro-batch, however the rest is cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from autoaccum._data.numbers import spelled
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autoaccum._data.numbers import Path

# A number of samples, elements or targets, or of targets of each class, shape (C,).
ClassCounts = npt.NDArray[np.int64]
Tally = int | float | ClassCounts

_PAIR = 2
IGNORE_INDEX = -100  # the default of torch.nn.CrossEntropyLoss and of every Transformers model


class Over(Enum):
    """The reduction of a loss: what it sums or averages over."""

    SUM = "a sum over the samples"
    SAMPLES = "a mean over the samples"
    ELEMENTS = "a mean over the elements of the targets"
    COUNTED = "a mean over the targets that count"
    SHIFTED = "a mean over the targets that count, shifted by one"
    SUMMED = "a sum over the samples, divided by the sum of a number that each sample carries"
    VECTOR = "one loss a sample, averaged over the samples"
    PAIR = "a (sum, weight) pair"
    DIVIDED = "a sum over the samples, divided by a count that the batch carries"
    WEIGHED = "a mean over what split.weight counts"
    OPAQUE = "unknown, and weighed by samples"


@dataclass(frozen=True, eq=False)
class Weighting:
    """How a loss weights its samples.

    Attributes:
        over: The reduction.
        ignore_index: Targets with this value do not count. A mask is a target with `ignore_index` 0 (or 1).
        class_weights: Weight of each class, shape (C,), on the CPU; None if all are 1.
        target: The name of the target tensor in the batch; None means the only one.
        void: For an opaque loss, `constants` of micro-batches for which it is NaN.
        nor: A second value that does not count.
        divisor: The path of the number in the batch that the loss is divided by, if it is `Over.DIVIDED`.
    """

    over: Over
    ignore_index: int = IGNORE_INDEX
    class_weights: Tensor | None = None
    target: str | None = None
    void: frozenset[frozenset[tuple[str, float]]] = frozenset()
    nor: int | None = None
    divisor: Path | None = None

    @property
    def needs_targets(self) -> bool:
        """Whether the weight depends on the targets, and not only on the number of samples."""
        return bool(self.void) or self.over in (Over.ELEMENTS, Over.COUNTED, Over.SHIFTED, Over.SUMMED)

    @property
    def description(self) -> str:
        """The reduction in words."""
        if self.divisor is not None:
            return (
                f"a sum over the samples, divided by {spelled(self.divisor)}, which each of the loader's batches "
                "carries for itself; the loss of a window is divided by their sum"
            )
        over: str = self.over.value
        if self.over is Over.SUMMED:
            carried = repr(self.target) if self.target else "the targets"
            return f"a sum over the samples, divided by the sum of {carried}"
        if self.over not in (Over.COUNTED, Over.SHIFTED) or self.ignore_index == IGNORE_INDEX:
            return over
        where = f" in {self.target!r}" if self.target else ""
        return f"{over} (those that are not {self.ignore_index}{where})"

    def tally(self, samples: int, named_targets: Mapping[str, Tensor]) -> Tally:
        """Return the tally of some samples; tallies of several parts can be added, in any order.

        Args:
            samples: Their number.
            named_targets: Their target tensors by name, first dimension N; used only if `needs_targets`. Synchronises
                with their device.
        """
        if self.void:
            return 0 if constants(named_targets) in self.void else samples
        targets = self._choose(named_targets) if self.needs_targets else None
        if targets is None:
            return samples
        if self.over in (Over.ELEMENTS, Over.SUMMED):
            return targets.numel() if self.over is Over.ELEMENTS else targets.cpu().double().clamp(min=0).sum().item()
        if self._are_probabilities(targets):
            # Of shape (N, C, ...): torch's mean runs over everything but the classes.
            return targets.numel() // targets.shape[1] if targets.dim() > 1 else 1
        if self.class_weights is None:
            return int(self._counting(targets).sum())
        return self._count_classes(targets.flatten().cpu().numpy(), len(self.class_weights))

    def tally_each(self, samples: int, named_targets: Mapping[str, Tensor]) -> Tensor:
        """Return the tally of each sample, shape (N,), for a weighting without class weights."""
        targets = self._choose(named_targets) if self.needs_targets else None
        if targets is None:
            return torch.ones(samples)
        if self.over is Over.ELEMENTS:
            return torch.full((samples,), targets.numel() / samples)
        if self.over is Over.SUMMED:
            return targets.clamp(min=0).reshape(samples, -1).sum(1).float().cpu()
        return self._counting(targets).reshape(samples, -1).sum(1).float().cpu()

    def worth(self, tally: Tally) -> float:
        """Return the weight of a tally: the sum of w_i."""
        if isinstance(tally, int | float):
            return float(tally)
        assert self.class_weights is not None
        return float((tally * self.class_weights.numpy()).sum())

    def weigh(self, samples: int, named_targets: Mapping[str, Tensor]) -> float:
        """Return the sum of w_i over some samples; arguments as for `tally`."""
        return self.worth(self.tally(samples, named_targets))

    def counts_all(self, named_targets: Mapping[str, Tensor]) -> bool:
        """Whether every target counts the same, so that samples of one shape have the same weight."""
        if self.void or self.class_weights is not None or self.over is Over.SUMMED:
            return False
        targets = self._choose(named_targets)
        if targets is None or self.over is Over.ELEMENTS or self._are_probabilities(targets):
            return True
        if self.ignore_index < 0 and self.nor is None and targets.numel():
            return int(targets.min()) >= 0  # classes are never negative, and the minimum takes one pass
        return bool(self._counting(targets).all())

    def counts_all_of_pair(self, batch: Sequence[Tensor]) -> bool:
        """Whether every target of an (inputs, targets) pair in host memory counts the same; runs no operator."""
        targets = batch[1] if len(batch) == _PAIR else None
        if targets is None or self.target is not None or self.nor is not None or self.class_weights is not None:
            return False
        if self.over is Over.ELEMENTS or (self.over is Over.COUNTED and targets.is_floating_point()):
            return True
        is_counted = self.over is Over.COUNTED and self.ignore_index < 0 and targets.device.type == "cpu"
        return is_counted and targets.numel() > 0 and bool(targets.numpy().min() >= 0)

    def _choose(self, named_targets: Mapping[str, Tensor]) -> Tensor | None:
        if self.target is not None:
            return named_targets.get(self.target)
        return next(iter(named_targets.values()), None)

    def _are_probabilities(self, targets: Tensor) -> bool:
        # Only for torch's own losses, which have a single target tensor. Named floating-point tensors are masks.
        return self.target is None and targets.is_floating_point()

    def _count_classes(self, targets: ClassCounts, classes: int) -> ClassCounts:
        if self.ignore_index < 0 and targets.size and targets.min() < 0:
            targets = targets[targets != self.ignore_index]
        counts: ClassCounts = np.bincount(targets, minlength=classes)
        if 0 <= self.ignore_index < len(counts):
            counts[self.ignore_index] = 0
        return counts

    def _counting(self, targets: Tensor) -> Tensor:
        targets = targets[..., 1:] if self.over is Over.SHIFTED else targets
        counts = targets != self.ignore_index
        return counts if self.nor is None else counts & (targets != self.nor)


def constants(named_targets: Mapping[str, Tensor]) -> frozenset[tuple[str, float]]:
    """Return the names of target tensors that hold a single value, with that value."""
    ranges = ((name, *spread(targets)) for name, targets in named_targets.items() if targets.numel())
    return frozenset((name, low) for name, low, high in ranges if low == high)


def spread(targets: Tensor) -> tuple[float, float]:
    """Return the minimum and maximum of some targets; synchronises with their device."""
    low, high = targets.aminmax()
    return low.item(), high.item()


def in_full(value: Tensor) -> Tensor:
    """Return a number in the highest precision that its device supports, for sums over many samples."""
    return value.float() if value.device.type == "mps" else value.double()


def shares(weighting: Weighting, tallies: Sequence[Tally], samples: int, total: float | None = None) -> list[float]:
    """Return the factor of each micro-batch's loss, so that their sum is the loss of the window.

    Args:
        weighting: The weighting of the loss.
        tallies: `Weighting.tally` of each micro-batch.
        samples: Samples in the window.
        total: The weight of the window that these micro-batches are a part of; if it is 0, nothing counts here. None:
            they are the whole window.

    Raises:
        InvalidInputError: Nothing counts in the whole window, so its mean does not exist.
    """
    if weighting.over is Over.SUM:
        return [1.0] * len(tallies)
    if total is not None:
        return [weighting.worth(tally) / total if total else 0.0 for tally in tallies]
    total = weighting.worth(sum(tallies))
    if weighting.over is Over.OPAQUE and total:
        # A guess anyway: all samples count, so that no factor depends on how the rest is cut.
        total = float(samples)
    if total == 0.0:
        raise InvalidInputError(
            f"{_why_nothing_counts(weighting, len(tallies))}, so the mean loss over it does not exist; leave such "
            "samples out"
        )
    if weighting.class_weights is None:
        return [tally / total for tally in tallies]  # type: ignore[misc]
    return [weighting.worth(tally) / total for tally in tallies]


def _why_nothing_counts(weighting: Weighting, micro_batches: int) -> str:
    where = f"this window of {micro_batches} micro-batches"
    if weighting.over is Over.WEIGHED:
        return f"split.weight(batch) is 0 for all of {where}"
    if weighting.over is Over.SUMMED:
        return f"what the loss is divided by is 0 for all of {where} ({weighting.description})"
    return f"no target of {where} counts (all are ignore_index={weighting.ignore_index} or of weight 0)"


# The divisor of `reduction="mean"` for torch's losses of (outputs, targets), according to their documentation.
_MEAN_OF_MODULE: dict[type[nn.Module], Over] = {
    nn.CrossEntropyLoss: Over.COUNTED,
    nn.NLLLoss: Over.COUNTED,
    nn.MSELoss: Over.ELEMENTS,
    nn.L1Loss: Over.ELEMENTS,
    nn.SmoothL1Loss: Over.ELEMENTS,
    nn.HuberLoss: Over.ELEMENTS,
    nn.BCELoss: Over.ELEMENTS,
    nn.BCEWithLogitsLoss: Over.ELEMENTS,
    nn.PoissonNLLLoss: Over.ELEMENTS,
    nn.SoftMarginLoss: Over.ELEMENTS,
    nn.KLDivLoss: Over.ELEMENTS,
    nn.HingeEmbeddingLoss: Over.ELEMENTS,
    nn.MultiLabelMarginLoss: Over.SAMPLES,
    nn.MultiMarginLoss: Over.SAMPLES,
    nn.MultiLabelSoftMarginLoss: Over.SAMPLES,
}

# Losses that compare outputs and targets element by element: torch would broadcast (N, 1) against (N,) to (N, N).
ELEMENTWISE = (
    *(kind for kind, over in _MEAN_OF_MODULE.items() if over is Over.ELEMENTS),
    nn.MultiLabelSoftMarginLoss,
)


def of_loss_module(loss: object) -> Weighting | None:
    """Read the weighting of a `torch.nn` loss from its attributes; None if it has to be inferred.

    Subclasses may compute anything, so only torch's own classes are read. For `reduction="none"` it is `Over.VECTOR`,
    and the returned value decides.
    """
    over = _MEAN_OF_MODULE.get(type(loss))  # type: ignore[arg-type]
    if over is None:
        return None
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "sum":
        return Weighting(Over.SUM)
    if reduction == "none":
        return Weighting(Over.VECTOR)
    if reduction == "batchmean":
        return Weighting(Over.SAMPLES)
    if over is not Over.COUNTED:
        return Weighting(over)
    weight = getattr(loss, "weight", None)
    return Weighting(
        over,
        ignore_index=int(getattr(loss, "ignore_index", IGNORE_INDEX)),
        class_weights=None if weight is None else weight.detach().to("cpu", torch.float64),
    )


def settings_of(loss: object) -> tuple[tuple[Any, ...] | None, Tensor | None]:
    """Return what decides `of_loss_module`'s answer, to be compared by value, and class weights, by identity."""
    if type(loss) not in _MEAN_OF_MODULE:
        return None, None
    weight = getattr(loss, "weight", None)
    version = None if weight is None else weight._version
    return (getattr(loss, "reduction", None), getattr(loss, "ignore_index", None), version), weight


def weight_of_pair(name: str, weight: Any) -> Tensor | float:
    """Check the second half of a (sum, weight) pair, as far as possible without synchronising with the device.

    Args:
        name: Name of the loss.
        weight: The value returned with the sum.

    Raises:
        InvalidInputError: It cannot be a weight: not a number, a bool, several numbers, or one with a gradient.
    """
    found = None
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            found = f"a tensor of shape {tuple(weight.shape)}"
        elif weight.requires_grad:
            found = "a tensor with a gradient"
        elif weight.dtype is torch.bool or weight.is_complex():
            found = f"a tensor of type {weight.dtype}"
    elif isinstance(weight, bool) or not hasattr(weight, "__float__"):
        found = f"a {type(weight).__name__}"
    if found is not None:
        raise InvalidInputError(f"loss {name!r} is a pair whose second half is {found}; {_PAIR_MEANS}")
    # A copy: a buffer of the loss may hold the next micro-batch's weight before this one is used.
    return weight.detach().clone().reshape(()) if isinstance(weight, Tensor) else float(weight)


def check_pair(name: str, whole: tuple[float, float], parts: Sequence[tuple[float, float]], tolerance: float) -> None:
    """Check that the pairs of two parts of a batch sum to the pair of the batch.

    Args:
        name: Name of the loss.
        whole: The pair of the batch.
        parts: The pairs of its parts.
        tolerance: The relative difference that rounding may cause.

    Raises:
        InvalidInputError: The weights do not add up, or the sums are means.
    """
    weight, added = whole[1], sum(part[1] for part in parts)
    if abs(weight - added) > tolerance * max(abs(weight), abs(added)):
        raise InvalidInputError(
            f"loss {name!r} is a pair whose second halves do not add up: {weight:g} for a batch and {added:g} for its "
            f"two parts together, as an accuracy or another mean would; {_PAIR_MEANS}"
        )
    as_sum, as_mean = sum(part[0] for part in parts), sum(part[0] * part[1] for part in parts) / (weight or math.nan)
    room = tolerance * max(abs(whole[0]), *(abs(part[0]) for part in parts))
    if abs(whole[0] - as_mean) <= room < abs(whole[0] - as_sum) and abs(as_mean - as_sum) > room:
        raise InvalidInputError(
            f"loss {name!r} is a pair whose first half is a mean ({whole[0]:g} for a batch, "
            f"{' and '.join(f'{part[0]:g}' for part in parts)} for its parts); {_PAIR_MEANS}"
        )


_PAIR_MEANS = (
    "a pair means (sum, weight): the sum of the losses and what to divide it by, such as ((loss * mask).sum(), "
    "mask.sum()). To report something else use metrics="
)
