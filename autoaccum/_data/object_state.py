"""Snapshots the state of a user's object before a call, and restores it in place if the call failed.

Containers, arrays, tensors and objects are followed to any depth and restored in place, so that other references to
them stay valid. The cost grows with the number of objects, not with the length of a list of numbers: a state that
grows with every call must not make every call slower. If there are more than a few thousand objects, or one of a kind
that cannot be followed, the snapshot is incomplete, and nothing is restored.
"""

from __future__ import annotations

import array
import enum
import functools
import inspect
import io
import logging
import pathlib
import random
import re
import threading
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# Limits: objects followed, which takes a few milliseconds at most, and bytes of arrays and tensors copied.
_OBJECTS = 10_000
_BYTES = 2**24
# A list with more tensors than this accumulates them: it grows, and its tensors are no longer written.
_GATHERED = 64
_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))
# Not followed: immutable values, and what is not part of a metric's count (code, modules with parameters, files).
_LEAVES = (
    *(bool, int, float, complex, str, bytes, type(None), type, range, slice, frozenset, enum.Enum),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.MappingProxyType),
    *(functools.partial, property, staticmethod, classmethod, inspect.Signature, re.Pattern),
    *(pathlib.PurePath, io.IOBase, logging.Logger, np.generic, np.dtype, np.ufunc),
    *(nn.Module, nn.Parameter, torch.dtype, torch.device, torch.Size),
    *(type(threading.Lock()), type(threading.RLock()), type(...)),
)


class Holdings:
    """A snapshot of the current state of some objects.

    Args:
        roots: The objects. Modules among them are followed; modules found inside them are not.
        follows: Whether an object that is no container is followed; None follows all.

    Attributes:
        is_complete: Whether everything was recorded, so that it can be restored.
    """

    def __init__(self, roots: Iterable[Any], *, follows: Callable[[Any], bool] | None = None) -> None:
        self.is_complete = True
        self._follows = follows
        self._undo: list[Callable[[], None]] = []
        self._bytes = 0
        self._tensors: list[tuple[Tensor, int]] = []  # too large to copy: restorable only if not written
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that their ids are not reused
        coming: deque[Any] = deque()
        for root in roots:
            self._seen[id(root)] = root
            coming.extend(self._attributes(root))
        while coming:
            value = coming.popleft()
            if type(value) in _ATOMS or isinstance(value, _LEAVES) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if len(self._seen) > _OBJECTS:
                self.is_complete = False
                return
            coming.extend(self._held_by(value))

    @property
    def can_be_put_back(self) -> bool:
        """Whether everything can be restored, whatever is written meanwhile."""
        return self.is_complete and not self._tensors

    def put_back(self) -> bool:
        """Restore the state; return whether that was possible."""
        if not self.is_complete or any(tensor._version != version for tensor, version in self._tensors):
            return False
        for undo in self._undo:
            undo()
        return True

    def _held_by(self, value: Any) -> list[Any]:
        """Record what one object holds, and return the objects to follow."""
        notes: dict[Any, Callable[[Any], list[Any]]] = {
            list | deque: self._note_sequence,
            dict: self._note_mapping,
            set: self._note_set,
            bytearray | array.array: self._note_numbers,
            tuple: _to_follow,
            Tensor: self._note_tensor,
            np.ndarray: self._note_array,
        }
        for kind, note in notes.items():
            if isinstance(value, kind):
                return note(value)
        if self._follows is not None and not self._follows(value):
            return []
        if isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        return self._attributes(value)

    def _note_sequence(self, value: Any) -> list[Any]:
        items = list(value)
        self._undo.append(functools.partial(_refill, value.clear, value.extend, items))
        own = self._own_attributes(value, list, deque)
        if len(items) > _GATHERED and set(map(type, items)) == {Tensor} and not items[0].is_inference():
            self._tensors += [(tensor, tensor._version) for tensor in items]
            return own
        return [*_to_follow(items), *own]

    def _note_mapping(self, value: Any) -> list[Any]:
        content = dict(value)
        self._undo.append(functools.partial(_refill, value.clear, value.update, content))
        return [*_to_follow(list(content.values())), *self._own_attributes(value, dict)]

    def _note_set(self, value: Any) -> list[Any]:
        self._undo.append(functools.partial(_refill, value.clear, value.update, set(value)))
        return []

    def _note_numbers(self, value: Any) -> list[Any]:
        self._undo.append(functools.partial(value.__setitem__, slice(None), value[:]))
        return []

    def _note_tensor(self, tensor: Tensor) -> list[Any]:
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes > _BYTES and not tensor.is_inference():
            self._tensors.append((tensor, tensor._version))
        else:
            self._undo.append(functools.partial(_write, tensor, tensor.detach().clone()))
        return []

    def _note_array(self, values: Any) -> list[Any]:
        if not values.flags.writeable:
            return []
        self._bytes += values.nbytes
        if self._bytes > _BYTES:
            self.is_complete = False
            return []
        self._undo.append(functools.partial(np.copyto, values, values.copy()))
        return list(values.flat) if values.dtype == object else []

    def _own_attributes(self, value: Any, *kinds: type) -> list[Any]:
        return [] if type(value) in kinds or not hasattr(value, "__dict__") else self._attributes(value)

    def _attributes(self, value: Any) -> list[Any]:
        slots = [name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)]
        if not slots and not hasattr(value, "__dict__"):
            self.is_complete = False  # a type that hides its contents
            return []
        found = [getattr(value, name) for name in slots]
        for name, held in zip(slots, found, strict=True):
            self._undo.append(functools.partial(_set, value, name, held))
        if hasattr(value, "__dict__"):
            attributes = dict(vars(value))
            self._undo.append(functools.partial(_refill, vars(value).clear, vars(value).update, attributes))
            found += attributes.values()
        return found


def _to_follow(items: Sequence[Any]) -> list[Any]:
    # At C speed, since a list of numbers may have millions.
    return [] if _ATOMS.issuperset(set(map(type, items))) else list(items)


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    hidden = f"_{kind.__name__.lstrip('_')}"
    names = [f"{hidden}{name}" if name.startswith("__") and not name.endswith("__") else name for name in names]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _refill(clear: Callable[[], None], fill: Callable[[Any], None], content: Any) -> None:
    clear()
    fill(content)


def _set(value: Any, name: str, held: Any) -> None:
    object.__setattr__(value, name, held)


def _write(tensor: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape == before.shape:
            # A write would forbid the backward pass of a graph that holds it. Fakes have no values to compare.
            if type(tensor) is not Tensor or tensor.is_meta or not torch.equal(tensor, before):
                tensor.copy_(before)
        else:
            tensor.data = before
