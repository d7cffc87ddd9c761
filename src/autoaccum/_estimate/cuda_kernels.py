"""What PyTorch's own CUDA kernels take for themselves while they run: one named rule an operator.

An operator's arguments come in; sizes in bytes go out. No card is asked. Each rule is read off the kernel's source,
which is named at it (below aten/src/ATen/native). What is missing here takes nothing worth naming.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autoaccum._estimate.cpu_kernels import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
# To what flash attention rounds lengths in its backward pass, and the efficient one in its log-sum-exp.
_FLASH_ROWS = 128
_LANES = 32
_FLOAT = 4
# Up to so many indices an embedding's gradient is added up without sorting them.
_UNSORTED_INDICES = 3072
# As many rows of a sorted embedding's gradient one thread adds up.
_ROWS = 10


def flash_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """Row sums and the query's gradient in float32; those of shared keys and values a head (mha_bwd, flash_api.cpp)."""
    query, key = args[1], args[2]
    n, heads, length, head = query.shape
    rows = -(-length // _FLASH_ROWS) * _FLASH_ROWS
    multiple = _LANES if head <= _FLASH_ROWS else 2 * _LANES
    width = -(-head // multiple) * multiple
    shared = 2 * [n * key.shape[2] * heads * head * key.element_size()] if key.shape[1] != heads else []
    return Workspace(beside=(n * heads * rows * _FLOAT, n * heads * rows * width * _FLOAT, *shared))


def efficient_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """Row sums; and where gradients are halves, sums of them in float32 (attention_backward.cu)."""
    query, key = args[1], args[2]
    n, heads, length, head = query.shape
    rows = -(-length // _LANES) * _LANES
    sums = n * heads * (length + 2 * key.shape[2]) * head * _FLOAT if query.dtype in _HALVES else 0
    return Workspace(beside=(n * heads * rows * _FLOAT, sums))


def softmax(args: Sequence[Any], _result: Any) -> Workspace:
    """A copy of what is not contiguous (host_softmax, cuda/SoftMax.cu); log_softmax is the same."""
    return Workspace(beside=_copied(args[0]))


def softmax_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """The gradient times the result, whole (softmax_backward_cuda_out, cuda/SoftMax.cu), and a copy of one turned."""
    gradient, made = args[0], args[1]
    product = made.numel() * torch.promote_types(gradient.dtype, made.dtype).itemsize
    # It is laid out as the gradient is, so where that is contiguous there is nothing to ask.
    again = () if gradient.is_contiguous() or (gradient * made).is_contiguous() else (product,)
    return Workspace(beside=(product, *again, *_copied(made)))


def log_softmax_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """Copies of what is not contiguous (host_softmax_backward, cuda/SoftMax.cu)."""
    return Workspace(beside=_copied(args[0], args[1]))


def layer_norm(args: Sequence[Any], _result: Any) -> Workspace:
    """A copy of a source that is not contiguous (layer_norm_cuda, cuda/layer_norm_kernel.cu)."""
    return Workspace(beside=_copied(args[0]))


def layer_norm_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """A copy of a source that is not contiguous (layer_norm_backward_cuda, cuda/layer_norm_kernel.cu)."""
    return Workspace(beside=_copied(args[1]))


def embedding_backward(args: Sequence[Any], _result: Any) -> Workspace:
    """Indices sorted, and parts of sums in float32: a row for each ten indices, and one for each row that is met.

    How many rows are met is not known; the kernel allows for as many as there can be (cuda/Embedding.cu,
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
