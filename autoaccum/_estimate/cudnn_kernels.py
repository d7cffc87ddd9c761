"""Workspaces of cuDNN's convolutions on a card: one rule for each direction, which computes bytes from arguments.

cuDNN chooses a kernel, and thereby a workspace, at run time. These rules give the largest workspace among the kernels
that it usually offers PyTorch first (run_single_conv in aten/src/ATen/native/cudnn/Conv_v8.cpp, which tries the next
plan if memory is short). With `torch.backends.cudnn.benchmark` PyTorch runs all plans whose workspace is to be had and
keeps the fastest (get_plans_from_find there): then the larger of all rules counts. The workspace is allocated by
PyTorch and freed after the call. docs/dev/estimates.md compares whole trainings on cards.

Origins:

- Tensor Cores read and write channels last, with channels padded to 16 bytes; other layouts are converted within the
  call. NVIDIA's "Convolutional Layers User's Guide" (docs.nvidia.com/deeplearning/performance) says both: "Tensor
  Layouts In Memory: NCHW vs NHWC" and "Channels In And Out". They are used for half precision, and for float32 if the
  card supports it (TF32, from Ampere on) and `torch.backends.cudnn.allow_tf32` is on.
- Without them, 3 x 3 filters use Winograd's algorithm, not fused: tiles of 4 x 4 results, for which source, filter and
  result are transformed to 6 x 6 as a whole (A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural
  Networks", arXiv 1509.09308, F(4 x 4, 3 x 3)). cuDNN documents no sizes; with these, predictions for trainings of
  PSPNet and UPerNet on V100s are within 0.5 % in the median (docs/dev/estimates.md).
- The gradient of weights is a sum over pixels, split over all multiprocessors; partial sums are in float32.
- A tensor that is not in the layout PyTorch chooses is copied before the call (cudnn_conv_suggest_memory_format in
  aten/src/ATen/native/ConvUtils.h; ConvShared.cpp).
- Depthwise convolutions in PyTorch's usual layout have kernels without workspace, its own (DepthwiseConv2d.cu) or
  cuDNN's direct ones (use_cudnn_depthwise in Convolution.cpp).

Not covered: FFT, and Winograd's algorithm for other filters.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._estimate.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_CHANNEL_BYTES = 16
_FLOAT = 4
# Multiprocessors of the H100 SXM (NVIDIA's "H100 Tensor Core GPU Architecture", table 3); most cards have fewer.
_MULTIPROCESSORS = 132
# The tile that one multiprocessor computes at a time, usual for kernels in PyTorch's profiles ("128x128").
_TILE = 128
# Sides of Winograd's tiles: the filter, the results, and the transformed values.
_FILTER, _RESULTS, _TRANSFORMED = 3, 4, 6
# MiB above which cuDNN drops a kernel (PyTorch's docs/source/cuda_environment_variables.rst).
_CAP = "CUDNN_CONV_WSCAP_DBG"
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution(args: Sequence[Any], result: Tensor, *, tensor_float: bool = True) -> Workspace | None:
    """Source, weight and result are converted to channels last unless they are already.

    Args:
        args: The operator's arguments.
        result: Its result.
        tensor_float: Whether the card computes float32 with Tensor Cores.
    """
    source, weight, groups = args[0], args[1], args[8]
    if _is_without_workspace(source, weight, groups, transposed=args[6]):
        return None
    last = _runs_channels_last(source, weight)
    cores = tensor_float and _allows_tensor_float()
    parts = [_turned(tensor, channels_last=last, cores=cores) for tensor in (source, weight, result)]
    if not last and _is_winograd(args, source, cores=cores):
        parts = _winograd(source, result) if not torch.backends.cudnn.benchmark else _larger(parts, source, result)
    return Workspace(beside=(*_copied((source, weight), channels_last=last), *_capped(parts)))


def convolution_backward(args: Sequence[Any], result: Any, *, tensor_float: bool = True) -> Workspace | None:
    """Each half converts what it reads and writes; the weight's gradient is summed in parts.

    Args:
        args: The operator's arguments.
        result: Its results.
        tensor_float: Whether the card computes float32 with Tensor Cores.
    """
    gradient, source, weight, mask, groups = args[0], args[1], args[2], args[10], args[9]
    if _is_without_workspace(source, weight, groups, transposed=args[7]):
        return None
    last = _runs_channels_last(source, weight)
    cores = tensor_float and _allows_tensor_float()
    read = [_turned(tensor, channels_last=last, cores=cores) for tensor in (gradient, source, weight)]
    written = [*read, _partial_sums(weight, groups)]
    if not last and _is_winograd(args[1:], source, cores=cores):
        if torch.backends.cudnn.benchmark:
            read, written = _larger(read, source, gradient), _larger(written, source, gradient)
        else:
            read = written = _winograd(source, gradient)
    made = [tensor.nbytes for tensor, is_asked in zip(result[:2], mask[:2], strict=True) if is_asked]
    steps = []
    if mask[0]:
        steps.append((made[0], *_copied((gradient, weight), channels_last=last), *_capped(read)))
    if mask[1]:
        steps.append((*made, *_copied((gradient, source), channels_last=last), *_capped(written)))
    return Workspace(steps=tuple(steps))


@contextmanager
def layouts_without_driver() -> Iterator[None]:
    """Give fakes of convolutions on a card cuDNN's layout even if PyTorch finds no cuDNN."""
    asked = torch._C._conv_determine_backend_memory_format

    def determined(source: Tensor, weight: Tensor, backend: Any) -> Any:
        if source.device.type != "cuda":
            return asked(source, weight, backend)
        return _LAST[source.dim()] if _runs_channels_last(source, weight) else torch.contiguous_format

    torch._C._conv_determine_backend_memory_format = determined  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._C._conv_determine_backend_memory_format = asked


