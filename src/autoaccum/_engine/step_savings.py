"""Saves memory within the steps of a loop of the user's own, whose other forward passes stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._arguments import shown
from autoaccum._engine.fallback import AUTO, Fallbacks, check_memory
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices


def check_named(memory: Sequence[str] | str | None, backend: MemoryBackend) -> tuple[str, ...]:
    """Return the names from the argument `memory` of a loop of the user's own, in order.

    Raises:
        InvalidInputError: A name is unknown, has no effect here, or is "auto".
    """
    names, _ = check_memory(memory, None, backend, compiles=False)
    if AUTO in names:
        raise InvalidInputError(
            f"memory={shown(memory)} compares windows of a whole training, which only fit sees; in a loop of your own, "
            "pass a name, such as 'checkpoint' (FitResult.memory says which was fastest)"
        )
    return names


class StepSavings:
    """What saves memory within each step, and is taken back after it.

    Args:
        modules: The modules of the step.
        names: What saves memory, in order.
        memory: The device.
        notices: Reports what is done.

    Raises:
        InvalidInputError: One of them has no place in the model.
    """

    def __init__(
        self, modules: Sequence[nn.Module], names: Sequence[str], memory: MemoryBackend, notices: Notices
    ) -> None:
        self.names = tuple(names)
        self._modules = modules
        self._memory = memory
        self._notices = notices
        with self.in_force():
            pass

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Save memory in this block; the modules are then as before."""
        if not self.names:
            yield
            return
        fallbacks = Fallbacks(self._modules, (), self._memory, self.names)
        try:
            fallbacks.begin(lambda text: self._notices.say(text, key=text))
            yield
        finally:
            fallbacks.end()
