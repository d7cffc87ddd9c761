"""A number that tells one batch from another, taken in some microseconds, the same in every process.

Of tensors and arrays it is made from some hundred elements, of long lists from some items. What is on another device
than the CPU counts by its shape alone, since reading it would wait for the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

# Elements that are read of a tensor: some over all of it, and those at its end.
_SPREAD, _LAST = 512, 128
# Items that are read of a list.
_ITEMS = 16
_CHARACTERS = 256
# Objects that are read of a batch, which may hold one another.
_MOST = 1_000
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint_of(batch: Any) -> int:
    """Return a checksum of a sample of what is in a batch."""
    checksum, waiting, left = 0, [batch], _MOST
    while waiting and left:
        node, left = waiting.pop(), left - 1
        if isinstance(node, Tensor):
            part = _of_tensor(node)
        elif isinstance(node, np.ndarray):
            part = _of_array(node)
        elif isinstance(node, str | bytes):
            part = repr(node[:_CHARACTERS]).encode() + str(len(node)).encode()
        elif isinstance(node, int | float | complex | np.generic | None):
            part = repr(node).encode()
        elif isinstance(node, Mapping):
            part = str(len(node)).encode()
            waiting += node.values()
        elif isinstance(node, list | tuple):
            part = str(len(node)).encode()
            waiting += node[:: max(1, len(node) // _ITEMS)]
        else:
            part = type(node).__name__.encode()
            waiting += getattr(node, "__dict__", {}).values()
        checksum = zlib.crc32(part, checksum)
    return checksum


def _of_tensor(tensor: Tensor) -> bytes:
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain:
        return str(tensor.dtype).encode()
    if tensor.device.type != "cpu":
        return f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return _of_array(tensor.resolve_neg().view(_BITS[tensor.element_size()]).numpy())


def _of_array(array: Any) -> bytes:
    parts = [str((array.shape, array.dtype)).encode()]
    if array.dtype != object and array.size:
        # An odd step does not stay within one column of a table.
        parts += [array.flat[:: array.size // _SPREAD | 1].tobytes(), array.flat[-_LAST:].tobytes()]
    return b"".join(parts)
