"""What a loader and its parts keep from epoch to epoch: random generators, numbers, and the order of lists and arrays.

Looked into are the loader, its samplers, its dataset and its collator, and the objects that these hold, also in short
lists, closures and partial functions. Of anything else that samplers hold, it is known whether it has changed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections import Counter, deque
from types import BuiltinMethodType, FunctionType, GeneratorType, MethodType, ModuleType
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
_CLOSED = (Tensor, torch.optim.Optimizer, np.ndarray, type, ModuleType, _BaseDataLoaderIter, str, bytes)
_CLOSED_PACKAGES = {"random", "multiprocessing", "threading", "queue", "logging"}
# An epoch in progress, in torch's and torchdata's DataLoader.
_IN_PROGRESS = {"_iterator", "next_iter_state", "_initial_iter_for_state_dict", "_IterableDataset_len_called"}
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_BOUND = (functools.partial, MethodType, BuiltinMethodType)
# Parts of a DataLoader that have no say in the order of its samples.
_OF_DATA = {"dataset", "collate_fn", "worker_init_fn"}
_PRINT = "#"  # ends the paths of fingerprints


class LoaderMemory:
    """The generators, numbers and orders of a loader, by the paths that lead to them ("batch_sampler.rng").

    Args:
        loader: Any loader; one that deals out another to ranks has that one as `whole_loader`.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = getattr(loader, "whole_loader", loader)
        held = _held_by(self._loader)
        self._orders = {path: list(_keys_of(value)) for path, _, _, value in held if _has_order(value)}
        self._first, self._first_prints = self.capture(), self._prints()
        self._moving: set[str] = set()  # numbers that have ever changed; the others are settings

    def capture(self) -> dict[str, Any]:
        """Return all numbers, the states of generators, and orders that have changed; they are never modified."""
        taken: dict[str, Any] = {}
        for path, _, _, value in _held_by(self._loader):
            if _is_number(number := _plain(value)):
                taken[path] = number
            elif is_generator(value):
                (taken[path],) = states_of([value])
            elif path in self._orders and _has_order(value):
                first, now = self._orders[path], _keys_of(value)
                if now != first and Counter(now) == Counter(first):
                    taken[path] = list(now)
        return taken

    def take_what_moves(self) -> dict[str, Any]:
        """Return what `take` does, of numbers those that ever changed, and fingerprints of what else has changed."""
        taken, prints, first, before = self.capture(), self._prints(), self._first, self._first_prints
        for path, value in taken.items():
            # An item that a list or dict has got is told of by the fingerprint of the list.
            is_new = path[-1] != "]" if path not in first else not _is_number(first[path]) or value != first[path]
            if _is_number(value) and is_new:
                self._moving.add(path)
        taken = {path: value for path, value in taken.items() if not _is_number(value) or path in self._moving}
        return taken | {path: prints.get(path) for path in before | prints if prints.get(path) != before.get(path)}

    def restore(self, taken: Mapping[str, Any]) -> list[str]:
        """Restore what was taken, here or in another process; return the paths of what could not be."""
        restored = self._put_back_orders(taken)  # first: they say what the paths in a list lead to
        held = {"": self._loader}
        for path, owner, key, value in list(_held_by(self._loader)):
            held[path], kept = value, taken.get(path, self)
            if is_generator(value) and path in taken and _is_state(kept):
                set_states([value], [kept])
                restored.add(path)
            elif kept is None if is_generator(value) else _is_number(kept) and _is_number(_plain(value)):
                self._moving.add(path)
                if _plain(value) == kept or _set(owner, key, value, kept):
                    restored.add(path)
        for path in taken.keys() - held.keys():  # attributes that come during an epoch
            where, _, name = path.rpartition(".")
            if name.isidentifier() and _is_number(taken[path]) and _set(held.get(where), name, None, taken[path]):
                self._moving.add(path)
                restored.add(path)
        prints = self._prints()
        restored |= {path for path in taken if path.endswith(_PRINT) and prints.get(path) == taken[path]}
        lost = {path.rstrip(_PRINT) for path in taken.keys() - restored}
        return sorted(path for path in lost if not any(path.startswith((f"{one}.", f"{one}[")) for one in lost))

    def _put_back_orders(self, taken: Mapping[str, Any]) -> set[str]:
        restored = set()
        for path, _, _, value in list(_held_by(self._loader)):
            if path in self._orders and _has_order(value):
                now, order = _keys_of(value), taken.get(path, self._orders[path])
                if isinstance(order, list) and Counter(order) == Counter(now):
                    restored.add(path)
                    if order != now:
                        items = dict(zip(now, value, strict=True))
                        value[:] = [items[key] for key in order]
        return restored

    def check(self, taken: Mapping[str, Any]) -> None:
        """Check that what was taken has all generators that the loader and its samplers had first.

        Raises:
            CheckpointError: One is missing.
        """
        there, here = ({path for path in of_order(side) if _is_state(side[path])} for side in (taken, self._first))
        if any(path not in taken and path + _PRINT not in taken for path in here):
            raise CheckpointError(
                f"the checkpoint was made with a loader that has {len(there)} random generators of its own, and this "
                f"one has {len(here)} ({', '.join(sorted(here))}); pass the same loader"
            )

    def _prints(self) -> dict[str, int]:
        """Return a fingerprint of all that is no number; of a dataset or collator of what holds items alone."""
        prints, of_data = {}, set()
        for path, _, _, value in _held_by(self._loader):
            if is_of_data := not _OF_DATA.isdisjoint(path.replace("[", ".").split(".")):
                of_data.add(id(value))  # a sampler may hold it too
            has_items = isinstance(value, (*_CONTAINERS, Tensor, np.ndarray))
            if not _is_number(_plain(value)) and (has_items if is_of_data else id(value) not in of_data):
                prints[path + _PRINT] = _print_of(value)
        return prints


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
            place = f"{path}[{key!r}]" if isinstance(owner, _CONTAINERS) else f"{path}.{key}".lstrip(".")
            if id(value) not in seen or not is_generator(value):
                yield place, owner, key, value
            if id(value) in seen or len(seen) > _MOST_OBJECTS:
                continue
            if is_open := _is_open(value):
                waiting.append((place, value))
            if is_open or is_generator(value):
                seen.add(id(value))


