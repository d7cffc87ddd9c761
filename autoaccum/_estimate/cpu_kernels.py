"""Workspaces of CPU kernels: one rule for each operator, which computes bytes from its arguments and results.

Each rule reproduces the profiler's memory events of the real operator, and is tested against them
(`tests/estimate/test_cpu_kernels.py`). Operators without a rule allocate little. Sizes depend on this machine's
processor: oneDNN blocks channels by vector width, and allocates buffers per thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._estimate import cpu_columns, cpu_recurrent
from autoaccum._estimate.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_aten = torch.ops.aten


# Floats per vector register, by which oneDNN blocks channels.
_LANES = {"AVX512": 16, "AVX2": 8}
# With at most this many channels, a network's first layer is read in its own layout.
_PLAIN_CHANNELS = 4
_SMALL_KERNEL = 3
_MKLDNN = ("Mkldnn", "MkldnnTranspose", "MkldnnEmpty")
# Multiplied as columns: types that oneDNN does not support, and three-dimensional convolutions of single samples.
_UNFOLDED = ("Slow2d", "Slow3d")
# The same, one sample after another: dilated convolutions of single samples.
_ONE_BY_ONE = ("SlowDilated2d", "SlowDilated3d")


def _lanes() -> int:
    return _LANES.get(torch.backends.cpu.get_cpu_capability(), 8)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """Sizes in bytes of a convolution's tensors as oneDNN blocks them."""

    source: int
    weight: int
    result: int
    wide_weight: int
    source_is_read_plain: bool
    is_small_groups: bool
    scratch: int
    backward_scratch: int
    weight_scratch: int


def _blocked(tensor: Tensor, channels: int) -> int:
    lanes = _lanes()
    return tensor.nbytes // channels * (math.ceil(channels / lanes) * lanes)


def _is_strided(stride: Sequence[int]) -> bool:
    return any(step > 1 for step in stride)


