"""Puts back what a block finds when it is computed, so that it can be computed again from there.

That is the random state, with generators that modules of the model hold or that the block is given, and what modules of
the block hold: buffers and attributes, with the contents of small tensors, arrays, lists, dicts and sets. What cannot
be put back is refused where a block changes it.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoaccum._data.random_state import RandomState, set_states, states_of
from autoaccum._oom import is_device_lost, is_oom, is_too_large
from autoaccum.errors import SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

# Tensors and arrays that a forward pass updates are small (statistics, counters); masks and position tables do not
# change.
_LARGEST_MOVED_ELEMENTS = 65_536
# What is put back with its contents, as these types write them.
_CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)
# What every module has.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Taken(NamedTuple):
    random: tuple[Any, ...]
    generators: tuple[Any, ...]
    names: list[tuple[dict[str, Any], dict[str, Any]]]
    contents: list[tuple[Any, Any]]
    values: list[tuple[Any, Any]]


class Before(AbstractContextManager[None]):
    """What a block found when it was computed; a context in which it finds that again, as often as it is entered.

    Args:
        block: The block.
        random_state: Of the whole model; its blocks may share it.
        given: The block's arguments in place.
        named: Those by name.
    """

    def __init__(
        self, block: nn.Module, random_state: RandomState, given: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        self._name = type(block).__name__
        self._parts = list(block.modules())
        self._random = random_state
        # Autograd keeps and checks tensors among the arguments in place.
        self._beside = [*(one for one in given if not isinstance(one, Tensor)), *named.values()]
        self._beside_looks = _looks_of(self._beside)
        self._generators = list(_generators_in(self._beside))
        self._parameters = self._parameters_now()
        self._first = self._taken(keeps_graphs=False)
        self._stays: tuple[tuple[str, Sequence[Any]], ...] = (
            ("its inputs", [*given, *named.values()]),
            ("its parameters", self._parameters),
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
        self._stays = ()  # inputs may be kept elsewhere, as in the host's memory

    def __enter__(self) -> None:
        now = self._parameters_now()
        if len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True)):
            raise SavingRefusedError(
                f"memory='checkpoint': a {self._name} has other parameters in the backward pass than "
                "in the forward pass (torch.func.functional_call puts them in for a call alone); leave 'checkpoint' "
                "out"
            )
        if _looks_of(self._beside) != self._beside_looks:
            raise SavingRefusedError(
                f"memory='checkpoint': what a {self._name} is given is changed in place before the backward pass, so "
                "it cannot be computed again from it; leave 'checkpoint' out, or change a copy"
            )
        self._now.append(self._taken(keeps_graphs=True))
        self._put_back(self._first)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._put_back(self._now.pop())
        # Checkpoints stop a computation by an exception of their own once they have what they need.
        if not isinstance(error, Exception) or type(error).__module__ == checkpoint.__module__:
            return
        is_known = is_oom(error) or is_too_large(error) or is_device_lost(error)
        if not is_known and not isinstance(error, SavingRefusedError):
            text = str(error).partition("\n")[0]
            raise SavingRefusedError(
                f"memory='checkpoint': a {self._name} fails where it is computed again, and not the first time "
                f"({type(error).__name__}: {text}); leave 'checkpoint' out"
            ) from error

    def _parameters_now(self) -> list[Tensor | None]:
        return [parameter for part in self._parts for parameter in part._parameters.values()]

    def _taken(self, *, keeps_graphs: bool) -> _Taken:
        """Return what the block finds now.

        Args:
            keeps_graphs: Whether results of the model that its modules hold are taken with their graph, or their values
                alone. Those of an earlier step would keep that step.
        """
        kept = _as_it_is if keeps_graphs else _without_graph
        names = [
            (holder, {name: kept(value) for name, value in holder.items()})
            for part in self._parts
            for holder in (vars(part), part._buffers)
        ]
        held = [value for holder, _ in names for name, value in holder.items() if name not in _OF_EVERY_MODULE]
        return _Taken(
            self._random.take(),
            states_of(self._generators),
            names,
            [(value, _copied(value, kept)) for value in held if type(value) in _CONTAINERS],
            [(value, _values_of(value)) for value in held if _is_copied(value)],
        )

    def _what_must_stay(self) -> list[Any]:
        """Return what is put back as it is: large tensors, and what containers hold."""
        held = [value for _, own in self._first.names for name, value in own.items() if name not in _OF_EVERY_MODULE]
        large = [value for value in held if isinstance(value, Tensor) and not _is_copied(value)]
        tuples = [value for value in held if isinstance(value, tuple)]
        contents = [copied for _, copied in self._first.contents]
        return [*large, *tuples, *(one for copied in contents for one in _members(copied))]

    def _put_back(self, taken: _Taken) -> None:
        self._random.put_back(taken.random)
        set_states(self._generators, taken.generators)
        for holder, own in taken.names:
            holder.update(own)
            for added in holder.keys() - own.keys():
                del holder[added]
        for container, contents in taken.contents:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(contents)
        for value, copied in taken.values:
            if isinstance(value, Tensor):
                # Through .data, so that tensors which other operators saved for backward do not count as modified.
                value.data.copy_(copied)
            else:
                value[...] = copied


def own_containers(value: Any) -> Any:
    """Return lists, tuples and dicts anew, with the same contents."""
    if type(value) is dict:
        return {name: own_containers(one) for name, one in value.items()}
    return type(value)(map(own_containers, value)) if type(value) in (list, tuple) else value


def _as_it_is(value: Any) -> Any:
    return value


def _without_graph(value: Any) -> Any:
    """Return a value, or the same numbers if it is a result of the model; of the members of a tuple likewise."""
    if type(value) is tuple:
        return tuple(map(_without_graph, value))
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _copied(container: Any, kept: Callable[[Any], Any]) -> Any:
    if isinstance(container, dict):
        return {name: kept(value) for name, value in container.items()}
    return type(container)(map(kept, container))


def _values_of(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _is_copied(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() <= _LARGEST_MOVED_ELEMENTS and not value.requires_grad
    return type(value) is np.ndarray and value.size <= _LARGEST_MOVED_ELEMENTS and value.flags.writeable


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
