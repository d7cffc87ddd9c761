"""State that modules keep as plain attributes: numbers, tensors that are no buffers, lists, dicts, sets and deques.

A check runs the model beside the training, and puts it back. What is in containers within containers, or in objects of
other types, is not looked at.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable

_NUMBERS = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set, deque)
# What every module has: its mode, and tables that are saved otherwise or hold no state.
_OF_MODULES = frozenset(vars(nn.Module()))
# Larger tensors are kept, and not copied.
_COPIED_ELEMENTS = 65_536


class AttributeState:
    """The attributes of modules, by name of the module, at the moment of making."""

    def __init__(self, named_modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._saved = [
            (path, vars(module), {name: (value, _content(value)) for name, value in _state_in(vars(module)).items()})
            for path, module in named_modules
        ]

    def put_back(self) -> None:
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
    kinds = (*_NUMBERS, *_CONTAINERS)
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OF_MODULES
        and (type(value) in kinds or (isinstance(value, Tensor) and not value.is_inference()))
    }


def _content(value: Any) -> Any:
    """Return what is in a value: of a container its elements, of a tensor its version and, if it is small, a copy."""
    if type(value) in _CONTAINERS:
        return value.copy()
    if not isinstance(value, Tensor):
        return None
    is_copied = type(value) is Tensor and value.layout is torch.strided and value.numel() <= _COPIED_ELEMENTS
    return value._version, value.detach().clone() if is_copied else None


def _is_as_before(now: Any, value: Any, content: Any) -> bool:
    if type(now) in _CONTAINERS and now is value:
        one, other = _elements(now), _elements(content)
        return len(one) == len(other) and all(map(_is_same, one, other))
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
    if not isinstance(value, Tensor):
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(content)
    elif content[1] is not None:
        value.copy_(content[1])
