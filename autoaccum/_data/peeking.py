"""Reads a loader's first batches and then restores its random state.

Callers do not use it on loaders that cannot be read twice, such as generators. What a dataset keeps in attributes or
files is not restored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import torch

from autoaccum._data.random_state import OwnGenerators, RandomState, own_generators
from autoaccum._system.exceptions import contextmanager


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
    """Restore random state, the generators of the loader, its samplers and its dataset, and persistent workers."""
    shared = RandomState(torch.device("cpu"))
    shared.take()
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [loader, batch_sampler, getattr(loader, "dataset", None)]
    owners += [getattr(owner, "sampler", None) for owner in (loader, batch_sampler)]
    own = OwnGenerators(own_generators(value for owner in owners for value in getattr(owner, "__dict__", {}).values()))
    standing = getattr(loader, "_iterator", None)
    if standing is not None:
        loader._iterator = None
    try:
        yield
    finally:
        if hasattr(loader, "_iterator"):
            loader._iterator = standing  # workers started here end with their iterator
        own.put_back()
        shared.put_back()
