"""Saves memory within the steps of a loop of the user's own, whose other forward passes stay as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._engine.fallback import Fallbacks
from autoaccum._engine.rungs import Rungs, change_of_rung, reason_of
from autoaccum._engine.saving_names import AUTO
from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices


class StepSavings:
    """What saves memory within each step, and is taken back after it.

    Args:
        modules: The modules of the step.
        names: What saves memory, in order, or "auto".
        memory: The device.
        notices: Reports what is done.

    Attributes:
        rungs: What chooses with memory="auto"; None without it.

    Raises:
        InvalidInputError: One of them has no place in the model.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        names: Sequence[str],
        memory: MemoryBackend,
        notices: Notices,
    ) -> None:
        self._modules = modules
        self._memory = memory
        self._notices = notices
        self._named = () if AUTO in names else tuple(names)
        self._reason: str | None = None
        self._ways: tuple[str, ...] = ()
        self.rungs: Rungs | None = None
        if AUTO in names:
            chosen_from = self._fallbacks()
            chosen_from.begin(self._say)
            self.rungs = Rungs(chosen_from.levels)
        with self.in_force():
            pass

    @property
    def names(self) -> tuple[str, ...]:
        """What saves memory in the next step."""
        return self._named if self.rungs is None else self.rungs.rung

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Save memory in this block; the modules are then as before."""
        names = self.names
        if not names:
            self._ways = ()
            self._tell_of_climbing()
            yield
            return
        fallbacks = self._fallbacks()
        try:
            fallbacks.begin(self._say)
            if self.rungs is not None:
                fallbacks.switch(names)
                self._ways = tuple(fallbacks.ways)
                self._tell_of_climbing()
            yield
        finally:
            fallbacks.end()

    def climb(self, error: Exception) -> bool:
        """Save memory by another rung from the next step on; return whether there is one.

        Args:
            error: One of `AVOIDABLE`.
        """
        if self.rungs is None:
            return False
        has_climbed = self.rungs.climb(error)
        self._reason = reason_of(error) if has_climbed else None
        if not has_climbed and self._ways:
            error.add_note(f"autoaccum: in force already: {'; '.join(self._ways)}")
        return has_climbed

    def _fallbacks(self) -> Fallbacks:
        return Fallbacks(self._modules, (), self._memory, self._named)

    def _say(self, text: str) -> None:
        self._notices.say(text, key=text)

    def _tell_of_climbing(self) -> None:
        if self._reason is not None:
            self._notices.say(change_of_rung(self._reason, self._ways))
            self._reason = None
