"""Workspaces of PyTorch's own CUDA kernels: one rule for each operator, which computes bytes from its arguments.

Each rule cites the kernel's source (below aten/src/ATen/native). Operators without a rule allocate little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autoaccum._estimate.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
# Lengths are rounded up to it, by flash attention's backward pass and the efficient kernel's log-sum-exp.
_FLASH_ROWS = 128
_LANES = 32
_FLOAT = 4
# With at most this many indices, an embedding's gradient is summed without sorting them.
_UNSORTED_INDICES = 3072
# Rows of a sorted embedding gradient that one thread sums.
_ROWS = 10


def flash_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """Row sums, the query's gradient in float32, and shared keys' and values' per head (mha_bwd, flash_api.cpp)."""
    query, key = args[1], args[2]
    n, heads, length, head = query.shape
    rows = -(-length // _FLASH_ROWS) * _FLASH_ROWS
    multiple = _LANES if head <= _FLASH_ROWS else 2 * _LANES
    width = -(-head // multiple) * multiple
    shared = 2 * [n * key.shape[2] * heads * head * key.element_size()] if key.shape[1] != heads else []
    return Workspace(beside=(n * heads * rows * _FLOAT, n * heads * rows * width * _FLOAT, *shared))


def efficient_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """Row sums; for half-precision gradients also sums in float32 (attention_backward.cu)."""
    query, key = args[1], args[2]
    n, heads, length, head = query.shape
    rows = -(-length // _LANES) * _LANES
    sums = n * heads * (length + 2 * key.shape[2]) * head * _FLOAT if query.dtype in _HALVES else 0
    return Workspace(beside=(n * heads * rows * _FLOAT, sums))


def softmax(args: Sequence[Any], _result: Any) -> Workspace:
    """A copy of a source that is not contiguous (host_softmax, cuda/SoftMax.cu); log_softmax is the same."""
    return Workspace(beside=_copied(args[0]))


def softmax_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """The product of gradient and result (softmax_backward_cuda_out, cuda/SoftMax.cu), and copies of other layouts."""
    gradient, made = args[0], args[1]
    product = made.numel() * torch.promote_types(gradient.dtype, made.dtype).itemsize
    # It has the gradient's layout, so it need not be computed if that is contiguous.
    again = () if gradient.is_contiguous() or (gradient * made).is_contiguous() else (product,)
    return Workspace(beside=(product, *again, *_copied(made)))


def log_softmax_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """Copies of arguments that are not contiguous (host_softmax_backward, cuda/SoftMax.cu)."""
    return Workspace(beside=_copied(args[0], args[1]))


def layer_norm(args: Sequence[Any], _result: Any) -> Workspace:
    """A copy of a source that is not contiguous (layer_norm_cuda, cuda/layer_norm_kernel.cu)."""
    return Workspace(beside=_copied(args[0]))


def layer_norm_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """A copy of a source that is not contiguous (layer_norm_backward_cuda, cuda/layer_norm_kernel.cu)."""
    return Workspace(beside=_copied(args[1]))


def embedding_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """Sorted indices, and partial sums in float32: a row for each ten indices, and one for each distinct index.

    The number of distinct indices is unknown; the kernel allocates for the maximum (cuda/Embedding.cu,
    cuda/EmbeddingBackwardKernel.cu).
    """
    gradient, indices, rows, _, is_scaled_by_frequency = args
    copied = _copied(gradient)
    count = indices.numel()
    if count <= _UNSORTED_INDICES and not is_scaled_by_frequency:
        return Workspace(beside=copied)
    met = min(count, rows)
    parts = count // _ROWS + met
    kind = torch.float32 if gradient.dtype in _HALVES else gradient.dtype
    numbers = (3 * count + 2 * met + parts) * indices.element_size()
    return Workspace(beside=(*copied, numbers, parts * gradient.shape[-1] * kind.itemsize))


def _copied(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.numel() * tensor.element_size() for tensor in tensors if not tensor.is_contiguous())


RULES: dict[Any, Callable[[Sequence[Any], Any], Workspace | None]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    _aten._softmax.default: softmax,
    _aten._softmax_backward_data.default: softmax_backward,
    _aten._log_softmax.default: softmax,
    _aten._log_softmax_backward_data.default: log_softmax_backward,
    _aten.native_layer_norm.default: layer_norm,
    _aten.native_layer_norm_backward.default: layer_norm_backward,
    _aten.embedding_dense_backward.default: embedding_backward,
}
