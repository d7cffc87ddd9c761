"""The losses of torch: what their means run over, which needs no check."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional

from autoaccum._loss.batch_counts import ELEMENTS, LABELS, TARGETS
from autoaccum._loss.summands import ADDED, BY_SAMPLES, Known, Reduction

# Losses of (outputs, targets) whose graph says what they are divided by. Subclasses may compute anything.
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, functional.cross_entropy, functional.nll_loss)
_OF_SAMPLES = (nn.MultiLabelMarginLoss, nn.MultiMarginLoss, nn.MultiLabelSoftMarginLoss)
# These compare outputs and targets element by element: torch would broadcast (N, 1) against (N,) to (N, N).
ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
    *(nn.SoftMarginLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss, nn.MultiLabelSoftMarginLoss),
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
)
_OF_TORCH = {*_OF_CLASSES, *_OF_SAMPLES, *ELEMENTWISE}


def kind_of(loss: object) -> Any:
    """Return a loss of torch as the tables above have it: a class, or a function; None for any other loss."""
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    if isinstance(loss, nn.Module) and (loss._forward_hooks or loss._forward_pre_hooks or "forward" in vars(loss)):
        return None  # it may compute anything
    if getattr(loss, "_compiled_call_impl", None) is not None:
        return None  # its graph says nothing
    return kind if getattr(kind, "__hash__", None) is not None and kind in _OF_TORCH else None


def everything_counts(loss: object) -> bool:
    """Whether the mean of a loss runs over all targets, whatever they are."""
    kind = kind_of(loss)
    return kind is not None and kind not in _OF_CLASSES


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
