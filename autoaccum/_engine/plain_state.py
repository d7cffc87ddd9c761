"""Compares what modules keep in plain attributes: numbers, tensors that are no buffers, lists and deques.

Nothing puts these back when a micro-batch is repeated, and they move once for each micro-batch, as buffers do.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable

# What every module has.
_OWN = frozenset(vars(nn.Module()))


class PlainState:
    """The plain attributes of modules at one moment.

    Args:
        parts: The modules, each with its name.
    """

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        self._taken = [(path, part, _values_of(part)) for path, part in parts]

    def changed(self) -> list[tuple[str, nn.Module, list[str]]]:
        """Return the modules whose attributes have changed since, with the names of those."""
        found = []
        for path, part, before in self._taken:
            now = _values_of(part)
            if names := [name for name, value in now.items() if name in before and before[name] != value]:
                found.append((path, part, names))
        return found


def _values_of(part: nn.Module) -> dict[str, Any]:
    values = {name: _compared(value) for name, value in vars(part).items() if name not in _OWN}
    return {name: value for name, value in values.items() if value is not None}


def _compared(value: Any) -> Any:
    """Return what shows cheaply whether a value has changed; None for other kinds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if value == value else "nan"  # noqa: PLR0124 - NaN equals nothing
    if isinstance(value, Tensor):
        # One with a graph is a product of this forward pass (an auxiliary loss, a weight that a hook makes).
        return (id(value), value._version) if value.grad_fn is None else None
    if isinstance(value, list | deque):
        return len(value), id(value[-1]) if value else None
    return None
