"""Turns the signals of a Slurm job into one orderly stop of the training.

Slurm sends a chosen signal before the time limit (submitit requests SIGUSR2), and SIGTERM to a cancelled or preempted
job. On SIGTERM `fit` writes a checkpoint and then calls the previous handler. So both signals become SIGTERM here, and
the handler raises `Stopped` once the checkpoint is written.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Self

from autoaccum._launch.recipe_exit_guard import Stopped

if TYPE_CHECKING:
    from types import FrameType


class Stop:
    """Turns the first SIGTERM or warning into `Stopped` within a block; later signals do nothing.

    Args:
        warning: The signal that Slurm sends before the time limit.

    Attributes:
        warned: Whether the first signal was the warning.
    """

    def __init__(self, warning: int) -> None:
        self.warned = False
        self._warning = warning
        self._stopped = False
        self._before: dict[int, Any] = {}

    @property
    def former(self) -> Any:
        """The previous handler of the warning."""
        return self._before[self._warning]

    def __enter__(self) -> Self:
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_terminate)
        self._before[self._warning] = signal.signal(self._warning, self._on_warning)
        return self

    def __exit__(self, *_: object) -> None:
        # Further signals would only disturb the clean-up.
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
