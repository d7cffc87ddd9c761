"""Finds a trainer whose own `training_step` bypasses the adapter's, and so would train without micro-batches."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

_STEP = "training_step"


class WatchedSteps:
    """Watches the training steps of one trainer.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._has_taken = False

    def take(self) -> None:
        """Note that the adapter got the batch of this step."""
        self._has_taken = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raise InvalidInputError in the block after a step whose batch the adapter did not get.

        That batch was trained whole, or its update would be made from the batches of others.
        """
        trainer = self._trainer
        of_instance = vars(trainer).get(_STEP)
        step = trainer.training_step

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._has_taken = False
            loss = step(*args, **kwargs)
            if not self._has_taken:
                raise InvalidInputError(
                    f"training_step of {_owner(trainer)} has not called super().training_step(...), so its batch was "
                    "not run in micro-batches; let it call that, put what it does to the loss into compute_loss, or "
                    "use the trainer without windowed()"
                )
            return loss

        trainer.training_step = watched
        try:
            yield
        finally:
            if of_instance is None:
                del trainer.training_step
            else:
                trainer.training_step = of_instance


def _owner(trainer: Any) -> str:
    """Return the name of the class whose step a trainer runs first."""
    kinds = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("autoaccum.")]
    return next(kind.__name__ for kind in kinds if _STEP in vars(kind))
