"""What a loss may return, as terms, and how each is put together from micro-batches, as far as that is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autoaccum._loss.batch_counts import ELEMENTS, LABELS, SAMPLES, TARGETS
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autoaccum._data.nesting import Path
    from autoaccum._loss.batch_counts import Count


class Form(Enum):
    """How the losses of micro-batches make the loss of the window."""

    MEAN = "a mean"
    SUM = "a sum"
    CONSTANT = "the same for all samples"
    UNCONFIRMED = "not confirmed"
    VECTOR = "one loss for each sample"
    PAIR = "a (sum, weight) pair"


@dataclass(frozen=True, slots=True)
class TermForm:
    """How a term of a loss is put together from micro-batches.

    Attributes:
        form: The form; constants and what is not confirmed are weighted by samples.
        is_read: Whether the graph says what it is divided by.
        is_counted: Whether each graph of a check had a count or a divisor, so that one without is another function.
        per_sample: What it is divided by, for each sample; None if that is not known.
        shares: What the parts were divided by, relative to the whole: those of terms with one divisor are the same.
        counts: Counts of the batch that are proportional to what it is divided by, and what it is for each.
        varying: Those of them for which it was something else in another check.
        least: The least that a part was divided by, of those in which something counts.
        may_be_clamped: Whether a divisor that is 1 would be news.
        is_clamped: Whether it was 1 where nothing counts.
        is_guess: Whether the graph suggests it, and no check has compared parts in which something counts.
        number: Of a sum: where the batch carries the number that it is divided by; None if it is no such number.
    """

    form: Form
    is_read: bool = True
    is_counted: bool = False
    per_sample: float | None = None
    shares: tuple[float, ...] = ()
    counts: Mapping[Count, float] = field(default_factory=dict)
    varying: frozenset[Count] = frozenset()
    least: float = math.inf
    may_be_clamped: bool = False
    is_clamped: bool = False
    is_guess: bool = False
    number: Path | None = None

    @property
    def kind(self) -> tuple[Form, bool]:
        """What must be the same in all windows, and on all ranks."""
        return self.form, self.is_read

    @property
    def is_of_nothing(self) -> bool:
        """Whether it is a guess by samples in which nothing counts, or by a graph without a divisor."""
        return self.is_guess and not self.per_sample


@dataclass(slots=True)
class Term:
    """One loss of one micro-batch.

    Attributes:
        name: The name that it is reported under.
        value: Scalar tensor, with its graph: a mean or a sum over the micro-batch.
        over: `Form.VECTOR` or `Form.PAIR` if it has that form, else None.
        weight: The weight of a (sum, weight) pair.
        has_nothing: Whether a part of it counts nothing, so that its value may be NaN where its gradient is not.
        is_reported: Whether it is only reported and not minimised; then its value has no graph.
    """

    name: str
    value: Tensor
    over: Form | None = None
    weight: Tensor | float | None = None
    is_reported: bool = False
    has_nothing: bool = False


# --- what a loss returns ----------------------------------------------------------------------------------------------


def term_of(name: str, raw: Any, samples: int, *, summed: bool) -> Term:
    """Convert the value of a loss to a term.

    Args:
        name: Name of the loss.
        raw: A scalar, a vector of per-sample losses or a (sum, weight) pair.
        samples: Samples in the micro-batch.
        summed: Whether a vector is summed instead of averaged.
    """
    value = raw if isinstance(raw, Tensor) else raw[0] if is_pair(raw) else None
    if not isinstance(value, Tensor):
        raise InvalidInputError(
            f"loss {name!r} is {describe(raw)}; return a scalar tensor, a vector of per-sample losses, or a (sum, "
            "weight) pair, with its graph (no .item(), .detach() or float())"
        )
    if value.dtype.is_complex:
        raise InvalidInputError(
            f"loss {name!r} is a complex number (type {value.dtype}), which cannot be minimised; return a real one, "
            "such as loss.real or loss.abs()"
        )
    if value is not raw:
        return Term(name, value.sum(), Form.PAIR, weight_of_pair(name, raw[1]))
    if value.dim() == 0:
        return Term(name, value)
    if value.dim() == 1 and value.shape[0] == samples:
        if not value.is_floating_point():
            raise InvalidInputError(
                f"loss {name!r} is {describe(value)} and type {value.dtype}, which has no gradient, as counts and "
                "comparisons have none; return a differentiable loss, and this one by name beside it to report it"
            )
        return Term(name, value.sum()) if summed else Term(name, value.mean(), Form.VECTOR)
    raise InvalidInputError(
        f"loss {name!r} has shape {tuple(value.shape)} for {samples} samples; return a scalar, a vector of {samples} "
        "per-sample losses, or a (sum, weight) pair, such as ((loss * mask).sum(), mask.sum())"
    )


def reported_term(name: str, raw: Any, samples: int, *, summed: bool) -> Term | None:
    """Return an entry that is only reported, without a graph; None if it is not numeric."""
    if isinstance(raw, int | float):
        return Term(name, torch.tensor(float(raw), dtype=torch.float64), is_reported=True)
    if isinstance(raw, Tensor):
        fits = raw.shape in ((), (samples,)) and not raw.is_complex()
        raw = raw.detach() if raw.is_floating_point() else raw.double()
    else:
        fits = is_pair(raw) and isinstance(raw[0], Tensor)
    if not fits:
        return None
    term = term_of(name, raw, samples, summed=summed)
    term.value, term.is_reported = term.value.detach().clone(), True  # as of a weight, which may be a buffer
    return term


def is_pair(value: Any) -> bool:
    """Whether a batch is (inputs, targets), or a loss (sum, weight)."""
    return isinstance(value, tuple | list) and len(value) == len(("inputs", "targets"))


def in_full(value: Tensor) -> Tensor:
    """Return a number in the highest precision that its device supports, for sums over many samples."""
    return value.float() if value.device.type == "mps" else value.double()


def describe(value: Any) -> str:
    """Describe a value for a message."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def not_finite(losses: Mapping[str, float]) -> InvalidInputError:
    """Return the error for losses that are not finite before anything was trained."""
    found = ", ".join(f"{name}={value}" for name, value in losses.items())
    return InvalidInputError(
        f"the loss is not finite from the start ({found}); look for NaN in the inputs, log(0) or a division by 0 in "
        "the loss, or too large initial weights"
    )


