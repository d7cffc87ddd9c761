"""Sums the cross entropy of a linear layer's logits by a library's kernel, which holds a few tokens' logits at a time.

Liger's kernel on a CUDA card where it is installed, else PyTorch's `linear_cross_entropy` (from 2.15 on). Both compute
gradients in the forward pass already, so logits are computed once and not twice. They are left alone

- on the CPU, where PyTorch's takes about as long as chunks (`benchmarks/chunked_loss.py`);
- in float16, since those gradients come before the loss is scaled, and vanish;
- PyTorch's in bfloat16, in which it would return the loss, with three digits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    # (hidden states (N, D), weight (V, D), bias (V,) or None, classes (N,), class to ignore) -> sum over the others.
    Kernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, int], Tensor]


def sum_of_losses(
    weight: Tensor, bias: Tensor | None, hidden: Tensor, classes: Tensor, ignore_index: int, dtype: torch.dtype
) -> Tensor | None:
    """Return the sum of the cross entropies of a layer's logits in float32; None where no kernel is for it.

    Args:
        weight: The weight of the layer that makes the logits, shape (V, D).
        bias: Its bias, shape (V,); None if it has none.
        hidden: Its inputs, shape (N, D).
        classes: The class of each token, shape (N,).
        ignore_index: The class whose tokens do not count.
        dtype: What the logits are computed in.
    """
    kernel = kernel_for(hidden.device.type, dtype)
    if kernel is None:
        return None
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if bias is None else bias.to(dtype)
        return kernel(hidden.to(dtype), weight.to(dtype), bias, classes, ignore_index)


def kernel_for(device: str, dtype: torch.dtype) -> Kernel | None:
    """Return the kernel for a kind of device and the type of logits; None if there is none better than chunks."""
    if device == "cuda" and dtype in (torch.float32, torch.bfloat16) and _of_liger() is not None:
        return by_liger
    is_for_torch = device != "cpu" and dtype is torch.float32
    return by_torch if is_for_torch and hasattr(functional, "linear_cross_entropy") else None


def by_torch(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor, ignore_index: int) -> Tensor:
    """Return the sum by PyTorch's kernel; without options, it would hold all logits."""
    summed: Tensor = functional.linear_cross_entropy(
        hidden,
        weight,
        classes,
        linear_bias=bias,
        reduction="sum",
        ignore_index=ignore_index,
        options=nn.LinearCrossEntropyOptions(acc_policy="accurate"),
    )
    return summed


def by_liger(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor, ignore_index: int) -> Tensor:
    """Return the sum by Liger's kernel, with the weight's gradient added up in float32."""
    function = _of_liger()
    assert function is not None
    summed: Tensor = function(
        hidden, weight, classes, bias, ignore_index=ignore_index, reduction="sum", accum_dtype=torch.float32
    )
    return summed


@functools.cache
def _of_liger() -> Callable[..., Any] | None:
    """Return Liger's function; None where it is not installed, or does not run with what is."""
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # noqa: PLC0415 - optional
    except (ImportError, AttributeError, RuntimeError):
        return None
    found: Callable[..., Any] = liger_fused_linear_cross_entropy
    return found
