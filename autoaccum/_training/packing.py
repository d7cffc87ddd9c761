"""Packs values into types that plain `torch.load(weights_only=True)` loads, and unpacks them.

NumPy's arrays and numbers are pickled as calls of NumPy's own functions, and those trust their arguments: a file can
have them read and write memory of its choice. So they are stored as tensors under tags of ours, and nothing of NumPy is
ever rebuilt by a pickle.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

# Tags: each is the only key of a dictionary. An array; one number of NumPy; a long tuple of whole numbers (Python's
# random state), which torch's loader reads item by item in milliseconds; a dictionary with keys that need packing
# themselves, or with a tag for its only key.
_ARRAY = "autoaccum.array"
_SCALAR = "autoaccum.scalar"
_NUMBERS = "autoaccum.numbers"
_ITEMS = "autoaccum.items"
_TAGS = frozenset((_ARRAY, _SCALAR, _NUMBERS, _ITEMS))
_MANY = 100
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda items: Counter(dict(items)),
}


class PackingError(ValueError):
    """A value cannot be packed, or what was read is nothing that `packed` makes."""


def packed(value: Any) -> Any:
    """Return a value with everything of NumPy as tensors; what cannot be loaded again otherwise is left as it is.

    Raises:
        PackingError: It holds arrays that no tensor can hold, or itself.
    """
    return _walked(_pack, value)


def unpacked(value: Any) -> Any:
    """Return what `packed` was given.

    Raises:
        PackingError: A tag holds what `packed` never puts there.
    """
    return _walked(_unpack, value)


def without_tensors(value: Any) -> Any:
    """Return a value with None for its tensors: what is left is small, and where surprises are."""
    return _walked(lambda part, walk: None if isinstance(part, Tensor) else _mapped(part, walk), value)


def _walked(function: Callable[[Any, Callable[[Any], Any]], Any], value: Any) -> Any:
    """Apply `function` to a value, which asks for each of its parts in turn; shared parts are asked for once."""
    # By identity: a file may hold few containers each of which is named very often. The value keeps them alive.
    made: dict[int, Any] = {}
    in_progress: set[int] = set()

    def walk(part: Any) -> Any:
        if not isinstance(part, dict | list | tuple):
            return function(part, walk)
        key = id(part)
        if key in made:
            return made[key]
        if key in in_progress:
            raise PackingError(f"a {type(part).__name__} holds itself")
        in_progress.add(key)
        made[key] = function(part, walk)
        in_progress.discard(key)
        return made[key]

    try:
        return walk(value)
    except RecursionError:
        raise PackingError("values are nested too deeply") from None


def _mapped(value: Any, walk: Callable[[Any], Any]) -> Any:
    if type(value) in (dict, OrderedDict):
        return type(value)((key, walk(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(walk(item) for item in value)
    return value


def _pack(value: Any, walk: Callable[[Any], Any]) -> Any:
    if isinstance(value, np.generic):
        return {_SCALAR: _tensor_of(np.asarray(value))}
    if type(value) is np.ndarray:
        return {_ARRAY: _tensor_of(value)}
    if type(value) is tuple and len(value) > _MANY and all(type(item) is int and 0 <= item < 2**63 for item in value):
        return {_NUMBERS: torch.tensor(value)}
    if type(value) in (dict, OrderedDict, Counter) and (_has_keys_of_numpy(value) or _looks_packed(value)):
        return {_ITEMS: [type(value).__name__, [[walk(key), walk(item)] for key, item in value.items()]]}
    return _mapped(value, walk)


def _has_keys_of_numpy(value: dict[Any, Any]) -> bool:
    parts = [*value.keys(), *(value.values() if type(value) is Counter else ())]
    return any(isinstance(part, np.generic) for part in parts)


def _looks_packed(value: Any) -> bool:
    return len(value) == 1 and next(iter(value)) in _TAGS


def _tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=True))
    except TypeError:
        raise PackingError(f"NumPy's type {array.dtype} has no counterpart among tensors") from None


def _unpack(value: Any, walk: Callable[[Any], Any]) -> Any:
    if type(value) is not dict or len(value) != 1 or not _looks_packed(value):
        return _mapped(value, walk)
    tag, kept = next(iter(value.items()))
    if tag == _ITEMS:
        return _items(kept, walk)
    if not is_plain_tensor(kept):
        raise PackingError(f"{tag} holds a {type(kept).__name__} in place of a tensor")
    try:
        array = kept.detach().numpy()
    except (TypeError, RuntimeError):  # a type that NumPy lacks
        raise PackingError(f"{tag} holds a tensor of {kept.dtype}") from None
    if tag == _ARRAY:
        return array
    if tag == _SCALAR and array.ndim == 0:
        return array[()]
    if tag == _NUMBERS and array.ndim == 1 and array.dtype == np.int64:
        return tuple(array.tolist())
    raise PackingError(f"{tag} holds a tensor of shape {tuple(kept.shape)} and {kept.dtype}")


def _items(kept: Any, walk: Callable[[Any], Any]) -> Any:
    is_named = _is_pair(kept) and isinstance(kept[0], str) and kept[0] in _MAPPINGS
    if not is_named or type(kept[1]) is not list or not all(map(_is_pair, kept[1])):
        raise PackingError(f"{_ITEMS} holds no items of a dictionary")
    try:
        return _MAPPINGS[kept[0]]([(walk(key), walk(item)) for key, item in kept[1]])
    except TypeError:
        raise PackingError(f"{_ITEMS} holds a key that is none") from None


def _is_pair(value: Any) -> bool:
    return type(value) is list and len(value) == 2  # noqa: PLR2004 - a pair


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a tensor with numbers in host memory, none of a subclass, and not sparse or quantized."""
    return (
        type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
    )