def _members(owner: Any) -> list[tuple[Any, Any]]:
    """Return what an object holds, by key, index or name."""
    if isinstance(owner, _CONTAINERS):
        return list(owner.items() if isinstance(owner, dict) else enumerate(owner))
    if isinstance(owner, _BOUND):
        names = ("func", "args", "keywords", "__self__")
        return [(name, getattr(owner, name)) for name in names if hasattr(owner, name)]
    if isinstance(owner, FunctionType):
        found = {"__defaults__": owner.__defaults__, "__kwdefaults__": owner.__kwdefaults__}
        with contextlib.suppress(ValueError):  # one is not yet assigned
            found.update(inspect.getclosurevars(owner).nonlocals)
        return list(found.items())
    return [(name, value) for name, value in _attributes(owner).items() if name not in _IN_PROGRESS]


def _attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes that an object has itself, those in slots too, and the generators of its class."""
    state: Any = object.__getstate__(owner)
    own, slots = state if isinstance(state, tuple) else (state, None)
    of_class = (vars(one).items() for one in reversed(type(owner).__mro__))
    shared = {name: value for name, value in itertools.chain.from_iterable(of_class) if is_generator(value)}
    return {**shared, **(own or {}), **(slots or {})}


def _is_open(value: Any) -> bool:
    """Whether to look into a value."""
    if isinstance(value, set | frozenset):
        return len(value) == 1  # the order of several differs between processes
    if isinstance(value, _CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        return len(value) > 0 and (len(value) <= _MOST_ITEMS or all(map(is_generator, items)))
    if isinstance(value, (*_BOUND, FunctionType)):
        return True
    if isinstance(value, nn.Module):  # a transform, else a model
        return next(value.parameters(), None) is None
    if isinstance(value, _CLOSED) or type(value).__module__.partition(".")[0] in _CLOSED_PACKAGES:
        return False
    return bool(_attributes(value))


def _print_of(value: Any) -> int:
    """Return a number that changes with a value, without what it leads to that is looked into itself."""
    content: Any = None
    if isinstance(value, _CONTAINERS) and _is_open(value):
        content = [len(value), *(value if isinstance(value, dict) else ())]
    elif isinstance(value, Tensor | np.ndarray | str | bytes | dict | list | tuple):
        content = value
    elif isinstance(value, deque | itertools.count):
        content = repr(value)
    elif isinstance(value, GeneratorType):
        content = inspect.getgeneratorstate(value) == inspect.GEN_SUSPENDED
    elif type(value).__module__.startswith("numpy.random."):  # a generator or seeds, which count what they spawn
        seeds: Any = getattr(getattr(value, "bit_generator", value), "seed_seq", value)
        content = getattr(seeds, "n_children_spawned", None)
    return fingerprint_of([type(value).__name__, content])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, bool, type(None))


def _plain(value: Any) -> Any:
    """Return the number that an array or a tensor without dimensions holds, and any other value as it is."""
    is_single = isinstance(value, np.generic | np.ndarray) or (type(value) is Tensor and value.device.type == "cpu")
    return value.item() if is_single and value.ndim == 0 else value


def _set(owner: Any, key: Any, value: Any, kept: Any) -> bool:
    """Put a number in the place of a value, in its type; return whether that is possible."""
    try:
        if isinstance(value, Tensor | np.ndarray):
            value[...] = kept  # processes may share it
            return True
        kept = type(value)(kept) if isinstance(value, np.generic) else kept
        if isinstance(owner, dict | list | deque):
            owner[key] = kept
        else:
            object.__setattr__(owner, key, kept)  # a DataLoader refuses some
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(owner, FunctionType)  # which has its variables elsewhere


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
