"""When oneDNN multiplies columns in a convolution's backward pass on the CPU, and what that takes.

Its vectorized kernels unroll over pixels, and refuse filters that reach too far beyond: dilated ones, and deep ones
where steps are few. Then it unfolds samples into columns: a buffer for each thread, and sums of weights. The conditions
follow `init_conf` in oneDNN's src/cpu/x64/jit_avx512_common_conv_kernel.cpp and src/cpu/gemm_convolution_utils.cpp as
far as they were compared with ONEDNN_VERBOSE=1 and with the bytes allocated, on AVX-512. AVX2 has fewer registers and
may refuse more; there, the prediction may be short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Channels in a block, blocks that a kernel takes at once, and registers for sums.
_LANES, _AT_ONCE, _REGISTERS = 16, (4, 2, 1), 31
# Rows of so many pixels are unrolled whole.
_WHOLE_ROW = 28
# With fewer pixels for each thread, each thread takes samples of its own.
_FEW_PIXELS = 256
_SUMS = 4
# Dimensions of a weight over time, and the depth of filters for which steps that are too few were measured.
_OVER_TIME, _DEEP = 5, 3


@dataclass(frozen=True, slots=True)
class Geometry:
    """A convolution, by its tensors and options: the source, the filters, the result's gradient."""

    source: Tensor
    weight: Tensor
    gradient: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def _is_dilated(self) -> bool:
        # Convolutions over time are left out: none was measured.
        plain = self.source.dtype == torch.float32 and self.weight.dim() < _OVER_TIME
        return plain and any(step > 1 for step in self.dilation)

    @property
    def _reach(self) -> tuple[int, ...]:
        """The pixels from a filter's first to its last, less one."""
        return tuple((size - 1) * step for size, step in zip(self.weight.shape[2:], self.dilation, strict=False))

    @property
    def _reaches_beyond(self) -> bool:
        return any(reach >= size for reach, size in zip(self._reach, self.source.shape[2:], strict=False))

    @property
    def _is_shallow(self) -> bool:
        """Whether filters of depth three meet at most two steps, as in the last layers of networks over time."""
        return (
            self.source.dtype == torch.float32
            and self.weight.dim() == _OVER_TIME
            and self.weight.shape[2] == _DEEP
            and self._reach[0] >= self.source.shape[2]
        )

    @property
    def _columns(self) -> int:
        """The bytes of one sample unfolded; of one step of it where there is a depth."""
        pixels = self.gradient.shape[-2:].numel()
        return self.source.shape[1] * self.weight.shape[2:].numel() * pixels * self.source.element_size()

    def columns_for_source(self) -> int:
        """Return the bytes of columns for the gradient of the source; 0 if it needs none."""
        wide = self.source.shape[-1]
        if not self._is_dilated or wide <= _WHOLE_ROW:
            return 0
        blocks = math.ceil(self.source.shape[1] / _LANES)
        at_once = next(number for number in _AT_ONCE if blocks % number == 0)
        unrolled = _REGISTERS // (at_once + 1)
        beyond = (self._reach[-1] - self.padding[-1] - wide % unrolled) // self.stride[-1]
        if beyond <= unrolled:
            return 0
        threads = torch.get_num_threads()
        return self._columns * (threads if threads <= self.source.shape[0] else 1)

    def columns_for_weight(self) -> int:
        """Return the bytes of columns and sums for the gradient of the weight; 0 if it needs none."""
        if not (self._is_shallow or (self._is_dilated and self._reaches_beyond)):
            return 0
        threads = torch.get_num_threads()
        each = threads if self.gradient.shape[-2:].numel() < _FEW_PIXELS * threads else 1
        return each * (self._columns + _SUMS * self.weight.nbytes)
