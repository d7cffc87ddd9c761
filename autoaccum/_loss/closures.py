"""Losses that are functions of a micro-batch, which run the model themselves, and the modules that functions use."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from autoaccum._arguments import check_function

if TYPE_CHECKING:
    from collections.abc import Iterator

# The entry of a closure's mapping that is no loss, but what `keep="outputs"` keeps.
OUTPUTS = "outputs"


class Closure:
    """A loss that is a function of a micro-batch alone.

    Args:
        function: Returns the loss in one of the forms that `loss=` may return.

    Raises:
        InvalidInputError: It cannot be called with a micro-batch.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        check_function("closure", function, "batch")
        self.function = function

    def __call__(self, _model: nn.Module, batch: Any) -> Any:
        """Return the loss, as a callable of (model, batch)."""
        return self.function(batch)

    def source(self, _objective: object, batch: Any) -> tuple[dict[str, Any], Any]:
        """Return the loss as `Source.run` does; the outputs are the entry of that name, if the loss is a mapping."""
        raw = self.function(batch)
        if not isinstance(raw, Mapping):
            return {"loss": raw}, None
        losses = dict(raw)
        return losses, losses.pop(OUTPUTS, None)


def modules_used_by(function: object) -> list[nn.Module]:
    """Return the modules that a function refers to: free variables, globals, bound arguments and its object.

    Modules in attributes of objects, and in lists, tuples and dictionaries, are found one level deep.
    """
    return list(dict.fromkeys(module for value in _referred(function) for module in _modules_in(value)))


def _referred(function: object) -> Iterator[Any]:
    while isinstance(function, functools.partial):
        yield from function.args
        yield from function.keywords.values()
        function = function.func
    if inspect.ismethod(function):
        yield function.__self__
        function = function.__func__
    if not inspect.isfunction(function):
        yield function  # an object with __call__
        function = type(function).__call__
    if inspect.isfunction(function):
        yield from _free_variables(function)
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()


def _free_variables(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name that has no value yet
            yield cell.cell_contents
    names = _names_in(function.__code__)
    yield from (value for name, value in function.__globals__.items() if name in names)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that code, and functions defined in it, look up among globals and attributes."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _modules_in(value: Any) -> Iterable[nn.Module]:
    if isinstance(value, nn.Module):
        return [value]
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    elif not isinstance(value, type) and not inspect.ismodule(value) and not inspect.isroutine(value):
        inside = getattr(value, "__dict__", {}).values()
    return [one for one in inside if isinstance(one, nn.Module)]
