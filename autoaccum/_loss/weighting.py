"""What is known of losses without running them: those of `torch.nn`, and (sum, weight) pairs."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._loss.loss_check import Form, TermForm
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Over(Enum):
    """The form of a loss that says itself how it weighs samples."""

    VECTOR = "one loss for each sample"
    PAIR = "a (sum, weight) pair"


def in_full(value: Tensor) -> Tensor:
    """Return a number in the highest precision that its device supports, for sums over many samples."""
    return value.float() if value.device.type == "mps" else value.double()


# Losses of torch of (outputs, targets) whose graph says what they are divided by. Subclasses may compute anything.
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_OF_SAMPLES = (nn.MultiLabelMarginLoss, nn.MultiMarginLoss, nn.MultiLabelSoftMarginLoss)
# These compare outputs and targets element by element: torch would broadcast (N, 1) against (N,) to (N, N).
ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
    *(nn.SoftMarginLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss, nn.MultiLabelSoftMarginLoss),
)
_OF_TORCH = {*_OF_CLASSES, *_OF_SAMPLES, *ELEMENTWISE}


def is_of_torch(loss: object) -> bool:
    """Whether a loss is one of torch's own of (outputs, targets)."""
    return type(loss) in _OF_TORCH


def of_loss_module(loss: object) -> TermForm | None:
    """Return the form of a loss of `torch.nn` that needs no check; None for any other, and for one of each sample."""
    if not is_of_torch(loss):
        return None
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "none":
        return None
    if reduction == "sum":
        return TermForm(Form.SUM)
    of_samples = reduction == "batchmean" or type(loss) in _OF_SAMPLES
    return TermForm(Form.MEAN, per_sample=1.0 if of_samples else None)


def everything_counts(loss: object, batch: Any) -> bool:
    """Whether the mean of a loss runs over all targets of a pair, as can be seen without waiting for a device.

    Args:
        loss: The loss, with the reduction of a mean.
        batch: Tensors, which may be no pair.
    """
    kind = type(loss)
    if kind in _OF_CLASSES:
        targets = batch[-1]
        if loss.weight is not None or loss.ignore_index >= 0 or targets.is_floating_point():  # type: ignore[attr-defined]
            return False
        return targets.is_cpu and bool(targets.numpy().min() >= 0)
    return kind in _OF_TORCH and len(batch) == len(("inputs", "targets"))


def settings_of(loss: object) -> tuple[Any, ...] | None:
    """Return what decides `of_loss_module`'s answer."""
    return (getattr(loss, "reduction", None),) if is_of_torch(loss) else None


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
