"""What a loader and its parts keep from epoch to epoch: random generators and numbers that they hold.

Looked into are the loader, its samplers, its dataset and its collator, and the objects that these hold, also in short
lists, closures and partial functions. Of longer lists and arrays, only a new order of the same items is seen.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
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
    """The generators and numbers of a loader, by the paths that lead to them ("batch_sampler.rng").

    Args:
        loader: Any loader; one that deals out another to ranks has that one as `whole_loader`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = getattr(loader, "whole_loader", loader)
        self._first, self._orders = self.take(), []
        for path, _, _, value in [("the list", None, None, self._loader), *_held_by(self._loader)]:
            if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim == 1):
                if len(value) <= _MOST_ORDERED:
                    self._orders.append((path, value, value.copy()))
        self._moving: set[str] = set()  # numbers that have ever changed; the others are settings

    def take(self) -> dict[str, Any]:
        """Return the states of all generators and the values of all numbers, which are never modified."""
        return {
            path: value if _is_number(value) else states_of([value])[0]
            for path, _, _, value in _held_by(self._loader)
            if _is_number(value) or is_generator(value)
        }

    def take_what_moves(self) -> dict[str, Any]:
        """Return what `take` does, without numbers that have not changed since this object was made."""
        taken = self.take()
        for path, value in taken.items():
            if _is_number(value) and value != self._first.get(path, value):
                self._moving.add(path)
        return {path: value for path, value in taken.items() if not _is_number(value) or path in self._moving}

    def changed(self) -> tuple[str, ...]:
        """Return what has changed that cannot be restored elsewhere: lists in another order, and later generators."""
        reordered = [path for path, value, before in self._orders if _is_reordered(value, before)]
        later = [path for path, _, _, value in _held_by(self._loader) if is_generator(value)]
        return (*reordered, *(path for path in later if path not in self._first))

    def put_back(self, taken: Mapping[str, Any]) -> list[str]:
        """Restore what was taken, here or in another process; return the paths of what could not be."""
        here = {path: (owner, key, value) for path, owner, key, value in _held_by(self._loader)}
        lost = []
        for path, kept in taken.items():
            owner, key, value = here.get(path, (None, None, None))
            if not _is_number(kept) and is_generator(value):
                set_states([value], [kept])
            elif _is_number(kept) and _is_number(value) and not isinstance(owner, tuple | CellType):
                self._moving.add(path)
                if value != kept:
                    _set(owner, key, kept)
            else:
                lost.append(path)
        return lost

    def check(self, taken: Mapping[str, Any], changed: tuple[str, ...]) -> list[str]:
        """Return which generators of the data are here, and were not where `taken` and `changed` are from.

        Raises:
            CheckpointError: The loader or its samplers have other generators.
        """
        sides = [{path for path, value in side.items() if not _is_number(value)} for side in (taken, self._first)]
        there, here = sides[0].difference(changed), sides[1]
        of_order = [sorted(filter(_is_of_order, side)) for side in (there, here)]
        if of_order[0] != of_order[1]:
            told = [f" ({', '.join(paths)})" if paths else "" for paths in of_order]
            raise CheckpointError(
                f"the checkpoint was made with a loader that has {len(of_order[0])} random generators of its "
                f"own{told[0]}, and this one has {len(of_order[1])}{told[1]}; pass the same loader"
            )
        return sorted(here - there)


def of_order(taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return of what was taken what a dataset and a collator do not hold."""
    return {path: value for path, value in taken.items() if _is_of_order(path)}


def _is_of_order(path: str) -> bool:
    return path.split(".")[0] not in _OF_DATA


def generators_of(loader: Any) -> list[Any]:
    """Return the generators of a loader and its parts."""
    return [value for *_, value in _held_by(getattr(loader, "whole_loader", loader)) if is_generator(value)]


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
    if isinstance(owner, dict):
        return list(owner.items())
    if isinstance(owner, list | tuple):
        return list(enumerate(owner))
    if isinstance(owner, functools.partial):
        return [("func", owner.func), ("args", owner.args), ("keywords", owner.keywords)]
    if isinstance(owner, MethodType):
        return [("self", owner.__self__)]
    if isinstance(owner, FunctionType):
        return list(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True))
    if isinstance(owner, CellType):
        try:
            return [("value", owner.cell_contents)]
        except ValueError:  # it is empty
            return []
    slots = (name for kind in type(owner).__mro__ for name in _names_in(getattr(kind, "__slots__", ())))
    found = {name: getattr(owner, name) for name in slots if hasattr(owner, name)} | getattr(owner, "__dict__", {})
    return [(name, value) for name, value in found.items() if name not in _IN_PROGRESS]


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


def _is_reordered(now: Any, before: Any) -> bool:
    """Whether a list or an array holds what it held before, in another order."""
    if len(now) != len(before):
        return False
    if isinstance(now, np.ndarray):
        return not np.array_equal(now, before) and np.array_equal(np.sort(now), np.sort(before))
    if all(map(operator.is_, now, before)):
        return False
    return sorted(map(id, now)) == sorted(map(id, before))
