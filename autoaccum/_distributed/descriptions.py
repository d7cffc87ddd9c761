"""Describes what ranks must have alike in lines of text, which are equal wherever it is alike.

Numbers and tensors are described by their values, functions and classes by their names, and objects of torch,
torchmetrics and this package by their settings also. Of other objects only the class counts, since they may hold what
legitimately differs from rank to rank. No line has an address in it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoaccum._distributed.buckets import as_plain
from autoaccum._engine.dtensor import is_spread

# A tensor of more elements is described by a checksum.
_FEW = 16
# Elements of 8 bytes are two integers each: the sign bits of 64-bit integers would cancel in a sum.
_INTEGERS = {1: torch.uint8, 2: torch.int16}
# So many integers are summed at a time, which takes 8 MB.
_AT_ONCE = 1 << 20
# The classes whose settings are compared: constructor's arguments that are kept as attributes.
_WITH_SETTINGS = ("torch.nn.modules.", "torch.optim.", "torchmetrics.", "autoaccum.")
# How a script is called on the rank that started the others, and on those.
_SCRIPT = ("__main__", "__mp_main__")


def lines_of(value: Any) -> list[str]:
    """Return the description of a value, line by line, so that the first unlike one says what differs."""
    if isinstance(value, Mapping):
        return [f"{text_of(name)}: {line}" for name, part in value.items() for line in lines_of(part)]
    if isinstance(value, list | tuple):
        return [line for part in value for line in lines_of(part)]
    if settings := _settings(value):
        kind = _name(type(value))
        return [kind, *(f"{name}={text_of(one)} of {kind}" for name, one in settings.items())]
    return [text_of(value)]


def text_of(value: Any) -> str:
    """Return the description of a value in one line."""
    match value:
        case Tensor():
            text = _text_of_tensor(value)
        case np.generic() | np.ndarray():
            text = str(own) if isinstance(own := value.tolist(), np.generic) else text_of(own)  # of a long double
        case float():
            text = repr(value).removesuffix(".0")  # a rate of 1 is one of 1.0
        case int() | complex() | str() | bytes() | torch.dtype() | None:
            text = repr(value)
        case list() | tuple():
            text = f"({', '.join(map(text_of, value))})"
        case set() | frozenset():
            text = f"{{{', '.join(sorted(map(text_of, value)))}}}"
        case Mapping():
            text = f"{{{', '.join(f'{text_of(name)}: {text_of(part)}' for name, part in value.items())}}}"
        case functools.partial():
            text = f"{text_of(value.func)} with {text_of(value.args)} and {text_of(value.keywords)}"
        case _ if hasattr(value, "__qualname__"):
            text = _name(value)
        case _:
            settings = ", ".join(f"{name}={text_of(one)}" for name, one in _settings(value).items())
            text = f"{_name(type(value))}({settings})"
    return text


def _text_of_tensor(value: Tensor) -> str:
    if not is_plain(value):
        return form_of(value)
    if value.numel() <= _FEW:
        return text_of(value.tolist())
    return f"{form_of(value)} (checksum {sum(*checksums([value]))})"


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has all its elements here, in memory."""
    is_whole = not (is_spread(tensor) or is_traceable_wrapper_subclass(tensor) or tensor.is_quantized)
    return is_whole and tensor.layout is torch.strided and not tensor.is_meta


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return sums of the bits of each tensor, as integers weighted by their places, with one wait for the device."""
    weights = torch.arange(1, 2 * min(_AT_ONCE, max(one.nbytes for one in tensors)), 2, device=tensors[0].device)
    sums: list[list[Tensor]] = []
    for tensor in tensors:
        flat = as_plain(tensor.detach()).reshape(-1)
        pieces = torch.split(flat.view(_INTEGERS.get(flat.itemsize, torch.int32)), _AT_ONCE)
        sums.append([piece.long().mul_(weights[: len(piece)]).sum() for piece in pieces])
    found = torch.stack([one for own in sums for one in own]).cpu()
    return [own.tolist() for own in torch.split(found, list(map(len, sums)))]


def form_of(tensor: Tensor) -> str:
    """Return the shape and type of a tensor."""
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _name(thing: Any) -> str:
    """Return the name of a function or class."""
    module = getattr(thing, "__module__", None)
    is_clear = module is None or module in _SCRIPT or module.startswith(("torch.", "builtins"))
    return str(thing.__qualname__) if is_clear else f"{module}.{thing.__qualname__}"


def _settings(value: Any) -> dict[str, Any]:
    if not f"{type(value).__module__}.".startswith(_WITH_SETTINGS):
        return {}
    own = {**vars(value), **vars(value).get("_buffers", {})} if hasattr(value, "__dict__") else {}
    return {name: own[name] for name in _arguments_of(type(value).__init__) if name in own}


@functools.cache
def _arguments_of(constructor: Callable[..., None]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(constructor).parameters)
    except (TypeError, ValueError):  # it has none that can be read
        return ()


# --- the parts of a training ------------------------------------------------------------------------------------------


def lines_of_module(module: nn.Module) -> list[str]:
    """Return the layers of a module with their settings and modes, and the shapes of its tensors."""
    lines = []
    for name, layer in module.named_modules():
        lines.append(f"{name or 'the whole'}: {text_of(layer)}{'' if layer.training else ' in evaluation mode'}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        lines.append(f"{name}: {' and '.join(map(form_of, parts_of(tensor)))}{' (frozen)' if is_frozen else ''}")
    return lines


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that make up a quantised one; any other as it is."""
    if is_spread(tensor) or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]
