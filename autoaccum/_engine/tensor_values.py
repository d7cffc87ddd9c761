"""Compares tensors, and writes them back: of any layout and type that modules keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Elements whose sum is taken at once on the CPU: their copies in double precision take 2 MiB.
_SUMMED_AT_ONCE = 2**18


def is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor is one that torch copies, but cannot compare."""
    return tensor.layout not in (torch.strided, torch.jagged)


def address_of(tensor: Tensor) -> int:
    return tensor.data_ptr() if is_plain(tensor) else id(tensor)


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values; NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if hasattr(one, "__tensor_flatten__"):  # what quantises weights need not tell whether they are equal
        return all(are_same(getattr(one, name), getattr(other, name)) for name in one.__tensor_flatten__()[0])
    one, other = _readable(one), _readable(other)
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _readable(tensor: Tensor) -> Tensor:
    """Return a tensor that torch compares and sums: floating-point numbers of eight bits as the bytes that they are."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def write(tensor: Tensor, copy: Tensor) -> int:
    """Write a copy back; return how far the version counter moved."""
    before = 0 if tensor.is_inference() else tensor._version
    # A tensor made in inference mode can be written in that mode alone, which turns gradients on where it is off.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape != copy.shape:
            tensor.resize_(copy.shape)  # the model resized it in place
        if tensor.layout is torch.strided and 0 in tensor.stride():
            # All rows of an expanded tensor share memory, which torch refuses to write more than once.
            rows = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
            tensor[rows].copy_(copy[rows])
        else:
            tensor.copy_(copy)
    return 0 if tensor.is_inference() else tensor._version - before


def sum_of(tensor: Tensor) -> Tensor:
    """Return two sums that cheaply show whether a tensor is unchanged, also by writes through `.data`.

    One is of all elements; gradients of a last layer add up to 0, so the other is of their squares, or of every third.
    """
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return torch.stack([sum_of(getattr(tensor, name)).double().cpu() for name in names]).sum(0)
    if tensor.layout is not torch.strided:
        return torch.tensor(float(tensor._version))
    tensor = _readable(tensor)
    if not tensor.is_floating_point():
        return torch.stack([tensor.sum(), tensor.flatten()[::3].sum()])
    # On the CPU, summing in another type first makes a copy in that type; MPS has no double precision.
    kind = torch.float32 if tensor.device.type == "mps" else torch.float64
    pieces = torch.split(tensor.flatten(), _SUMMED_AT_ONCE) if tensor.device.type == "cpu" else [tensor]
    sums = [torch.stack([piece.sum(dtype=kind), torch.linalg.vector_norm(piece, dtype=kind)]) for piece in pieces]
    return torch.stack(sums).sum(0)
