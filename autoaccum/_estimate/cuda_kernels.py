"""Workspaces of kernels on a GPU: what one call of an operator allocates and frees beside its results.

One rule for each operator, which computes bytes from its arguments and cites the kernel's source (below
aten/src/ATen/native). Operators without a rule allocate little, or not at the peak: docs/dev/estimates.md says what
each rule is worth.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    # The bytes of each part.
    Workspace = tuple[int, ...]

_aten = torch.ops.aten
_FLOAT = 4
# Sides of Winograd's tiles: the filter, the results, and the transformed values.
_FILTER, _RESULTS, _TRANSFORMED = 3, 4, 6


def workspace(func: Any, args: Sequence[Any], result: Any, *, tensor_float: bool = True) -> Workspace:
    """Return the parts of an operator's workspace; empty if there is no rule.

    Args:
        func: The operator.
        args: Its arguments.
        result: Its result.
        tensor_float: Whether the GPU computes float32 with Tensor Cores.
    """
    if func in _CONVOLUTIONS:
        return () if tensor_float and _allows_tensor_float() else _CONVOLUTIONS[func](args, result)
    return softmax_backward(args) if func is _aten._softmax_backward_data.default else ()


def softmax_backward(args: Sequence[Any]) -> Workspace:
    """The product of gradient and result (softmax_backward_cuda_out, cuda/SoftMax.cu).

    It has the gradient's layout; if that is not contiguous, neither is the product, and it is copied.
    """
    gradient, made = args[0], args[1]
    product = made.numel() * torch.promote_types(gradient.dtype, made.dtype).itemsize
    return (product,) if gradient.is_contiguous() or (gradient * made).is_contiguous() else (product, product)


def convolution(args: Sequence[Any], result: Tensor) -> Workspace:
    """Winograd's algorithm, not fused, which cuDNN uses for filters of 3 x 3 in float32 without Tensor Cores.

    Source, filter and result are transformed as a whole, in tiles of 4 x 4 results and 6 x 6 values (A. Lavin and S.
    Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv 1509.09308). cuDNN documents no sizes; with these,
    published trainings of PSPNet and UPerNet on V100s are predicted within 0.5% in the median (docs/dev/estimates.md).
    """
    source, weight, _, stride, _, dilation, transposed, _, groups = args[:9]
    if (
        source.dtype is not torch.float32
        or tuple(weight.shape[2:]) != (_FILTER, _FILTER)
        or any(step != 1 for step in (*stride, *dilation))
        or transposed
        or groups != 1
        or runs_channels_last(source, weight)
        or not torch.backends.cudnn.enabled
    ):
        return ()
    n, outputs, *sides = result.shape
    tiles = n * math.prod(math.ceil(side / _RESULTS) for side in sides)
    inputs, each_bytes = source.shape[1], _TRANSFORMED**2 * _FLOAT
    return (each_bytes * (inputs + outputs) * tiles, each_bytes * inputs * outputs)


def convolution_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """The same for each gradient, one after the other; the result of the forward pass is the gradient here."""
    gradient, source, weight, _, *settings = args
    return convolution((source, weight, None, *settings), gradient)


def runs_channels_last(source: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch calls cuDNN with channels last, as it does if the source or the weight is."""
    last = LAST.get(source.dim())
    return last is not None and any(
        tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous() for tensor in (source, weight)
    )


def _allows_tensor_float() -> bool:
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # convolutions have a setting of their own
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS: dict[Any, Callable[[Sequence[Any], Any], Workspace]] = {
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
}
