"""Reads a loader's first batches and then restores its random state and its counters.

Callers leave alone what cannot be read twice, such as a generator. What a dataset keeps in lists or files is not
restored.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import numpy as np
import torch

from autoaccum._snapshot import OwnGenerators, RandomState

_PLAIN = (bool, int, float, str, type(None))
_GENERATORS = (torch.Generator, random.Random, np.random.Generator)


def can_be_looked_at(loader: Any) -> bool:
    """Whether a loader can be begun, left and begun again.

    Not one that is its own iterator; nor one that keeps its place in a state of its own (torchdata's
    StatefulDataLoader), which goes on where it was left.
    """
    return not isinstance(loader, Iterator) and not hasattr(loader, "load_state_dict")


def can_be_read_once(loader: Any) -> bool:
    """Whether a loader surely gives its batches only once; a class of the user's may begin again in `__iter__`."""
    own = isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", itertools.__name__)
    return own or isinstance(loader, GeneratorType)


@contextmanager
def left_as_it_was(loader: Any) -> Iterator[None]:
    """Put back random state, the loader's generators and counters, and workers that stand between epochs."""
    shared = RandomState(torch.device("cpu"))
    shared.take()
    owners = _owners(loader)
    own = OwnGenerators(
        {id(v): v for owner in owners for v in vars(owner).values() if isinstance(v, _GENERATORS)}.values()
    )
    standing = getattr(loader, "_iterator", None)
    if standing is not None:
        loader._iterator = None
    try:
        with counters_kept(owners):
            yield
    finally:
        if hasattr(loader, "_iterator"):
            loader._iterator = standing  # workers that were started here end with what held them
        own.put_back()
        shared.put_back()


@contextmanager
def counters_kept(owners: Iterable[Any]) -> Iterator[None]:
    """Put back the numbers, flags and texts that objects hold as attributes: counts of calls, an epoch's number."""
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
    """Whether an attribute shadows one of its class, as a count does that begins there (`calls = 0`)."""
    return isinstance(vars(owner)[name], _PLAIN) and isinstance(getattr(type(owner), name, owner), _PLAIN)


def _owners(loader: Any) -> list[Any]:
    """Return the loader and what it draws by: samplers and dataset."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, batch_sampler, getattr(loader, "dataset", None)]
    parts += [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
    return list({id(part): part for part in parts if hasattr(part, "__dict__") and not isinstance(part, type)}.values())
