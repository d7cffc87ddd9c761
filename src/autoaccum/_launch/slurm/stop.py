"""Signals of a Slurm job in, one orderly stop of the training out.

Slurm sends a signal of one's choice some time before the time limit (submitit asks for SIGUSR2), and SIGTERM where a
job is cancelled or preempted. `fit` leaves a checkpoint at SIGTERM and then lets the handler from before have it: so
both become SIGTERM here, and that handler raises `Stopped`, behind the checkpoint. What follows is not decided here.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Self

from autoaccum._launch.recipe_exits import Stopped

if TYPE_CHECKING:
    from types import FrameType


class Stop:
    """Turns the first SIGTERM, or signal of Slurm's, into `Stopped`, for the length of a block. Later ones do nothing.

    Args:
        warning: The signal that Slurm sends before the time limit.

    Attributes:
        warned: Whether it was that one.
        former: Who would have had it.
    """

    def __init__(self, warning: int) -> None:
        self.warned = False
        self._warning = warning
        self._stopped = False
        self._before: dict[int, Any] = {}

    @property
    def former(self) -> Any:
        """Who would have had the warning."""
        return self._before[self._warning]

    def __enter__(self) -> Self:
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_terminate)
        self._before[self._warning] = signal.signal(self._warning, self._on_warning)
        return self

    def __exit__(self, *_: object) -> None:
        # What comes now would only disturb what is being put in order: it has been heard.
        for number, before in self._before.items():
            signal.signal(number, self._ignore if self._stopped else before)

    def _on_warning(self, _number: int, _frame: FrameType | None) -> None:
        if not self._stopped:
            self.warned = True
            signal.raise_signal(signal.SIGTERM)

    def _on_terminate(self, _number: int, _frame: FrameType | None) -> None:
        if not self._stopped:
            self._stopped = True
            raise Stopped

    def _ignore(self, _number: int, _frame: FrameType | None) -> None:
        pass