def _convolution_of(source: Tensor, weight: Tensor, result: Tensor, stride: Sequence[int], groups: int) -> _Convolution:
    inputs, outputs = source.shape[1], result.shape[1]
    of_kernel = weight.shape[2:].numel()

    depthwise = groups == inputs == outputs
    lanes, threads = _lanes(), torch.get_num_threads()

    def padded(channels: int) -> int:
        return math.ceil(channels / lanes) * lanes

    plain = inputs <= _PLAIN_CHANNELS
    if depthwise:
        weight_bytes = weight.nbytes // outputs * padded(outputs)
    elif groups > 1 or plain:
        weight_bytes = weight.nbytes
    else:
        weight_bytes = weight.nbytes // (inputs * outputs) * padded(inputs) * padded(outputs)
    pixels = result.shape[2:].numel()
    channels_last = not result.is_contiguous()
    scratch = weight_scratch = 0
    if of_kernel == 1 and _is_strided(stride):
        scratch += threads * inputs * pixels * source.element_size()  # the strided pixels, gathered
    half = source.dtype != torch.float32
    backward_scratch = scratch
    if of_kernel == 1 and half:
        # Sums in float32.
        scratch += threads * padded(outputs) * pixels * 4
        backward_scratch += threads * padded(inputs) * pixels * 4
    per_group = inputs // groups
    small_groups = groups > 1 and per_group < lanes and not (depthwise and max(weight.shape[2:]) <= _SMALL_KERNEL)
    # Groups smaller than a vector are padded to one, in both dimensions.
    wide = lanes // per_group if small_groups else 1
    if half and not (depthwise and not small_groups):
        image = (source.nbytes // source.shape[0] + result.nbytes // result.shape[0]) * (wide if channels_last else 1)
        sums = 2 * (weight_bytes * wide * wide if channels_last else weight_bytes)  # in float32
        # Threads share the samples where those are large, the weights where these are.
        weight_scratch = sums * (threads if image > sums else 1) + (threads * image if of_kernel > 1 else 0)
    return _Convolution(
        source=_blocked(source, inputs),
        weight=weight_bytes,
        result=_blocked(result, outputs),
        wide_weight=weight.nbytes * wide * wide,
        source_is_read_plain=plain,
        is_small_groups=small_groups,
        scratch=scratch,
        backward_scratch=backward_scratch,
        weight_scratch=weight_scratch,
    )


def _backend(args: Sequence[Any]) -> str:
    return str(torch._C._select_conv_backend(*args).name)


def _columns(source: Tensor, weight: Tensor, result: Tensor, stride: Sequence[int], padding: Sequence[int]) -> int:
    """Return the bytes of samples unfolded into columns; 0 if they are columns already."""
    if weight.shape[2:].numel() == 1 and not any(padding) and all(step == 1 for step in stride):
        return 0
    return source.nbytes // source.shape[2:].numel() * weight.shape[2:].numel() * result.shape[2:].numel()


def _unfolded(args: Sequence[Any], result: Any) -> Workspace:
    """Where PyTorch does not call oneDNN (bf16 without AVX-512), it multiplies columns, group by group."""
    source, weight, _, stride, padding, _, _, _, groups = args
    columns = _columns(source, weight, result, stride, padding)
    if groups > 1:
        return Workspace(steps=((source.nbytes // groups, columns // groups),), beside=(result.nbytes,))
    turned = weight.nbytes if weight.shape[2:].numel() > 1 and not result.is_contiguous() else 0
    return Workspace(beside=(columns, turned))


def _unfolded_backward(args: Sequence[Any]) -> Workspace:
    """As `_unfolded`; both gradients are allocated before the columns."""
    gradient, source, weight, _, stride, padding, _, _, _, groups, mask = args
    columns = _columns(source, weight, gradient, stride, padding)
    made = (source.nbytes if mask[0] else 0, weight.nbytes if mask[1] else 0)
    if groups > 1:
        return Workspace(steps=((gradient.nbytes // groups, source.nbytes // groups, columns // groups),), beside=made)
    turned = weight.nbytes if weight.shape[2:].numel() > 1 and not gradient.is_contiguous() else 0
    return Workspace(steps=((*made, columns, turned),))


def convolution(args: Sequence[Any], result: Any) -> Workspace | None:
    """A convolution converts its arguments to oneDNN's blocked layout, and its result back."""
    source, weight, _, stride, _, _, transposed, _, groups = args
    backend = _backend(args)
    if backend in _ONE_BY_ONE:
        return Workspace(beside=(_columns(source, weight, result, args[3], args[4]) // source.shape[0],))
    if backend in _UNFOLDED:
        return _unfolded(args, result)
    if backend not in _MKLDNN:
        return None
    if not result.is_contiguous():  # channels last
        return Workspace(beside=(weight.nbytes, weight.nbytes))
    of = _convolution_of(source, weight, result, stride, groups)
    read = () if of.source_is_read_plain else (of.source,)
    return Workspace(steps=((*read, of.weight, of.scratch),), beside=(of.result,) * (2 if transposed else 1))


def convolution_backward(args: Sequence[Any], _result: Any) -> Workspace | None:
    """The two halves of a convolution's backward pass each convert their arguments to the blocked layout."""
    gradient, source, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask = args
    backend = _backend(
        (source, weight, None, stride, padding, dilation, transposed, output_padding, groups, bias_sizes)
    )
    if backend in _ONE_BY_ONE:
        columns = _columns(source, weight, gradient, stride, padding) // source.shape[0]
        return Workspace(steps=((source.nbytes if mask[0] else 0, weight.nbytes if mask[1] else 0, columns),))
    if backend in _UNFOLDED:
        return _unfolded_backward(args)
    if backend not in _MKLDNN:
        return None
    of = _convolution_of(source, weight, gradient, stride, groups)
    made = source.nbytes if mask[0] else 0
    if not gradient.is_contiguous():  # channels last
        return Workspace(steps=((made, of.wide_weight, weight.nbytes, weight.nbytes, of.weight_scratch),))
    steps: list[tuple[int, ...]] = []
    geometry = cpu_columns.Geometry(source, weight, gradient, stride, padding, dilation)
    if mask[0] and (columns := geometry.columns_for_source()):
        steps += [(source.nbytes, columns), (source.nbytes, source.nbytes)]
    elif mask[0]:
        # One more with strides: the result is copied when converted back to the plain layout.
        again = (source.nbytes,) if _is_strided(stride) else ()
        steps += [(of.result, of.weight, of.source, of.backward_scratch), (of.source, source.nbytes, *again)]
    if mask[1] and (columns := geometry.columns_for_weight()):
        steps += [(made, weight.nbytes, columns), (made, weight.nbytes, weight.nbytes)]
    elif mask[1]:
        if of.is_small_groups:
            steps.append((made, of.weight, of.weight_scratch))
        else:
            read = () if of.source_is_read_plain else (of.source,)
            steps.append((made, of.result, *read, of.weight, of.weight_scratch))
        steps.append((made, of.weight, weight.nbytes))
    return Workspace(steps=tuple(steps))


_RULES: dict[Any, Callable[[Sequence[Any], Any], Workspace | None]] = {
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten.mkldnn_rnn_layer.default: cpu_recurrent.forward,
    _aten.mkldnn_rnn_layer_backward.default: cpu_recurrent.backward,
}


def cpu_workspace(func: Any, args: Sequence[Any], result: Any) -> Workspace | None:
    """Return an operator's workspace on this machine's CPU; None if there is no rule."""
    rule = _RULES.get(func)
    return None if rule is None else rule(args, result)
