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
    """

    silent: bool = False
    _said: dict[str, str] = field(default_factory=dict)

    def say(self, text: str, *, key: str | None = None, level: int = logging.INFO) -> None:
        """Log `text` unless a notice with the same `key` (by default the text itself) was logged before."""
        key = text if key is None else key
        if key in self._said:
            return
        self._said[key] = text
        if not self.silent:
            log(text, level)

    @property
    def texts(self) -> tuple[str, ...]:
        """All notices so far, in order."""
        return tuple(self._said.values())
