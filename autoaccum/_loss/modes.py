"""Puts modules into evaluation mode, and back; and what is needed of a savepoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from autoaccum._data.random_state import RandomState


class Mark(Protocol):
    """Saves and restores what passes change."""

    random: RandomState

    def take(self) -> None:
        """Save the state."""

    def restore(self) -> None:
        """Restore it."""


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
