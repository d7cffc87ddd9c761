"""Changes models as `memory=` does, for steps that are predicted without a device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from autoaccum._engine.savings import AUTO, check_memory, check_place
from autoaccum._engine.savings import saving as in_force
from autoaccum._memory.simulated import Simulated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from autoaccum._estimate.fake_step import Adapt
    from autoaccum._system.notices import Notices

# Decides which tensors are moved to the host, and has no memory of its own.
GPU = Simulated(2**50, torch.device("cuda", 0))


def names_in(memory: Sequence[str] | str | None, notices: Notices) -> tuple[str, ...]:
    """Return what saves memory from the start, by names of `fit`'s argument.

    None for "auto", which is said.

    Raises:
        InvalidInputError: A name is unknown.
    """
    names = check_memory(memory, GPU)
    if AUTO in names:
        notices.say(
            "memory='auto': the report is of steps without it; fit finds what saves memory in its first windows"
        )
        return ()
    return names


def saving(names: Sequence[str]) -> list[Adapt]:
    """Return what changes a model so that it saves memory in these ways, or refuses them."""

    def checked(model: nn.Module) -> ExitStack:
        for name in names:
            check_place(name, [model])
        return ExitStack()

    return [checked, *map(saves, names)] if names else []


def saves(name: str) -> Adapt:
    """Return what changes a model so that it saves memory in one way, which says how."""
    return lambda model: in_force(name, [model], GPU)
