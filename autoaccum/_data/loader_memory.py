"""What a loader and its parts keep from epoch to epoch: random generators, numbers, and the order of lists and arrays.

Looked into are the loader, its samplers, its dataset and its collator, and the objects that these hold, also in short
lists, closures and partial functions.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter, deque
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

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


class LoaderMemory:
    """The generators, numbers and orders of a loader, by the paths that lead to them ("batch_sampler.rng").

    Args:
        loader: Any loader; one that deals out another to ranks has that one as `whole_loader`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = getattr(loader, "whole_loader", loader)
        held = _held_by(self._loader)
        self._orders = {path: list(_keys_of(value)) for path, _, _, value in held if _has_order(value)}
        self._first = self.take()
        self._moving: set[str] = set()  # numbers that have ever changed; the others are settings

    def take(self) -> dict[str, Any]:
        """Return all numbers, the states of generators, and orders that have changed; they are never modified."""
        taken: dict[str, Any] = {}
        for path, _, _, value in _held_by(self._loader):
            if _is_number(value):
                taken[path] = value
            elif is_generator(value):
                (taken[path],) = states_of([value])
            elif path in self._orders and _has_order(value):
                first, now = self._orders[path], _keys_of(value)
                if now != first and Counter(now) == Counter(first):
                    taken[path] = list(now)
        return taken

    def take_what_moves(self) -> dict[str, Any]:
        """Return what `take` does, without numbers that have not changed since this object was made."""
        taken = self.take()
        for path, value in taken.items():
            if _is_number(value) and value != self._first.get(path, value):
                self._moving.add(path)
        return {path: value for path, value in taken.items() if not _is_number(value) or path in self._moving}

    def put_back(self, taken: Mapping[str, Any]) -> list[str]:
        """Restore what was taken, here or in another process; return the paths of what could not be."""
        restored = set()
        # Orders first: they say what the paths in a list lead to.
        for path, _, _, value in list(_held_by(self._loader)):
            if path in self._orders and _has_order(value):
                now, order = _keys_of(value), taken.get(path, self._orders[path])
                if isinstance(order, list) and Counter(order) == Counter(now):
                    restored.add(path)
                    if order != now:
                        items = dict(zip(now, value, strict=True))
                        value[:] = [items[key] for key in order]
        for path, owner, key, value in list(_held_by(self._loader)):
            kept: Any = taken.get(path)
            if is_generator(value) and kept is not None and not _is_number(kept):
                set_states([value], [kept])
                restored.add(path)
            elif _is_number(value) and _is_number(kept):
                self._moving.add(path)
                if not isinstance(owner, tuple | FunctionType):
                    _set(owner, key, kept)
                elif value != kept:
                    continue
                restored.add(path)
        return sorted(taken.keys() - restored)

    def check(self, taken: Mapping[str, Any]) -> None:
        """Check that what was taken has all generators that the loader and its samplers had first.

        Raises:
            CheckpointError: One is missing.
        """
        there, here = ({path for path in of_order(side) if _is_state(side[path])} for side in (taken, self._first))
        if here - there:
            raise CheckpointError(
                f"the checkpoint was made with a loader that has {len(there)} random generators of its own, and this "
                f"one has {len(here)} ({', '.join(sorted(here))}); pass the same loader"
            )


def of_order(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return of what was taken what a dataset and a collator do not hold."""
    return {path: value for path, value in taken.items() if path.partition(".")[0] not in _OF_DATA}


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
    elif isinstance(owner, functools.partial | MethodType):
        names = ("func", "args", "keywords", "__self__")
        found = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    elif isinstance(owner, FunctionType):
        with contextlib.suppress(ValueError):  # one is not yet assigned
            found = dict(inspect.getclosurevars(owner).nonlocals)
    else:
        found = {name: value for name, value in _attributes(owner).items() if name not in _IN_PROGRESS}
    return list(found.items())


def _attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes that an object has itself, those in slots too."""
    state: Any = object.__getstate__(owner)
    own, slots = state if isinstance(state, tuple) else (state, None)
    return {**(own or {}), **(slots or {})}


def _is_open(value: Any) -> bool:
    """Whether to look into a value."""
    if isinstance(value, dict | list | tuple):
        return 0 < len(value) <= _MOST_ITEMS
    if isinstance(value, functools.partial | MethodType | FunctionType):
        return True
    if isinstance(value, _CLOSED) or type(value).__module__.partition(".")[0] in _CLOSED_PACKAGES:
        return False
    return bool(_attributes(value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, bool)


def _set(owner: Any, key: Any, value: float) -> None:
    if isinstance(owner, dict | list):
        owner[key] = value
    else:
        object.__setattr__(owner, key, value)  # a DataLoader refuses some


def _is_state(value: Any) -> bool:
    """Whether what was taken is the state of a generator."""
    return not _is_number(value) and not isinstance(value, list)


def _has_order(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iufU" and len(value) <= _MOST_ORDERED
    return type(value) is list and len(value) <= _MOST_ORDERED


def _keys_of(items: Any) -> list[Any]:
    """Return the items, or of items other than numbers, texts and tuples what tells them apart within this process."""
    if isinstance(items, np.ndarray):
        return items.tolist()  # type: ignore[no-any-return]
    return items if all(map(_is_plain, items)) else list(map(id, items))


def _is_plain(item: Any) -> bool:
    return type(item) in (int, float, str) or (type(item) is tuple and all(map(_is_plain, item)))
