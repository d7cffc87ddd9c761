"""Reads a loader's first batches and then restores its random state and its counters.

Callers do not use it on loaders that cannot be read twice, such as generators. State that a dataset keeps in lists or
files is not restored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

import torch

from autoaccum._data.random_state import OwnGenerators, RandomState, own_generators
from autoaccum._system.exceptions import contextmanager

_PLAIN = (bool, int, float, str, type(None))


def can_be_looked_at(loader: Any) -> bool:
    """Whether iteration over a loader can be started, abandoned and started again.

    False for a loader that is its own iterator, and for one that keeps its position (torchdata's StatefulDataLoader),
    which continues where it stopped.
    """
    return not isinstance(loader, Iterator) and not hasattr(loader, "load_state_dict")


def can_be_read_once(loader: Any) -> bool:
    """Whether a loader certainly yields its batches only once; a user's class may restart in `__iter__`."""
    own = isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", itertools.__name__)
    return own or isinstance(loader, GeneratorType)


@contextmanager
def left_as_it_was(loader: Any) -> Iterator[None]:
    """Restore random state, the loader's generators and counters, and persistent workers."""
    shared = RandomState(torch.device("cpu"))
    shared.take()
    owners = _owners(loader)
    own = OwnGenerators(own_generators(value for owner in owners for value in vars(owner).values()))
    standing = getattr(loader, "_iterator", None)
    if standing is not None:
        loader._iterator = None
    try:
        with counters_kept(owners):
            yield
    finally:
        if hasattr(loader, "_iterator"):
            loader._iterator = standing  # workers started here end with their iterator
        own.put_back()
        shared.put_back()


@contextmanager
def counters_kept(owners: Iterable[Any]) -> Iterator[None]:
    """Restore the numbers, flags and strings that objects hold as attributes, such as call counts or an epoch."""
    kept = [
        (owner, {name: value for name, value in vars(owner).items() if isinstance(value, _PLAIN)}) for owner in owners
    ]
    try:
        yield
    finally:
        for owner, plain in kept:
            for name in [name for name in vars(owner) if name not in plain and _begins_with_class(owner, name)]:
                del vars(owner)[name]
            vars(owner).update(plain)


def _begins_with_class(owner: Any, name: str) -> bool:
    """Whether an attribute shadows one of its class, such as a counter that starts there (`calls = 0`)."""
    return isinstance(vars(owner)[name], _PLAIN) and isinstance(getattr(type(owner), name, owner), _PLAIN)


def _owners(loader: Any) -> list[Any]:
    """Return the loader, its samplers and its dataset."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, batch_sampler, getattr(loader, "dataset", None)]
    parts += [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
    return list({id(part): part for part in parts if hasattr(part, "__dict__") and not isinstance(part, type)}.values())
