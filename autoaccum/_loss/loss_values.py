"""What a loss may return for a micro-batch, as numbers with their weights, and which of its entries are trained on.

The rule for a mapping is the same for a model, a loss and one of several losses: an entry "loss" is the total, and the
others are reported under their names. Without it, entries with a graph are summed, and detached ones are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._system.notices import Notices

TOTAL = "loss"
# The relative difference of (sum, weight) pairs that rounding may cause.
_SAME_PAIR = 1e-3


@dataclass(slots=True)
class LossValue:
    """One loss of one micro-batch.

    Attributes:
        name: The name that it is reported under.
        value: Scalar tensor, with its graph.
        weight: What the loss states that its mean runs over: the second half of a pair, or the samples of a vector;
            None for a number.
        is_sum: Whether `value` has not been divided by `weight`, as in a pair.
        is_reported: Whether it is only reported and not minimised; then its value has no graph.
        may_be_nan: Whether a summand of it counts nothing, so that its value may be NaN where its gradient is not.
    """

    name: str
    value: Tensor
    weight: Tensor | float | None = None
    is_sum: bool = False
    is_reported: bool = False
    may_be_nan: bool = False


def loss_value(name: str, raw: Any, samples: int, *, summed: bool) -> LossValue:
    """Convert what a loss returned.

    Args:
        name: Name of the loss.
        raw: A scalar, a vector of per-sample losses or a (sum, weight) pair.
        samples: Samples in the micro-batch.
        summed: Whether a vector is summed instead of averaged.

    Raises:
        InvalidInputError: It is none of them, or has no gradient by its type.
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
        return LossValue(name, value.sum(), _weight_of_pair(name, raw[1]), is_sum=True)
    if value.dim() == 0:
        return LossValue(name, value)
    if value.dim() == 1 and value.shape[0] == samples:
        if not value.is_floating_point():
            raise InvalidInputError(
                f"loss {name!r} is {describe(value)} and type {value.dtype}, which has no gradient, as counts and "
                "comparisons have none; return a differentiable loss, and this one by name beside it to report it"
            )
        return LossValue(name, value.sum()) if summed else LossValue(name, value.mean(), float(samples))
    raise InvalidInputError(
        f"loss {name!r} has shape {tuple(value.shape)} for {samples} samples; return a scalar, a vector of {samples} "
        "per-sample losses, or a (sum, weight) pair, such as ((loss * mask).sum(), mask.sum())"
    )


def reported_value(name: str, raw: Any, samples: int, *, summed: bool) -> LossValue | None:
    """Return an entry that is only reported, without a graph; None if it is not numeric."""
    if isinstance(raw, int | float):
        return LossValue(name, torch.tensor(float(raw), dtype=torch.float64), is_reported=True)
    if isinstance(raw, Tensor):
        fits = raw.shape in ((), (samples,)) and not raw.is_complex()
        raw = raw.detach() if raw.is_floating_point() else raw.double()
    else:
        fits = is_pair(raw) and isinstance(raw[0], Tensor)
    if not fits:
        return None
    found = loss_value(name, raw, samples, summed=summed)
    found.value, found.is_reported = found.value.detach().clone(), True  # as of a weight, which may be a buffer
    return found


def is_pair(value: Any) -> bool:
    """Whether a batch is (inputs, targets), or a loss (sum, weight)."""
    return isinstance(value, tuple | list) and len(value) == len(("inputs", "targets"))


def in_full(value: Tensor) -> Tensor:
    """Return a number in the highest precision that its device supports, for sums over many samples."""
    return value.float() if value.device.type == "mps" else value.double()


