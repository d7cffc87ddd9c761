"""What a micro-batch weighs in the loss of its window. Pure: targets in, plain numbers out, no model is called.

A loss that is a mean over a window is `sum_i w_i l_i / sum_i w_i`: over samples every w_i is 1, over tokens it is
whether the token counts, with class weights it is the weight of its class. The mean over one micro-batch has the same
form with its own samples, so the window's loss is the mean of the micro-batches' losses, each weighted by its own sum
of w_i. A loss that is a sum needs no weights: its micro-batches are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IGNORE_INDEX = -100  # the default of torch.nn.CrossEntropyLoss and of every Transformers model


class Over(Enum):
    """What a loss runs over."""

    SUM = "a sum over the samples"
    SAMPLES = "a mean over the samples"
    ELEMENTS = "a mean over the elements of the targets"
    COUNTED = "a mean over the targets that count"
    SHIFTED = "a mean over the targets that count, shifted by one"
    VECTOR = "one loss a sample, averaged over the samples"
    PAIR = "a (sum, weight) pair"


@dataclass(frozen=True, eq=False)
class Weighting:
    """How a loss weighs its samples.

    Attributes:
        over: What it runs over.
        ignore_index: Targets with this value do not count.
        class_weights: Weight of each class, shape (C,), on the CPU; None where all weigh 1.
        target: Which of the batch's target tensors counts, by its name in the batch; None means the only one.
    """

    over: Over
    ignore_index: int = IGNORE_INDEX
    class_weights: Tensor | None = None
    target: str | None = None

    @property
    def needs_targets(self) -> bool:
        """Whether the weight depends on what the targets are, and not on how many samples there are."""
        return self.over in (Over.ELEMENTS, Over.COUNTED, Over.SHIFTED)

    def weigh(self, samples: int, named_targets: Mapping[str, Tensor]) -> float:
        """Return the sum of w_i over one micro-batch.

        Args:
            samples: Its number of samples.
            named_targets: Its target tensors by name, first dimension N; only looked at where `needs_targets`. Waits
                for the device where they are on one.
        """
        targets = self._choose(named_targets) if self.needs_targets else None
        if targets is None:
            return float(samples)
        if self.over is Over.ELEMENTS:
            return float(targets.numel())
        if targets.is_floating_point():
            # Class probabilities of shape (N, C, ...): torch's mean runs over everything but the classes.
            return float(targets.numel() // targets.shape[1]) if targets.dim() > 1 else 1.0
        if self.over is Over.SHIFTED:
            targets = targets[..., 1:]
        counts = targets != self.ignore_index
        if self.class_weights is None:
            return float(counts.sum().item())
        return float(self.class_weights[targets[counts].cpu().long()].sum(dtype=torch.float64).item())

    def counts_all(self, named_targets: Mapping[str, Tensor]) -> bool:
        """Whether every target counts the same, so that samples of one shape weigh the same."""
        targets = self._choose(named_targets)
        if targets is None or self.over is Over.ELEMENTS or targets.is_floating_point():
            return True
        if self.class_weights is not None:
            return False
        if self.ignore_index < 0 and targets.numel():
            return int(targets.min()) >= 0  # a class is never negative, and the least is found in one pass
        return not bool((targets == self.ignore_index).any())

    def _choose(self, named_targets: Mapping[str, Tensor]) -> Tensor | None:
        if self.target is not None:
            return named_targets.get(self.target)
        return next(iter(named_targets.values()), None)


def in_full(value: Tensor) -> Tensor:
    """Return a number in the highest precision that its device has, for sums over many samples."""
    return value.float() if value.device.type == "mps" else value.double()


def shares(weighting: Weighting, weights: Sequence[float]) -> list[float]:
    """Return the factor of each micro-batch's loss, so that their sum is the loss of the window.

    Args:
        weighting: How the loss weighs its samples.
        weights: `Weighting.weigh` of each micro-batch.

    Raises:
        InvalidInputError: Nothing counts in the whole window, so that its mean does not exist.
    """
    if weighting.over is Over.SUM:
        return [1.0] * len(weights)
    total = sum(weights)
    if total == 0.0:
        raise InvalidInputError(
            f"no target of this window of {len(weights)} micro-batches counts (all are ignore_index="
            f"{weighting.ignore_index} or of weight 0), so the mean loss over it does not exist; leave such samples out"
        )
    return [weight / total for weight in weights]


# What `reduction="mean"` of torch's losses of (outputs, targets) divides by, as their documentation says.
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
    """Read the weighting of a `torch.nn` loss from its attributes; None where it has to be found out otherwise.

    Subclasses may compute what they like, so only torch's own classes are read. `reduction="none"` is answered with
    `Over.VECTOR`: what comes out decides.
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


# --- finding out what a loss runs over -------------------------------------------------------------------------------


def candidates(named_targets: Mapping[str, Tensor]) -> list[Weighting]:
    """Return what a loss of unknown make may run over, given a batch's target tensors."""
    found = [Weighting(Over.SUM), Weighting(Over.SAMPLES)]
    for name, targets in named_targets.items():
        if targets.is_floating_point() or targets.dtype is torch.bool:
            continue
        found.append(Weighting(Over.COUNTED, target=name))
        if targets.dim() > 1:
            found.append(Weighting(Over.SHIFTED, target=name))
    return found


def misfit(weighting: Weighting, whole: float, parts: Sequence[float], weights: Sequence[float]) -> float:
    """Return how far the loss of a batch is from what its parts' losses give in this way, relative to its size.

    Args:
        weighting: The candidate.
        whole: Loss of the whole batch.
        parts: Losses of its parts; that of a part in which nothing counts may be NaN.
        weights: `Weighting.weigh` of the parts.
    """
    if not any(weights):
        return math.inf
    counting = zip(shares(weighting, weights), parts, strict=True)
    rebuilt = sum(share * part for share, part in counting if share != 0.0)
    scale = max(abs(whole), abs(rebuilt))
    off = abs(rebuilt - whole)
    return off / scale if off > 0.0 else 0.0 if off == 0.0 else math.inf
