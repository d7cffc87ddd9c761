"""Puts back what a block finds when it is computed, so that it can be computed again from there.

That is the random state, with generators that modules of the model hold or that the block is given, and what modules of
the block hold: buffers, plain attributes, and lists, dicts and sets of them. What cannot be put back is refused where a
block changes it.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from autoaccum._snapshot import OwnGenerators, RandomState
from autoaccum.errors import SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

# Tensors that a forward pass updates are small (statistics, counters); masks and position tables do not change.
_LARGEST_MOVED_ELEMENTS = 65_536
_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, Tensor)
_CONTAINERS = (list, dict, set)
_KEPT = (*_PLAIN, *_CONTAINERS)
# What every module has.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Taken(NamedTuple):
    random: tuple[Any, ...]
    generators: OwnGenerators
    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    contents: list[tuple[Any, Any]]
    tensors: list[tuple[Tensor, Tensor]]


class Before(AbstractContextManager[None]):
    """What a block found when it was computed; a context in which it finds that again, as often as it is entered.

    Args:
        block: The block.
        random_state: Of the whole model; its blocks may share it.
        given: The block's arguments.
    """

    def __init__(self, block: nn.Module, random_state: RandomState, given: Sequence[Any]) -> None:
        self._name = type(block).__name__
        self._parts = list(block.modules())
        self._random = random_state
        self._generators = list(_generators_in(given))
        self._parameters = self._parameters_now()
        self._first = self._taken(keeps_graphs=False)
        self._stays: tuple[tuple[str, Sequence[Any]], ...] = (
            ("its inputs", given),
            ("a large buffer, or what its attributes hold,", self._what_must_stay()),
        )
        self._looks = [_looks_of(values) for _, values in self._stays]
        self._now: list[_Taken] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts for computing and for recomputing the block."""
        return nullcontext(), self

    def check(self) -> None:
        """Check, once the block is computed, that it can be computed again.

        Raises:
            SavingRefusedError: It has changed something that cannot be put back.
        """
        for (what, values), looks in zip(self._stays, self._looks, strict=True):
            if _looks_of(values) != looks:
                raise SavingRefusedError(
                    f"memory='checkpoint': a {self._name} changes {what} in place, so it cannot be "
                    "computed again from there; leave 'checkpoint' out, or let the block work on a copy"
                )
        self._stays, self._looks = (), []  # inputs may be kept elsewhere, as in the host's memory

    def __enter__(self) -> None:
        now = self._parameters_now()
        if len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True)):
            raise SavingRefusedError(
                f"memory='checkpoint': a {self._name} has other parameters in the backward pass than "
                "in the forward pass (torch.func.functional_call puts them in for a call alone); leave 'checkpoint' "
                "out"
            )
        self._now.append(self._taken(keeps_graphs=True))
        self._put_back(self._first)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._put_back(self._now.pop())

    def _parameters_now(self) -> list[Tensor | None]:
        return [parameter for part in self._parts for parameter in part._parameters.values()]

    def _taken(self, *, keeps_graphs: bool) -> _Taken:
        """Return what the block finds now.

        Args:
            keeps_graphs: Whether to take results of the model that its modules hold, too, which keep their graph.
        """
        self._random.take()
        attributes = [
            (
                holder,
                {
                    name: value
                    for name, value in holder.items()
                    if isinstance(value, _KEPT) and (keeps_graphs or not _is_result(value))
                },
            )
            for part in self._parts
            for holder in (vars(part), part._buffers)
        ]
        containers = [
            value
            for part in self._parts
            for name, value in vars(part).items()
            if isinstance(value, _CONTAINERS) and name not in _OF_EVERY_MODULE
        ]
        tensors = (value for _, own in attributes for value in own.values() if isinstance(value, Tensor))
        return _Taken(
            self._random.taken,
            OwnGenerators(self._generators),
            attributes,
            [(value, value.copy()) for value in containers],
            [(tensor, tensor.detach().clone()) for tensor in tensors if _is_copied(tensor)],
        )

    def _what_must_stay(self) -> list[Any]:
        """Return what is put back as it is: large tensors, and what containers hold."""
        held = [value for _, own in self._first.attributes for value in own.values()]
        large = [value for value in held if isinstance(value, Tensor) and not _is_copied(value)]
        tuples = [value for value in held if isinstance(value, tuple)]
        contents = [copied for _, copied in self._first.contents]
        return [*large, *tuples, *(one for copied in contents for one in _members(copied))]

    def _put_back(self, taken: _Taken) -> None:
        self._random.assume(taken.random)
        self._random.put_back()
        taken.generators.put_back()
        for holder, own in taken.attributes:
            holder.update(own)
        for container, contents in taken.contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(contents)
        for tensor, value in taken.tensors:
            # Through .data, so that tensors which other operators saved for backward do not count as modified in place.
            tensor.data.copy_(value)


def _is_result(value: Any) -> bool:
    """Whether a value is, or has, a result of the model."""
    return (
        any(map(_is_result, value)) if isinstance(value, tuple) else isinstance(value, Tensor) and value.requires_grad
    )


def _is_copied(tensor: Tensor) -> bool:
    return tensor.numel() <= _LARGEST_MOVED_ELEMENTS and not tensor.requires_grad


def _members(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _generators_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Generator | random.Random | np.random.Generator):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _generators_in(_members(value))


def _looks_of(values: Iterable[Any]) -> list[Any]:
    """Return values that reveal whether tensors were written or the members of lists and mappings changed."""
    looks: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            looks.append(0 if value.is_inference() else value._version)
        elif isinstance(value, list | tuple | set):
            looks.append([len(value), *map(id, value), *_looks_of(value)])
        elif isinstance(value, dict):
            looks.append([*value, *map(id, value.values()), *_looks_of(value.values())])
    return looks
