"""Converts the return value of a loss to terms: scalars with their graphs and, for some forms, their own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._loss.weighting import Over, weight_of_pair
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class Term:
    """One loss of one micro-batch.

    Attributes:
        name: The name that it is reported under.
        value: Scalar tensor, with its graph: a mean or a sum over the micro-batch.
        over: `Over.VECTOR` or `Over.PAIR` if it has that form, else None.
        weight: The weight of a (sum, weight) pair.
        has_nothing: Whether a part of it counts nothing, so that its value may be NaN where its gradient is not.
        is_reported: Whether it is only reported and not minimised; then its value has no graph.
    """

    name: str
    value: Tensor
    over: Over | None = None
    weight: Tensor | float | None = None
    is_reported: bool = False
    has_nothing: bool = False


def not_finite(losses: Mapping[str, float]) -> InvalidInputError:
    """Return the error for losses that are not finite before anything was trained."""
    found = ", ".join(f"{name}={value}" for name, value in losses.items())
    return InvalidInputError(
        f"the loss is not finite from the start ({found}); look for NaN in the inputs, log(0) or a division by 0 in "
        "the loss, or too large initial weights"
    )


def is_pair(value: Any) -> bool:
    """Whether a batch is (inputs, targets), or a loss (sum, weight)."""
    return isinstance(value, tuple | list) and len(value) == len(("inputs", "targets"))


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


def term_of(name: str, raw: Any, samples: int, *, summed: bool) -> Term:
    """Convert the value of a loss to a term.

    Args:
        name: Name of the loss.
        raw: A scalar, a vector of per-sample losses or a (sum, weight) pair.
        samples: Samples in the micro-batch.
        summed: Whether a vector is summed instead of averaged.

    Raises:
        InvalidInputError: It is none of these.
    """
    if isinstance(raw, Tensor):
        if raw.dim() == 0:
            return Term(name, raw)
        if raw.dim() == 1 and raw.shape[0] == samples:
            if not (raw.is_floating_point() or raw.is_complex()):
                raise InvalidInputError(
                    f"loss {name!r} is {describe(raw)} and type {raw.dtype}, which has no gradient, as counts and "
                    "comparisons have none; return a differentiable loss, and report this one by metrics="
                )
            return Term(name, raw.sum()) if summed else Term(name, raw.mean(), Over.VECTOR)
        raise InvalidInputError(
            f"loss {name!r} has shape {tuple(raw.shape)} for {samples} samples; return a scalar, a vector of {samples} "
            "per-sample losses, or a (sum, weight) pair, such as ((loss * mask).sum(), mask.sum())"
        )
    if is_pair(raw) and isinstance(raw[0], Tensor):
        total, weight = raw
        return Term(name, total.sum(), Over.PAIR, weight_of_pair(name, weight))
    raise InvalidInputError(
        f"loss {name!r} is {describe(raw)}; return a scalar tensor, a vector of per-sample losses, or a (sum, weight) "
        "pair, with its graph (no .item(), .detach() or float())"
    )


def describe(value: Any) -> str:
    """Describe a value for a message."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
