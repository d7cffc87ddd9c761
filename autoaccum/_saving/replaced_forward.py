"""Calls something else in place of a module's forward, so that copies of the module keep its own.

Tells also whether modules are compiled.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

# Attributes that hide those of the module's class meanwhile.
_HIDDEN = ("forward", "__getstate__")


@contextmanager
def forward_replaced(module: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Call `around(forward, ...)` in place of a module's forward, as an instance attribute that hides the class's.

    Copies and pickles made meanwhile (a callback that keeps the best model) have the module's own forward.
    """
    before, own = module.forward, {name: vars(module)[name] for name in _HIDDEN if name in vars(module)}

    def state() -> dict[str, Any]:
        kind: Any = type(module)
        kept: dict[str, Any] = kind.__getstate__(module)
        return {name: value for name, value in kept.items() if name not in _HIDDEN} | own

    vars(module).update(forward=functools.wraps(before)(functools.partial(around, before)), __getstate__=state)
    try:
        yield
    finally:
        for name in _HIDDEN:
            vars(module).pop(name, None)
        vars(module).update(own)


def is_replaced(module: nn.Module) -> bool:
    """Whether a module's forward is replaced now."""
    return all(name in vars(module) for name in _HIDDEN)


def are_compiled(modules: Sequence[nn.Module]) -> bool:
    """Whether some of these modules, or of their parts, are compiled."""
    return any(is_compiled(part) for root in modules for part in root.modules())


def is_compiled(module: nn.Module) -> bool:
    """Whether a module itself is compiled."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
