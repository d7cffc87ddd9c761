"""Steps a learning-rate scheduler after every optimizer step, every epoch or every evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autoaccum._arguments import check_call, check_choice, shown
from autoaccum._engine.optimizers import name_of, parts_of_scheduler
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autoaccum._records import Evaluation

_EXAMPLE = "scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)"


class Schedule:
    """Moves a scheduler.

    Args:
        scheduler: A scheduler, a function of the optimizer that makes one, or None.
        interval: "step" or "epoch".
        optimizer: The one in use; given to the function.
        is_evaluated: Whether there are evaluations.

    Attributes:
        scheduler: The scheduler, also where it was made here.
        on_plateau: Whether it is a ReduceLROnPlateau, which moves with each evaluation.
    """

    def __init__(self, scheduler: Any, interval: str, optimizer: Optimizer, *, is_evaluated: bool = True) -> None:
        self.scheduler = scheduler
        self._interval = interval
        self._optimizer = optimizer
        self._is_evaluated = is_evaluated
        self.on_plateau = False

    def begin(self, *, is_kept: bool) -> None:
        """Make the scheduler, where a function was given that makes it, and check it.

        Args:
            is_kept: Whether checkpoints hold its state.

        Raises:
            InvalidInputError: It cannot be used.
        """
        is_made = _is_maker(self.scheduler)
        if is_made:
            self.scheduler = self.scheduler(self._optimizer)
        if is_made or self.scheduler is not None:
            _check(self.scheduler, self._optimizer, is_evaluated=self._is_evaluated)
        self.on_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        missing = [name for name in ("state_dict", "load_state_dict") if not hasattr(self.scheduler, name)]
        if is_kept and self.scheduler is not None and missing:
            raise InvalidInputError(
                f"checkpoint= needs the scheduler's state, and {type(self.scheduler).__name__} has no "
                f"{' and no '.join(f'{name}()' for name in missing)}; give it both, as torch's schedulers have them"
            )

    @property
    def moves_by_epochs(self) -> bool:
        """Whether it moves with epochs or evaluations, and not with steps."""
        return self.scheduler is not None and (self.on_plateau or self._interval == "epoch")

    def after(self, interval: str) -> None:
        """Move after a step or an epoch, if this is the interval."""
        if interval == self._interval and self.scheduler is not None and not self.on_plateau:
            self.scheduler.step()

    def after_evaluation(self, evaluation: Evaluation) -> None:
        """Let a ReduceLROnPlateau see the loss."""
        if self.on_plateau:
            self.check_loss(has_loss=evaluation.loss is not None)
            self.scheduler.step(evaluation.loss)

    def check_loss(self, *, has_loss: bool | None) -> None:
        """Refuse a ReduceLROnPlateau for evaluations without a loss; None where that is not known yet."""
        if self.on_plateau and has_loss is False:
            raise InvalidInputError(
                "scheduler: ReduceLROnPlateau moves with the validation loss, and the model returns none in evaluation "
                "mode; let it return one, or pass another scheduler"
            )


def check_scheduler(scheduler: Any, interval: str, val_loader: Iterable[Any] | None, optimizer: Any = None) -> None:
    """Check the arguments that make a `Schedule`; where the optimizer is still to be made, what can be known by then.

    Raises:
        InvalidInputError: One of them cannot be used.
    """
    check_choice("scheduler_interval", interval, ("step", "epoch"))
    if scheduler is None and interval != "step":
        raise InvalidInputError(
            f"scheduler_interval={interval!r} needs a scheduler, and there is none; pass scheduler="
        )
    if isinstance(scheduler, Optimizer | type):
        raise InvalidInputError(f"scheduler={shown(scheduler)} is no scheduler, nor a function; pass {_EXAMPLE}")
    if _is_maker(scheduler):
        check_call("scheduler", scheduler, "optimizer")
    elif scheduler is not None:
        made = optimizer if isinstance(optimizer, Optimizer) else None
        _check(scheduler, made, is_evaluated=val_loader is not None)


def _check(scheduler: Any, optimizer: Optimizer | None, *, is_evaluated: bool) -> None:
    """Refuse a scheduler that cannot be moved, or is of another optimizer, if it has an attribute `optimizer`."""
    if not callable(getattr(scheduler, "step", None)):
        raise InvalidInputError(f"scheduler={shown(scheduler)} has no step() that can be called; pass {_EXAMPLE}")
    if isinstance(scheduler, ReduceLROnPlateau) and not is_evaluated:
        raise InvalidInputError("scheduler: ReduceLROnPlateau moves with the validation loss; pass val_loader=")
    if optimizer is None:
        return
    used = {id(group) for group in optimizer.param_groups}
    for part in parts_of_scheduler(scheduler):
        other = getattr(part, "optimizer", getattr(part, "_optimizer", None))
        # One that wraps another shares its groups, and the scheduler writes to those.
        if not isinstance(other, Optimizer) or other is optimizer or used & {id(group) for group in other.param_groups}:
            continue
        inner = "" if part is scheduler else f" in it a {type(part).__name__},"
        raise InvalidInputError(
            f"scheduler=, a {type(scheduler).__name__},{inner} moves the learning rates of another optimizer (a "
            f"{type(other).__name__} of {len(other.param_groups)} groups) than the {name_of(optimizer)} in use; make "
            f"it from that one, or pass {_EXAMPLE}"
        )


def _is_maker(scheduler: Any) -> bool:
    """Whether this is a function that makes a scheduler from an optimizer."""
    return callable(scheduler) and not hasattr(scheduler, "step")
