"""Corrects fake CUDA tensors where they differ from CUDA: attention kernels, workspaces, autocast, the driver.

Fakes of device "cuda" take CUDA's paths wherever the path depends only on the device (fused dropout, cuDNN's batch
norm, autocast's lists). These rules cover the rest: choices that need the GPU. Kernels' workspaces are in
`_estimate/cuda_kernels.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autoaccum._estimate.cuda_kernels import LAST, runs_channels_last
from autoaccum._estimate.fake_backward import backward, backward_from, functions_heard
from autoaccum._estimate.gpu_properties import GPUAnswers
from autoaccum._estimate.own_thread import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
# PyTorch's function, which `without_driver` replaces temporarily.
_ATTENTION = functional.scaled_dot_product_attention
# The largest head dimension of flash attention's kernels (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
_FLASH_HEAD = 256
_FLASH_MULTIPLE = 8
# The last dimension of an additive mask is padded to a multiple of it (pad_bias in transformers/attention.cpp).
_MASK_MULTIPLE = 16
# cuBLAS's default workspace, one for the forward thread and one for the backward thread
# (parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp): ":4096:2:16:8", and 32 MiB on Hopper, in newer
# versions of PyTorch on Blackwell too. cuBLASLt shares it (TORCH_CUBLASLT_UNIFIED_WORKSPACE, there).
CUBLAS_BYTES = (2 * 4096 + 8 * 16) * 1024
CUBLAS_HOPPER_BYTES = 32 * 1024 * 1024
_WITH_32_MIB = ("h100", "h200", "h800", "h20", "gh200", "b100", "b200", "b300", "gb200", "gb300", "rtx-50")


class CudaCalls(TorchFunctionMode):
    """Redirects calls that need the driver: attention to a kernel, backward to graph nodes."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, or its replacement."""
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return attention(*args, **kwargs)
        if func is Tensor.backward:
            # Entered again, because a checkpoint's second forward pass runs inside.
            with self:
                return backward(args[0])
        return func(*args, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run scaled dot product attention with the kernel that CUDA would choose.

    Flash attention for half precision without a mask, otherwise the memory-efficient kernel, in the order of
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp from sm80 on; plain products if neither supports the shapes.
    """
    if torch.is_autocast_enabled("cuda"):
        to = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(to), key.to(to), value.to(to)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(to)
    head = query.shape[-1]
    refused = query.dim() != 4 or head != value.shape[-1] or (enable_gqa and attn_mask is not None)  # noqa: PLR2004 - (N, heads, length, head)
    # check_last_dim_stride_equals_1_dense there: no fused kernel takes a turned mask.
    if refused or any(part is not None and part.stride(-1) != 1 for part in (query, key, value, attn_mask)):
        return _products(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is None and query.dtype in _HALVES and head <= _FLASH_HEAD:
        padding = -head % _FLASH_MULTIPLE
        if padding:
            query, key, value = (functional.pad(part, (0, padding)) for part in (query, key, value))
        scale = head**-0.5 if scale is None else scale
        out: Tensor = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :head] if padding else out
    if enable_gqa:
        copies = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    training = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    made: Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, _additive(attn_mask, query, key), training, dropout_p, is_causal, scale=scale
    )[0]
    return made


def _products(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, causal: bool, scale: Any, gqa: bool
) -> Tensor:
    with torch._C.DisableTorchFunction():
        return _ATTENTION(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa)


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask for the efficient kernel: of the query's type, padded to its alignment, expanded."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    rest = -mask.shape[-1] % _MASK_MULTIPLE
    if rest:
        mask = functional.pad(mask, (0, rest))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


@contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """Cast as `torch.autocast("cuda")` does, which disables itself without CUDA."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(before[2])


@contextmanager
def without_driver(answers: GPUAnswers | None = None) -> Iterator[None]:
    """Let this thread's fakes take CUDA's paths even where PyTorch checks the driver, or the build, for CUDA.

    Args:
        answers: What the model is told of the GPU if it asks; None for any GPU with TF32.
    """
    with (
        (answers or GPUAnswers()).given(),
        # Inside a model, or in a checkpoint's second pass, `torch.autocast("cuda")` casts.
        replaced(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        # PyTorch's own functions call attention without `CudaCalls`.
        replaced(functional, "scaled_dot_product_attention", attention),
        _layouts_of_cudnn(),
        _recomputing_without_engine(),
        functions_heard(),
    ):
        yield


@contextmanager
def _layouts_of_cudnn() -> Iterator[None]:
    """Give fakes of convolutions on a GPU cuDNN's layout even if PyTorch finds no cuDNN."""

    def determined(source: Tensor, weight: Tensor, backend: Any) -> Any:
        if source.device.type != "cuda":
            return original(source, weight, backend)
        return LAST[source.dim()] if runs_channels_last(source, weight) else torch.contiguous_format

    with replaced(torch._C, "_conv_determine_backend_memory_format", determined) as original:
        yield


@contextmanager
def _recomputing_without_engine() -> Iterator[None]:
    """Let a reentrant checkpoint run its backward pass inside the backward pass without the engine."""

    def called(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if grad_tensors is None or args or kwargs:
            original(tensors, grad_tensors, *args, **kwargs)
        else:
            backward_from(tensors, grad_tensors)

    with replaced(torch.autograd, "backward", called) as original:
        yield


def cublas_bytes(gpu_name: str) -> int:
    """Return cuBLAS's workspace for a handle on a GPU."""
    return CUBLAS_HOPPER_BYTES if gpu_name.lower().startswith(_WITH_32_MIB) else CUBLAS_BYTES
