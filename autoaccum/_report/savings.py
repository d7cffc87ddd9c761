"""Changes models as `memory=` does, for steps that are predicted without a device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from autoaccum._engine.savings import AUTO, check_memory, check_place
from autoaccum._engine.savings import saving as in_force
from autoaccum._memory.simulated import Simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._system.notices import Notices

    Adapt = Callable[[nn.Module], AbstractContextManager[object]]

# Decides which tensors are moved to the host, and has no memory of its own.
CARD = Simulated(2**50, torch.device("cuda", 0))


def names_in(memory: Sequence[str] | str | None, notices: Notices) -> tuple[str, ...]:
    """Return what saves memory from the start, by names of `fit`'s argument.

    None for "auto", which is said.

    Raises:
        InvalidInputError: A name is unknown.
    """
    names = check_memory(memory, CARD)
    if AUTO in names:
        notices.say(
            "memory='auto': the report is of steps without it; fit finds what saves memory in its first windows"
        )
        return ()
    return names


def saving(names: Sequence[str]) -> Adapt | None:
    """Return what changes a model so that it saves memory in these ways, or refuses them; None without any."""

    def checked(model: nn.Module) -> ExitStack:
        for name in names:
            check_place(name, [model])
        return ExitStack()

    return together([checked, *map(saves, names)]) if names else None


def together(adapts: Sequence[Adapt | None]) -> Adapt | None:
    """Return what changes a model in all of these ways; None without any."""
    some = [adapt for adapt in adapts if adapt is not None]

    def adapt(model: nn.Module) -> ExitStack:
        with ExitStack() as changed:
            for one in some:
                changed.enter_context(one(model))
            return changed.pop_all()

    return adapt if some else None


def saves(name: str) -> Adapt:
    """Return what changes a model so that it saves memory in one way, which says how."""
    return lambda model: in_force(name, [model], CARD)