def describe(value: Any) -> str:
    """Describe a value for a message."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _weight_of_pair(name: str, weight: Any) -> Tensor | float:
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


_PAIR_MEANS = (
    "a pair means (sum, weight): the sum of the losses and what to divide it by, such as ((loss * mask).sum(), "
    "mask.sum()). To report something else return both by names, as {'loss': loss, 'accuracy': accuracy}"
)


def check_weights(name: str, whole: float, *parts: float) -> None:
    """Reject a pair whose weights of parts do not add up to that of all samples."""
    if not math.isclose(whole, sum(parts), rel_tol=_SAME_PAIR):
        raise InvalidInputError(
            f"the weights of loss {name!r} do not add up: the second half of the pair is {whole:g} for a batch, and "
            f"{sum(parts):g} for its two parts together, as an accuracy, another mean or max(1, n) would; {_PAIR_MEANS}"
        )


def clamped_weight(name: str) -> InvalidInputError:
    """Return the error for a pair whose weights add up only where enough counts in every micro-batch."""
    return InvalidInputError(
        f"the weights of loss {name!r} do not add up: the second half of the pair is max(k, n), which is more than n "
        f"in a micro-batch in which less counts; return n itself, without the clamp; {_PAIR_MEANS}"
    )


def no_mean(
    name: str, whole: tuple[float, float], *parts: tuple[float, float], by_samples: bool
) -> InvalidInputError | None:
    """Return the error for a vector or a pair whose mean over samples is not that of two parts of them together.

    None if it is a loss that compares samples, in a pair that says to count it `by_samples`. The weights add up.
    """
    mean, weight = whole
    if math.isclose(
        mean * weight, sum(each * own**2 for each, own in parts) / (weight or math.nan), rel_tol=_SAME_PAIR
    ):
        return InvalidInputError(f"loss {name!r} is a pair whose first half is a mean; {_PAIR_MEANS}")
    if by_samples:
        return None
    return InvalidInputError(
        f"the sums of loss {name!r} do not add up: it gives samples other losses together than in two parts, as "
        "weights divided by their batch mean do. Return a (sum, weight) pair of what each sample adds; pass "
        "loss_scope='window' to fit, Runner or Accumulator if the loss compares samples; or loss_reduction='mean' to "
        "average micro-batches all the same"
    )


def not_finite(losses: Mapping[str, float]) -> InvalidInputError:
    """Return the error for losses that are not finite before anything was trained."""
    found = ", ".join(f"{name}={value}" for name, value in losses.items())
    return InvalidInputError(
        f"the loss is not finite from the start ({found}); look for NaN in the inputs, log(0) or a division by 0 in "
        "the loss, or too large initial weights"
    )


# --- entries of a mapping ---------------------------------------------------------------------------------------------


class Entries:
    """Tracks which names are losses and which are metrics.

    Args:
        notices: Reports, once, which entries are only reported.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._roles: dict[str, bool] = {}  # whether each name is a loss

    def needs_graphs(self, raw: Mapping[str, Any], total: str) -> bool:
        """Whether only graphs, which the caller has disabled, would tell the roles."""
        is_told = torch.is_grad_enabled() or len(raw) == 1 or raw.get(total) is not None
        return not is_told and not raw.keys() <= self._roles.keys()

    def added(self, raw: Mapping[str, Any], total: str) -> set[str]:
        """Return the names of the entries that sum to the loss."""
        if not raw:
            raise InvalidInputError(
                f"loss returned an empty mapping; return a scalar, or a mapping with an entry "
                f"{total!r} or with terms to add"
            )
        if raw.get(total) is not None:
            others = [name for name in raw if name != total]
            self._roles |= dict.fromkeys(others, False)
            # `objective` rejects entries that are not numbers.
            numbers = [name for name in others if not isinstance(raw[name], str | None)]
            self._say(numbers, f"the entry {total!r} is the total", key=f"parts of {total}")
            return {total}
        if len(raw) == 1:
            return set(raw)
        if with_graph := {name for name, value in raw.items() if _has_graph(value)}:
            # For good: a detection loss without a graph in a micro-batch without boxes is still a loss.
            self._roles.update(dict.fromkeys(with_graph, True))
            detached = [name for name in raw if name not in self._roles]
            self._roles |= dict.fromkeys(detached, False)
            self._say(detached, "it has no gradient", key=None)
        # Without any, all are returned, which raises an error later.
        return {name for name in raw if self._roles.get(name, True)} or set(raw)

    def _say(self, names: list[str], why: str, *, key: str | None) -> None:
        if names:
            listed = ("loss " if len(names) == 1 else "losses ") + ", ".join(map(repr, names))
            self._notices.say(f"{listed}: reported, not trained on, since {why}", key=key)


def _has_graph(value: Any) -> bool:
    """Whether a value, or anything in a container, has a graph: losses in a list must be rejected, not left out."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, Mapping):
        return any(map(_has_graph, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_graph, value))
