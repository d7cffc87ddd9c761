"""State that modules keep as plain attributes: numbers, tensors that are no buffers, and containers of these.

A check runs the model beside the training, and puts it back. Containers are looked at however they are nested; what is
in objects of other types is not.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUMBERS = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set, deque, tuple, OrderedDict, defaultdict, Counter)
# What every module has: its mode, and tables that are saved otherwise or hold no state.
_OF_MODULES = frozenset(vars(nn.Module()))


class AttributeState:
    """The attributes of modules, by name of the module, at the moment of making."""

    def __init__(self, named_modules: Iterable[tuple[str, nn.Module]]) -> None:
        seen: set[int] = set()
        self._saved = [
            (
                path,
                vars(module),
                {name: (value, _content(value, seen)) for name, value in _state_in(vars(module)).items()},
            )
            for path, module in named_modules
        ]

    def restore(self) -> None:
        """Restore all."""
        for _, attributes, saved in self._saved:
            for name in _state_in(attributes).keys() - saved.keys():
                del attributes[name]
            for name, (value, content) in saved.items():
                if not _is_as_before(value, value, content):
                    _fill(value, content)
                attributes[name] = value

    def moved(self) -> list[str]:
        """Return the names of attributes that have changed."""
        return [
            f"{path}.{name}" if path else name
            for path, attributes, saved in self._saved
            for name in _state_in(attributes).keys() | saved.keys()
            if name not in saved or not _is_as_before(attributes.get(name), *saved[name])
        ]


def _state_in(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OF_MODULES and (type(value) in _NUMBERS or _has_content(value))
    }


def _has_content(value: Any) -> bool:
    return type(value) in _CONTAINERS or (isinstance(value, Tensor) and not value.is_inference())


def _content(value: Any, seen: set[int]) -> Any:
    """Return what is in a value: of a container a copy, and what is in its elements; of a tensor its version and copy.

    None for a number, and for a container that was `seen` before, maybe in itself.
    """
    if type(value) in _CONTAINERS:
        if id(value) in seen:
            return None
        seen.add(id(value))
        held = value.values() if isinstance(value, dict) else value
        return copy.copy(value), [(one, _content(one, seen)) for one in held if _has_content(one)]
    if not isinstance(value, Tensor):
        return None
    # What hangs on a graph is an output that is kept to be looked at.
    is_copied = type(value) is Tensor and value.layout is torch.strided and value.grad_fn is None
    return value._version, value.detach().clone() if is_copied else None


def _is_as_before(now: Any, value: Any, content: Any) -> bool:
    if type(value) in _CONTAINERS and (now is value or type(now) is type(value) is tuple):
        if content is None:
            return now is value
        one, other = _elements(now), _elements(content[0])
        is_same = len(one) == len(other) and all(map(_is_same, one, other))
        return is_same and all(_is_as_before(part, part, kept) for part, kept in content[1])
    if isinstance(now, Tensor) and now is value:
        return bool(now._version == content[0])
    return _is_same(now, value)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in _NUMBERS and type(one) is type(other) and bool(one == other))


def _elements(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


@torch.no_grad()
def _fill(value: Any, content: Any) -> None:
    """Put back what was in a container, or a tensor."""
    if isinstance(value, Tensor):
        if content[1] is not None:
            value.copy_(content[1])
        return
    if type(value) is not tuple:
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(content[0])
    for part, kept in content[1]:
        if not _is_as_before(part, part, kept):
            _fill(part, kept)
