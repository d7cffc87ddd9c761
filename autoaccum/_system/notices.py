"""Logs each choice made on the user's behalf once, under "autoaccum"; stdout is for results."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from autoaccum._system.output import log


@dataclass
class Notices:
    """Logs each notice once during the object's life, which is one call of `fit` or one `Runner`.

    Args:
        silent: Whether to collect notices without logging them.
        holds_choices: Whether choices wait for `tell_choices`, which logs them in one line.
    """

    silent: bool = False
    holds_choices: bool = False
    _said: dict[str, str] = field(default_factory=dict)
    _choices: list[str] = field(default_factory=list)

    def say(self, text: str, *, key: str | None = None, level: int = logging.INFO) -> None:
        """Log `text` unless a notice with the same `key` (by default the text itself) was logged before."""
        key = text if key is None else key
        if key in self._said:
            return
        self._said[key] = text
        if not self.silent:
            log(text, level)

    def choose(self, what: str, how: str) -> None:
        """Log once what was chosen for the user ("device cpu"), and how to choose otherwise ("device=")."""
        if what in self._said:
            return
        self._said[what] = f"{what} ({how})"
        self._choices.append(self._said[what])
        if not self.holds_choices:
            self.tell_choices()

    def tell_choices(self) -> None:
        """Log in one line the choices that wait; later ones are logged as they come."""
        self.holds_choices = False
        told, self._choices = ", ".join(self._choices), []
        if told and not self.silent:
            log(f"chosen: {told}")

    @property
    def texts(self) -> tuple[str, ...]:
        """All notices so far, in order."""
        return tuple(self._said.values())
