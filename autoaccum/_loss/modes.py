"""Puts modules into evaluation mode, and back, and lets compiled code run eagerly."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

import torch

from autoaccum._system import signals
from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._data.random_state import RandomState


class Mark(Protocol):
    """Saves and restores what passes change."""

    random: RandomState

    def take(self) -> None:
        """Save the state."""

    def restore(self) -> None:
        """Restore it."""

    def settle(self) -> Sequence[object]:
        """Return what passes have moved since the state was saved."""


class Modes:
    """Saves which submodules are in training mode.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modes = [(part, part.training) for module in modules for part in module.modules()]

    def put_back(self) -> None:
        """Restore the mode of each submodule."""
        for part, training in self._modes:
            part.training = training


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode for the block, then restore the mode of each submodule."""
    modules = list(modules)
    modes = Modes(modules)
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        modes.put_back()


class Eager:
    """Lets compiled modules and functions run eagerly: a size that occurs once is not worth a graph.

    There is one for the process: after an interrupt, a block may end while a later one runs, or never.
    """

    def __init__(self) -> None:
        self._stance: AbstractContextManager[None] | None = None

    def take(self) -> None:
        """Run everything eagerly from now on, unless the compiler was never imported, which would take seconds."""
        if self._stance is None and "torch._dynamo" in sys.modules:
            with signals.held():  # the stance holds from when the object is made
                self._stance = torch.compiler.set_stance("force_eager")

    def put_back(self) -> None:
        """Run compiled code as before, if that was not done already."""
        with signals.held():
            stance, self._stance = self._stance, None
            if stance is not None:
                stance.__exit__(None, None, None)


eager = Eager()
