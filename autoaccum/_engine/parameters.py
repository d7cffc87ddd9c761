"""Tracks the current parts and parameters of a training step's modules, and the optimizer's parameters.

Models change between windows: a head is replaced, layers are appended or unfrozen, `add_param_group` adds parameters.
This module therefore checks before every window. If nothing has changed, the comparison runs at C speed.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

_IS_TRAINED, _HELD = attrgetter("requires_grad"), itemgetter("params")


class Inventory:
    """The parameters of some modules and of an optimizer over them.

    Args:
        modules: The model, and losses that are modules.
        optimizer: Its parameters also belong to the step, even those that no module holds; None for no optimizer.
        is_fixed: Whether to ignore changes. `fully_shard` swaps a module's parameters during a pass, which is not a
            change.

    Attributes:
        parameters: Each parameter once: the modules' in order, then those that only the optimizer holds.
    """

    parameters: list[nn.Parameter]

    def __init__(
        self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None = None, *, is_fixed: bool = False
    ) -> None:
        self._modules = list(modules)
        self._is_fixed = is_fixed
        self._take_stock(optimizer)

    def look(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Check for changes; return whether anything differs from the last check.

        Args:
            optimizer: The optimizer in use now.
        """
        if self._is_fixed:
            return False
        now = self._found(optimizer)
        if (
            len(now) == len(self._seen)
            and all(map(is_, now, self._seen))
            and list(map(_IS_TRAINED, self.parameters)) == self._are_trained
        ):
            return False
        self._take_stock(optimizer)
        return True

    def _take_stock(self, optimizer: torch.optim.Optimizer | None) -> None:
        parts = dict.fromkeys(part for module in self._modules for part in module.modules())
        # Live views, which also show what each part holds later.
        self._held = [holder.values() for part in parts for holder in (part._parameters, part._modules)]
        own = (parameter for module in self._modules for parameter in module.parameters())
        self.parameters = list(dict.fromkeys(chain(own, _held_by(optimizer))))
        self._seen = self._found(optimizer)
        self._are_trained = list(map(_IS_TRAINED, self.parameters))

    def _found(self, optimizer: torch.optim.Optimizer | None) -> list[Any]:
        """Return everything that the parts hold, in an order that changes only if they do."""
        return [*chain.from_iterable(self._held), *_held_by(optimizer)]


def _held_by(optimizer: torch.optim.Optimizer | None) -> chain[nn.Parameter]:
    return chain.from_iterable(map(_HELD, () if optimizer is None else optimizer.param_groups))
