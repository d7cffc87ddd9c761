"""What a loader and its parts keep from epoch to epoch: random generators, numbers, and the order of lists and arrays.

Looked into are the loader, its samplers, its dataset and its collator, and the objects that these hold, also in short
lists, closures and partial functions.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import deque
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autoaccum._data.fingerprint import fingerprint_of
from autoaccum._data.random_state import is_generator, set_states, states_of
from autoaccum.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Objects that are looked into, and items of a list that is: what holds more is data.
_MOST_OBJECTS, _MOST_ITEMS = 2_000, 64
# Items of a list whose order is watched.
_MOST_ORDERED = 1_000_000
# Never looked into.
_CLOSED = (nn.Module, Tensor, torch.optim.Optimizer, np.ndarray, type, ModuleType, _BaseDataLoaderIter, str, bytes)
_CLOSED_PACKAGES = {"multiprocessing", "threading", "queue", "logging"}
# An epoch in progress, in torch's and torchdata's DataLoader.
_IN_PROGRESS = {"_iterator", "next_iter_state", "_initial_iter_for_state_dict", "_IterableDataset_len_called"}
# Parts of a DataLoader that have no say in the order of its samples.
_OF_DATA = {"dataset", "collate_fn", "worker_init_fn"}
# Under which an order has the places that items had first.
_PLACES = "places"


class LoaderMemory:
    """The generators, numbers and orders of a loader, by the paths that lead to them ("batch_sampler.rng").

    Args:
        loader: Any loader; one that deals out another to ranks has that one as `whole_loader`.
    """

    def __init__(self, loader: Any) -> None:
        # The key stands for a list of batches, which is no part of anything.
        self._held = {"batches": getattr(loader, "whole_loader", loader)}
        self._items = {path: value.copy() for path, _, _, value in self._walk() if _has_order(value)}
        self._generators: dict[str, Any] = {}
        self._first = self.take()
        self._moving: set[str] = set()  # numbers that have ever changed; the others are settings

    def _walk(self) -> Iterator[tuple[str, Any, Any, Any]]:
        loader = self._held["batches"]
        return chain([("batches", self._held, "batches", loader)], _held_by(loader))

    def take(self) -> dict[str, Any]:
        """Return all numbers, the states of generators, and orders that have changed; they are never modified."""
        taken: dict[str, Any] = {}
        self._generators = {}
        for path, _, _, value in self._walk():
            if _is_number(value):
                taken[path] = value
            elif is_generator(value):
                self._generators[path] = value
            elif path in self._items and (order := _order_of(value, self._items[path])) is not None:
                taken[path] = order
        return taken | self.generators_now()

    def take_what_moves(self) -> dict[str, Any]:
        """Return what `take` does, without numbers that have not changed since this object was made."""
        taken = self.take()
        for path, value in taken.items():
            if _is_number(value) and value != self._first.get(path, value):
                self._moving.add(path)
        return {path: value for path, value in taken.items() if not _is_number(value) or path in self._moving}

    def generators_now(self) -> dict[str, Any]:
        """Return the states of the generators that `take` found last."""
        return {path: states_of([generator])[0] for path, generator in self._generators.items()}

    def set_generators(self, states: Mapping[str, Any]) -> None:
        """Restore the states that `generators_now` has returned, here or in another process."""
        for path, _, _, value in self._walk():
            if is_generator(value) and path in states:
                set_states([value], [states[path]])

    def put_back(self, taken: Mapping[str, Any]) -> list[str]:
        """Restore what was taken, here or in another process; return the paths of what could not be."""
        restored = set()
        for path, _, _, value in list(self._walk()):  # orders first: they say what the paths in a list lead to
            first: Any = self._items.get(path, ())
            kept: Any = taken.get(path)
            if kept is None and _order_of(value, first) is not None:
                value[:] = first
            elif _is_order(kept, first) and len(value) == len(first):
                value[:] = _ordered(first, kept)
                restored.add(path)
        for path, owner, key, value in list(self._walk()):
            kept = taken.get(path)
            if is_generator(value) and kept is not None and not _is_number(kept):
                set_states([value], [kept])
                restored.add(path)
            elif _is_number(value) and _is_number(kept) and not isinstance(owner, tuple | CellType):
                self._moving.add(path)
                _set(owner, key, kept)
                restored.add(path)
        return sorted(taken.keys() - restored)

    def check(self, taken: Mapping[str, Any]) -> list[str]:
        """Return which generators of the data were there first, and are not among what was taken.

        Raises:
            CheckpointError: The loader or its samplers have such a generator.
        """
        there, here = ({path for path, value in side.items() if _is_state(value)} for side in (taken, self._first))
        if any(map(_is_of_order, here - there)):
            counts = [sum(map(_is_of_order, side)) for side in (there, here)]
            raise CheckpointError(
                f"the checkpoint was made with a loader that has {counts[0]} random generators of its own, and this "
                f"one has {counts[1]} ({', '.join(sorted(filter(_is_of_order, here)))}); pass the same loader"
            )
        return sorted(here - there)


def of_order(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return of what was taken what a dataset and a collator do not hold."""
    return {path: value for path, value in taken.items() if _is_of_order(path)}


