"""The losses of torch: what their means run over, which needs no check; and what is taken where no loss is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from autoaccum._loss.batch_counts import ELEMENTS, LABELS, TARGETS
from autoaccum._loss.loss_values import TOTAL
from autoaccum._loss.summands import ADDED, BY_SAMPLES, Known, Reduction
from autoaccum.errors import InvalidInputError

# Losses of (outputs, targets) whose graph says what they are divided by. Subclasses may compute anything.
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, functional.cross_entropy, functional.nll_loss)
_OF_SAMPLES = (nn.MultiLabelMarginLoss, nn.MultiMarginLoss, nn.MultiLabelSoftMarginLoss)
# These compare outputs and targets element by element: torch would broadcast (N, 1) against (N,) to (N, N).
ELEMENTWISE = {
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
    *(nn.SoftMarginLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss, nn.MultiLabelSoftMarginLoss),
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
}
_OF_TORCH = {*_OF_CLASSES, *_OF_SAMPLES, *ELEMENTWISE}


def kind_of(loss: object) -> Any:
    """Return a loss of torch as the tables above have it: a class, or a function; None for any other loss."""
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    if isinstance(loss, nn.Module) and (loss._forward_hooks or loss._forward_pre_hooks or "forward" in vars(loss)):
        return None  # it may compute anything
    if getattr(loss, "_compiled_call_impl", None) is not None:
        return None  # its graph says nothing
    return kind if getattr(kind, "__hash__", None) is not None and kind in _OF_TORCH else None


def everything_counts(loss: object, targets: Tensor) -> bool:
    """Whether the mean of a loss runs over all targets, as can be seen without waiting for a device."""
    kind = kind_of(loss)
    if kind not in _OF_CLASSES:
        return kind is not None
    weight, ignored = getattr(loss, "weight", None), getattr(loss, "ignore_index", -100)
    if weight is not None or ignored >= 0 or targets.is_floating_point():
        return False
    return targets.is_cpu and targets.numel() > 0 and bool(targets.numpy().min() >= 0)


def of_torch(loss: object) -> Known | None:
    """Return how a loss of torch is put together; None for any other, and for one of each sample."""
    kind, reduction = kind_of(loss), getattr(loss, "reduction", "mean")
    if kind is None or reduction == "none":
        return None
    if reduction == "sum":
        return ADDED
    if reduction == "batchmean" or kind in _OF_SAMPLES:
        return BY_SAMPLES
    return Known(Reduction.MEAN, hints={(LABELS if kind in _OF_CLASSES else ELEMENTS, TARGETS): 1.0})


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
