"""A learning-rate scheduler and when it moves: after every update or every epoch, or with each evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autoaccum.arguments import check_call, check_choice, shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autoaccum.records import Evaluation

_INTERVALS = ("step", "epoch")
_NEEDS_VALIDATION = "scheduler: ReduceLROnPlateau moves with the validation loss; pass val_loader="


class Schedule:
    """Moves a scheduler.

    Args:
        scheduler: A scheduler, a function of the optimizer that makes one, or None.
        interval: "step" or "epoch".
        optimizer: Given to the function.

    Attributes:
        scheduler: The scheduler, also where it was made here.
    """

    def __init__(self, scheduler: Any, interval: str, optimizer: torch.optim.Optimizer) -> None:
        is_one = scheduler is None or hasattr(scheduler, "step")
        self.scheduler = scheduler if is_one else scheduler(optimizer)
        self._interval = interval
        self._on_plateau = isinstance(self.scheduler, ReduceLROnPlateau)

    def after_update(self, *, skipped: bool) -> None:
        """Move if this is the interval; a window that the scaler skipped does not count."""
        if self._interval == "step" and not skipped:
            self._move()

    def after_epoch(self) -> None:
        """Move if this is the interval."""
        if self._interval == "epoch":
            self._move()

    def after_evaluation(self, evaluation: Evaluation) -> None:
        """Let a ReduceLROnPlateau see the loss."""
        if self._on_plateau:
            self.scheduler.step(evaluation.loss)

    def check_that_it_can_move(self, *, validates: bool) -> None:
        """Refuse a scheduler that would never move.

        Args:
            validates: Whether there are evaluations.

        Raises:
            InvalidInputError: It moves with evaluations, and there are none.
        """
        if self._on_plateau and not validates:
            raise InvalidInputError(_NEEDS_VALIDATION)

    def check_that_it_can_be_kept(self) -> None:
        """Refuse a scheduler of which no checkpoint can be made.

        Raises:
            InvalidInputError: It has no state_dict() or load_state_dict().
        """
        missing = [name for name in ("state_dict", "load_state_dict") if not hasattr(self.scheduler, name)]
        if self.scheduler is not None and missing:
            raise InvalidInputError(
                f"checkpoint= needs the scheduler's state, and {type(self.scheduler).__name__} has no "
                f"{' and no '.join(f'{name}()' for name in missing)}; give it both, as torch's schedulers have them"
            )

    def _move(self) -> None:
        if self.scheduler is not None and not self._on_plateau:
            self.scheduler.step()


def check_scheduler(scheduler: Any, interval: str, val_loader: Iterable[Any] | None) -> None:
    """Check the arguments that make a `Schedule`.

    Raises:
        InvalidInputError: One of them cannot be used.
    """
    check_choice("scheduler_interval", interval, _INTERVALS)
    if scheduler is None and interval != "step":
        raise InvalidInputError(
            f"scheduler_interval={interval!r} needs a scheduler, and there is none; pass scheduler="
        )
    if isinstance(scheduler, type):
        raise InvalidInputError(
            f"scheduler={shown(scheduler)} is a class; pass a scheduler, or a function of the optimizer that makes "
            f"one: scheduler=lambda optimizer: {scheduler.__name__}(optimizer, ...)"
        )
    if isinstance(scheduler, torch.optim.Optimizer) or not (
        scheduler is None or hasattr(scheduler, "step") or callable(scheduler)
    ):
        raise InvalidInputError(f"scheduler={shown(scheduler)} has no step(), nor is it a function that makes one")
    if isinstance(scheduler, ReduceLROnPlateau) and val_loader is None:
        raise InvalidInputError(_NEEDS_VALIDATION)
    if callable(scheduler) and not hasattr(scheduler, "step"):
        check_call("scheduler", scheduler, "optimizer")