def _is_of_order(path: str) -> bool:
    return path.partition(".")[0] not in _OF_DATA


def generators_of(loader: Any) -> list[Any]:
    """Return the generators of a loader and its parts."""
    return [value for *_, value in _held_by(getattr(loader, "whole_loader", loader)) if is_generator(value)]


def data_loaders_in(loader: Any) -> list[DataLoader[Any]]:
    """Return the DataLoaders among a loader and its parts."""
    held = [loader, *(value for *_, value in _held_by(loader))]
    return list({id(one): one for one in held if isinstance(one, DataLoader)}.values())


def _held_by(loader: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield what the loader and its parts hold: its path, its owner, its key there and itself; generators once."""
    seen: set[int] = {id(loader)}
    waiting = deque([("", loader)])
    while waiting:
        path, owner = waiting.popleft()
        for key, value in _members(owner):
            place = f"{path}[{key!r}]" if isinstance(owner, dict | list | tuple) else f"{path}.{key}".lstrip(".")
            if id(value) not in seen or not is_generator(value):
                yield place, owner, key, value
            if id(value) in seen or len(seen) > _MOST_OBJECTS:
                continue
            if is_generator(value):
                seen.add(id(value))
            elif _is_open(value):
                seen.add(id(value))
                waiting.append((place, value))


def _members(owner: Any) -> list[tuple[Any, Any]]:
    """Return what an object holds, by key, index or name."""
    found: dict[Any, Any] = {}
    if isinstance(owner, dict):
        found = owner
    elif isinstance(owner, list | tuple):
        found = dict(enumerate(owner))
    elif isinstance(owner, functools.partial):
        found = {"func": owner.func, "args": owner.args, "keywords": owner.keywords}
    elif isinstance(owner, MethodType):
        found = {"self": owner.__self__}
    elif isinstance(owner, FunctionType):
        found = dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True))
    elif isinstance(owner, CellType):
        with contextlib.suppress(ValueError):  # it is empty
            found = {"value": owner.cell_contents}
    else:
        slots = (name for kind in type(owner).__mro__ for name in _names_in(getattr(kind, "__slots__", ())))
        found = {name: getattr(owner, name) for name in slots if hasattr(owner, name)} | getattr(owner, "__dict__", {})
        found = {name: value for name, value in found.items() if name not in _IN_PROGRESS}
    return list(found.items())


def _names_in(slots: Any) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _is_open(value: Any) -> bool:
    """Whether to look into a value."""
    if isinstance(value, dict | list | tuple):
        return 0 < len(value) <= _MOST_ITEMS
    if isinstance(value, FunctionType):
        return value.__closure__ is not None
    if isinstance(value, functools.partial | MethodType | CellType):
        return True
    if isinstance(value, _CLOSED) or type(value).__module__.partition(".")[0] in _CLOSED_PACKAGES:
        return False
    return hasattr(value, "__dict__") or any("__slots__" in vars(kind) for kind in type(value).__mro__)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, bool)


def _set(owner: Any, key: Any, value: float) -> None:
    if isinstance(owner, dict | list):
        owner[key] = value
    else:
        object.__setattr__(owner, key, value)  # a DataLoader refuses some


def _is_state(value: Any) -> bool:
    """Whether what was taken is the state of a generator."""
    return not _is_number(value) and not (isinstance(value, dict) and _PLACES in value)


# --- the order of lists and arrays ------------------------------------------------------------------------------------


def _has_order(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iufUS" and len(value) <= _MOST_ORDERED
    return type(value) is list and len(value) <= _MOST_ORDERED


def _order_of(now: Any, first: Any) -> dict[str, Any] | None:
    """Return in which order items are that were in another one first; None if they are not, or are others."""
    if type(now) is not type(first) or len(now) != len(first) or not len(first):
        return None
    keys, before = map(_keys_of, (now, first))
    if np.array_equal(keys, before):
        return None
    sorting, sorting_before = np.argsort(keys, kind="stable"), np.argsort(before, kind="stable")
    if not np.array_equal(keys[sorting], before[sorting_before]):
        return None
    places = np.empty(len(first), np.int32)
    places[sorting] = sorting_before
    return {_PLACES: places, "first": _checksum(first), "now": _checksum(now)}


def _keys_of(items: Any) -> Any:
    return items if isinstance(items, np.ndarray) else np.fromiter(map(id, items), np.int64, len(items))


def _is_order(kept: Any, first: Any) -> bool:
    """Whether an order was taken of the same items, which are here as they were first there, or as they were then."""
    is_order = isinstance(kept, dict) and _PLACES in kept and len(kept[_PLACES]) == len(first)
    return is_order and _checksum(first) in (kept["first"], kept["now"])


def _ordered(first: Any, order: dict[str, Any]) -> Any:
    if _checksum(first) == order["now"]:  # the loader is one that has trained in this process
        return first
    places = order[_PLACES]
    return first[places] if isinstance(first, np.ndarray) else [first[place] for place in places.tolist()]


def _checksum(items: Any) -> int:
    if isinstance(items, np.ndarray):
        return zlib.crc32(items.tobytes())
    if not all(type(item) in (int, str) for item in items):  # whose own representation is faster
        items = list(map(fingerprint_of, items))
    return zlib.crc32(repr(items).encode())