def _is_without_workspace(source: Tensor, weight: Tensor, groups: int, *, transposed: bool) -> bool:
    is_depthwise = groups > 1 and groups == source.shape[1] and not transposed
    if source.numel() == 0 or weight.numel() == 0 or not torch.backends.cudnn.enabled:
        return True
    return is_depthwise and not _runs_channels_last(source, weight)


def _runs_channels_last(source: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch calls cuDNN with channels last, as it does if the source or the weight is."""
    last = _LAST.get(source.dim())
    return last is not None and any(
        tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous() for tensor in (source, weight)
    )


def _copied(tensors: Sequence[Tensor], *, channels_last: bool) -> list[int]:
    """Return the sizes of tensors that are not in the layout of the call."""
    layout = _LAST[tensors[0].dim()] if channels_last else torch.contiguous_format
    return [tensor.nbytes for tensor in tensors if not tensor.is_contiguous(memory_format=layout)]


def _allows_tensor_float() -> bool:
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:  # convolutions have a setting of their own
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def _is_winograd(args: Sequence[Any], source: Tensor, *, cores: bool) -> bool:
    """Whether Winograd's algorithm is used, or in benchmark mode may be.

    For a backward pass, `args` are its arguments from the source on.
    """
    weight, stride, dilation, transposed, groups = args[1], args[3], args[5], args[6], args[8]
    is_usual = not cores and source.dtype is torch.float32
    return (
        (is_usual or torch.backends.cudnn.benchmark)
        and tuple(weight.shape[2:]) == (_FILTER, _FILTER)
        and all(step == 1 for step in (*stride, *dilation))
        and not transposed
        and groups == 1
    )


def _winograd(source: Tensor, result: Tensor) -> list[int]:
    """Return the bytes of the transformed tensors: source and result, which grow with the samples, and filters."""
    n, outputs, *sides = result.shape
    inputs = source.shape[1]
    tiles = n * math.prod(math.ceil(side / _RESULTS) for side in sides)
    each_bytes = _TRANSFORMED**2 * source.element_size()
    return [each_bytes * numbers for numbers in ((inputs + outputs) * tiles, inputs * outputs)]


def _larger(parts: list[int], source: Tensor, result: Tensor) -> list[int]:
    """Return the larger of a workspace's parts and those of Winograd's algorithm, between which benchmarks decide."""
    return max(parts, _winograd(source, result), key=sum)


def _turned(tensor: Tensor, *, channels_last: bool, cores: bool) -> int:
    """Return the bytes of a tensor in the Tensor Cores' layout; 0 if it has it already or they are not used."""
    if tensor.dtype not in _HALVES and not (tensor.dtype is torch.float32 and cores):
        return 0
    channels = tensor.shape[1]
    padded = math.ceil(channels * tensor.element_size() / _CHANNEL_BYTES) * _CHANNEL_BYTES // tensor.element_size()
    return 0 if channels_last and padded == channels else tensor.nbytes // channels * padded


def _partial_sums(weight: Tensor, groups: int) -> int:
    """Return the bytes of a weight gradient's partial sums, as many as give each multiprocessor a tile."""
    outputs, of_one = weight.shape[0] // groups or 1, weight.shape[1:].numel()
    tiles = groups * math.ceil(outputs / _TILE) * math.ceil(of_one / _TILE)
    return max(1, _MULTIPROCESSORS // tiles) * weight.numel() * _FLOAT


def _capped(sizes: list[int]) -> list[int]:
    """Return the parts of one workspace, or its cap if they exceed it."""
    cap = os.environ.get(_CAP, "")
    if cap.isdigit() and sum(sizes) > int(cap) << 20:
        return [int(cap) << 20]
    return sizes
