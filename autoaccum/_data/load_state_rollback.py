"""Undoes a `load_state_dict` that raised part-way.

A scheduler, a loader or a module with its own `load_state_dict` may raise after applying a part of the state. Its
attributes, and those of the objects that it holds, are then restored.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, deque)
_NOT_ENTERED = (nn.Module, torch.optim.Optimizer, Tensor, type, FunctionType, MethodType, BuiltinFunctionType)
_OF_MODULES = ("_parameters", "_buffers", "_modules")
# If no submodule has its own loading code, loading cannot fail part-way, and a large module need not be copied.
_MOST_COPIED_BYTES = 1 << 30


def remember(owner: Any, *, enters: bool = True) -> Callable[[], None]:
    """Return a function that restores the current attributes of an object.

    Args:
        owner: Any object with `state_dict` and `load_state_dict`, or held by one.
        enters: Whether to copy containers and remember the objects in them; otherwise only their identity is restored.
    """
    return _remembered(owner, enters, set())


def _remembered(owner: Any, enters: bool, seen: set[int]) -> Callable[[], None]:
    seen.add(id(owner))
    if not hasattr(owner, "__dict__"):
        state = copy.deepcopy(owner.state_dict()) if hasattr(owner, "state_dict") else None

        def load_back() -> None:
            if state is not None:
                owner.load_state_dict(state)

        return load_back
    now = vars(owner)
    held = {name: _kept(value) if enters else partial(_same, value) for name, value in now.items()}
    within = [
        _remembered(part, enters, seen) for part in (_parts(now.values()) if enters else ()) if id(part) not in seen
    ]

    def put_back() -> None:
        _set_attributes(owner, held)
        for undo in within:
            undo()

    return put_back


def _same(value: Any) -> Any:
    return value


def _set_attributes(owner: Any, held: dict[str, Callable[[], Any]], left_alone: tuple[str, ...] = ()) -> None:
    attributes = vars(owner)
    for name in [name for name in attributes if name not in held and name not in left_alone]:
        del attributes[name]
    attributes.update({name: made() for name, made in held.items()})


def _kept(value: Any) -> Callable[[], Any]:
    """Return a function that returns a value with its current content; plain containers keep their identity."""
    if type(value) in _MAPPINGS:
        items = {key: _kept(item) for key, item in value.items()}

        def filled() -> Any:
            made = {key: item() for key, item in items.items()}
            value.clear()
            value.update(made)
            return value

        return filled
    if type(value) in _SEQUENCES:
        parts = [_kept(item) for item in value]

        def refilled() -> Any:
            made = [part() for part in parts]
            value.clear()
            value.extend(made)
            return value

        return refilled
    return partial(_same, value)


def _parts(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the user's own objects among values and in plain containers."""
    for value in values:
        if type(value) in _MAPPINGS:
            yield from _parts(value.values())
        elif type(value) in (*_SEQUENCES, tuple):
            yield from _parts(value)
        elif hasattr(value, "__dict__") and not isinstance(value, _NOT_ENTERED):
            yield value


def remember_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores the current state and settings of an optimizer, without copying tensors.

    Loading replaces tensors and never writes to them.
    """
    state: Any = defaultdict(dict, {holder: dict(values) for holder, values in optimizer.state.items()})
    groups = [(group, dict(group)) for group in optimizer.param_groups]

    def put_back() -> None:
        optimizer.state = state
        for group, settings in groups:
            group.clear()
            group.update(settings)
        optimizer.param_groups = [group for group, _ in groups]

    return put_back


def remember_module(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the current parameters, buffers and attributes of a module.

    Tensors are copied to host memory, except for a large module whose loading cannot fail.
    """
    tensors = [*module.parameters(), *module.buffers()]
    has_a_say = any(_has_a_say(part) for part in module.modules())
    is_small = sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _MOST_COPIED_BYTES
    copies = [(one, one.detach().to("cpu", copy=True)) for one in tensors] if has_a_say or is_small else []
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    extra = [(part, copy.deepcopy(part.get_extra_state())) for part in module.modules() if _keeps_more(part)]
    attributes = [
        (part, {name: _kept(value) for name, value in vars(part).items() if name not in _OF_MODULES})
        for part in module.modules()
        if _has_a_say(part)
    ]

    def put_back() -> None:
        with torch.no_grad():
            for part, held in buffers:
                part._buffers.clear()
                part._buffers.update(held)
            for tensor, copied in copies:
                tensor.copy_(copied)
        for part, state in extra:
            with contextlib.suppress(Exception):  # its attributes are restored below in any case
                part.set_extra_state(state)
        for part, own in attributes:
            _set_attributes(part, own, _OF_MODULES)

    return put_back


def _keeps_more(part: nn.Module) -> bool:
    return type(part).get_extra_state is not nn.Module.get_extra_state


def _has_a_say(part: nn.Module) -> bool:
    """Whether loading a state calls this module's own code."""
    kind = type(part)
    own = (
        kind.set_extra_state is not nn.Module.set_extra_state
        or kind.load_state_dict is not nn.Module.load_state_dict
        or kind._load_from_state_dict is not nn.Module._load_from_state_dict
    )
    is_torchs = kind.__module__.startswith("torch.nn.")
    return (own and not is_torchs) or bool(part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks)
