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
# A longer collection is data.
_MANY = 1000


class Closure:
    """A loss that is a function of a micro-batch alone."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        check_function("closure", function, "batch")
        self.function = function

    def __call__(self, _model: nn.Module, batch: Any) -> Any:
        """Return the loss, as a callable of (model, batch)."""
        return self.function(batch)

    def source(self, _calls: object, batch: Any) -> tuple[dict[str, Any], Any]:
        """Return the loss as `Source.run` does; the outputs are the entry of that name, if the loss is a mapping."""
        raw = self.function(batch)
        if not isinstance(raw, Mapping):
            return {"loss": raw}, None
        losses = dict(raw)
        return losses, losses.pop(OUTPUTS, None)


def modules_used_by(function: object) -> list[nn.Module]:
    """Return the modules among what `used_by` finds, but for what functions use that are called by this one."""
    return [one for one in used_by([function], depth=0) if isinstance(one, nn.Module)]


def used_by(functions: Iterable[Any], *, depth: int = 2) -> list[Any]:
    """Return what functions refer to, each once: free variables, globals, defaults, bound arguments and their objects.

    Attributes of objects, and items of lists, tuples and dictionaries, are included one level deep.
    """
    found: dict[int, Any] = {}
    for function in functions:
        for value in _referred(function):
            for one in (value, *_inside(value)):
                if id(one) not in found:
                    found[id(one)] = one
                    if depth and inspect.isfunction(one) and not _module_of(one).startswith("torch."):
                        found |= {id(its): its for its in used_by([one], depth=depth - 1)}
    return list(found.values())


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


def _module_of(function: types.FunctionType) -> str:
    return function.__module__ or ""  # None where a namespace that code was run in has no name


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


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module | type) or inspect.ismodule(value) or inspect.isroutine(value):
        return ()
    if isinstance(value, list | tuple | Mapping) and len(value) > _MANY:
        return ()
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