# --- losses of torch --------------------------------------------------------------------------------------------------

# The relative difference of (sum, weight) pairs that rounding may cause.
_SAME_PAIR = 1e-3
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


def everything_counts(loss: object, batch: Any) -> bool:
    """Whether the mean of a loss runs over all targets of a pair, as can be seen without waiting for a device."""
    kind = kind_of(loss)
    if kind in _OF_CLASSES:
        targets = batch[-1]
        weight, ignored = getattr(loss, "weight", None), getattr(loss, "ignore_index", -100)
        if weight is not None or ignored >= 0 or targets.is_floating_point():
            return False
        return targets.is_cpu and targets.numel() > 0 and bool(targets.numpy().min() >= 0)
    return kind is not None and len(batch) == len(("inputs", "targets"))


def of_torch(loss: object) -> TermForm | None:
    """Return the form of a loss of torch, which needs no check; None for any other, and for one of each sample."""
    kind, reduction = kind_of(loss), getattr(loss, "reduction", "mean")
    if kind is None or reduction == "none":
        return None
    if reduction == "sum":
        return TermForm(Form.SUM)
    if reduction == "batchmean" or kind in _OF_SAMPLES:
        return TermForm(Form.MEAN, per_sample=1.0, counts={SAMPLES: 1.0})
    return TermForm(Form.MEAN, counts={(LABELS if kind in _OF_CLASSES else ELEMENTS, TARGETS): 1.0})


# --- pairs ------------------------------------------------------------------------------------------------------------


def weight_of_pair(name: str, weight: Any) -> Tensor | float:
    """Check the second half of a (sum, weight) pair, as far as possible without synchronising with the device."""
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


def no_mean(name: str, whole: tuple[float, float], *parts: tuple[float, float]) -> InvalidInputError:
    """Return the error for a vector or a pair whose mean over samples is not that of two parts of them together."""
    (mean, weight), added = whole, sum(part[1] for part in parts)
    if not math.isclose(weight, added, rel_tol=_SAME_PAIR):
        return InvalidInputError(
            f"loss {name!r} is a pair whose second halves do not add up: {weight:g} for a batch, and {added:g} for its "
            f"two parts together, as an accuracy or another mean would; {_PAIR_MEANS}"
        )
    if math.isclose(
        mean * weight, sum(each * own**2 for each, own in parts) / (weight or math.nan), rel_tol=_SAME_PAIR
    ):
        return InvalidInputError(f"loss {name!r} is a pair whose first half is a mean; {_PAIR_MEANS}")
    return InvalidInputError(
        f"loss {name!r} gives samples other losses together than in two parts, as weights divided by their batch mean "
        "do: micro-batches do not give the gradient of the whole batch. Return a (sum, weight) pair of "
        "what each sample adds; pass loss_scope='window' to fit, Runner or Accumulator if the loss compares samples; "
        "or loss_reduction='mean' to average micro-batches all the same"
    )


_PAIR_MEANS = (
    "a pair means (sum, weight): the sum of the losses and what to divide it by, such as ((loss * mask).sum(), "
    "mask.sum()). To report something else return both by names, as {'loss': loss, 'accuracy': accuracy}"
)
