"""Puts back what forward() changes in plain attributes of modules: counters, caches, losses that it keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from autoaccum._data.object_state import Holdings

if TYPE_CHECKING:
    from collections.abc import Iterable

# What every module has; buffers and modes are restored elsewhere.
_OWN = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, str, bytes, type(None), Tensor, np.ndarray, list, tuple, dict, set, frozenset)


class PlainAttributes:
    """The plain attributes of modules at one moment.

    Containers are followed, and objects that hold numbers and containers alone (a schedule, a configuration), but no
    others: a logger or a trainer may have threads.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = dict.fromkeys(part for module in modules for part in module.modules())
        self._taken = [(part, _plain(part)) for part in parts]
        self._held = Holdings([SimpleNamespace(values=[own for _, own in self._taken])], follows=_is_simple)

    @property
    def can_be_put_back(self) -> bool:
        """Whether what they hold can be restored, too, whatever is written meanwhile."""
        return self._held.can_be_put_back

    def put_back(self) -> None:
        """Restore the attributes, and what they hold if that is possible."""
        self._held.put_back()
        for part, own in self._taken:
            attributes = vars(part)
            for name in [name for name in attributes if name not in _OWN and name not in own]:
                del attributes[name]
            attributes.update(own)


def _plain(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _OWN}


def _is_simple(value: Any) -> bool:
    return hasattr(value, "__dict__") and all(isinstance(held, _PLAIN) for held in vars(value).values())
