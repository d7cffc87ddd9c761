"""Fake results of a few operators, made at once: a fake operator's arguments in, its results without values out.

PyTorch's fakes go through the decompositions of these operators, tens of other operators for each new shape: without
that the first estimate of ResNet-101 for a card took 1.9 s in place of 2.6 (`benchmarks/estimate_speed.py`, 2 cores).
What comes out here has the same shapes, types and strides: `tests/estimate/test_quick_fakes.py` compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def batch_norm(args: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return normalised values and what of each channel is kept for backward; None where it is not for training."""
    source, training = args[0], args[5]
    if not training:
        return None
    # A card keeps halves' statistics in float32.
    kind = torch.float32 if source.dtype in _HALVES and source.device.type != "cpu" else source.dtype
    return torch.empty_like(source), *(source.new_empty(source.shape[1], dtype=kind) for _ in range(2))


def batch_norm_backward(args: Sequence[Any]) -> tuple[Tensor | None, ...] | None:
    """Return the gradients that are asked for; None where it was not for training."""
    source, weight, training, mask = args[1], args[2], args[7], args[9]
    if not training or weight is None:
        return None
    alike = (source, weight, weight)
    return tuple(torch.empty_like(one) if is_asked else None for one, is_asked in zip(alike, mask, strict=True))


_RULES: dict[Any, Callable[[Sequence[Any]], Any]] = {
    _aten.native_batch_norm.default: batch_norm,
    _aten.native_batch_norm_backward.default: batch_norm_backward,
}


def quick_fake(func: Any, args: Sequence[Any]) -> Any:
    """Return an operator's results; None where it has to be asked itself."""
    rule = _RULES.get(func)
    return None if rule is None else rule(args)
