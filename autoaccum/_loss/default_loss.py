"""The loss that is taken where none is given: the model's own, or one by the type of the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from autoaccum._loss.loss_entries import TOTAL
from autoaccum.errors import InvalidInputError


def own_loss(outputs: Any) -> Any:
    """Return the loss that the model itself computed; None if there is none."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.dim() == 0 else None
    if not isinstance(outputs, Mapping):
        return getattr(outputs, TOTAL, None)
    if outputs.get(TOTAL) is None:
        values = outputs.values()
        all_losses = bool(outputs) and all(isinstance(value, Tensor) and value.dim() == 0 for value in values)
        return outputs if all_losses else None
    # Besides a loss a model returns its outputs; scalars among them are parts of the loss or metrics.
    return {
        name: value
        for name, value in outputs.items()
        if name == TOTAL or (isinstance(value, Tensor) and value.dim() == 0)
    }


def by_default(outputs: Tensor, targets: Tensor) -> tuple[Callable[..., Any], Tensor]:
    """Return cross entropy for integer targets, mean squared error for floating-point ones: the function and its value.

    Logits are of shape (N, C, ...) or (N, ..., C), and classes of shape (N, ...).
    """
    if targets.is_floating_point() or targets.is_complex():
        check_same_shape(outputs, targets, "mean squared error")
        return functional.mse_loss, functional.mse_loss(outputs, targets)
    classes_second = _has_classes_second(outputs, targets)
    classes = outputs.shape[1 if classes_second else -1]
    if not (classes_second or has_classes_last(outputs, targets)) or classes == 1:
        raise InvalidInputError(
            f"no loss can be chosen for outputs of shape {tuple(outputs.shape)} and whole-number targets of shape "
            f"{tuple(targets.shape)}: cross entropy needs (N, C, ...) against (N, ...), with C classes of at least 2; "
            f"{_remedy(outputs, targets)}"
        )
    if not classes_second:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return functional.cross_entropy, functional.cross_entropy(outputs, targets.long())


def _remedy(outputs: Tensor, targets: Tensor) -> str:
    if targets.dim() == outputs.dim() and targets.shape[1:2] == (1,) and outputs.shape[1] > 1:
        return "pass targets.squeeze(1)"
    if targets.shape == outputs.shape and outputs.dim() > 1 and outputs.shape[1] > 1:
        return "pass targets.argmax(1) of one-hot targets, or loss=torch.nn.CrossEntropyLoss() and targets.float()"
    return "pass loss= (for one logit a sample, torch.nn.BCEWithLogitsLoss() and floating targets)"


def _has_classes_second(outputs: Tensor, targets: Tensor) -> bool:
    return outputs.dim() > 1 and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)


def has_classes_last(outputs: Any, targets: Any) -> bool:
    """Whether classes are in the last dimension, and not in the second as well: cross entropy takes no such outputs."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return False
    return outputs.dim() > 1 and outputs.shape[:-1] == targets.shape and not _has_classes_second(outputs, targets)


def check_same_shape(outputs: Any, targets: Any, what: str) -> None:
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.shape != targets.shape:
        raise InvalidInputError(
            f"{what} compares element by element, but the outputs have shape {tuple(outputs.shape)} and the targets "
            f"{tuple(targets.shape)}, which torch would broadcast against each other; give both the same shape "
            "(outputs.squeeze(-1) in the model, or targets.unsqueeze(-1) in the loader)"
        )
