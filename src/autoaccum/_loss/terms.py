"""One loss of one micro-batch, as an objective gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from autoaccum._loss.weighting import Over


@dataclass(slots=True)
class Term:
    """One loss of one micro-batch.

    Attributes:
        name: What it is reported as.
        value: Scalar tensor, with its graph: a mean or a sum over the micro-batch.
        over: `Over.VECTOR` or `Over.PAIR` where the form itself says what it is, else None.
        weight: Of a (sum, weight) pair, its weight.
        is_reported: Whether it is no part of what is minimised; then its value has no graph.
    """

    name: str
    value: Tensor
    over: Over | None = None
    weight: Tensor | float | None = None
    is_reported: bool = False
