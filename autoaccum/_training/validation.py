"""Evaluates on validation data during training without affecting the training."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autoaccum._data.loader_memory import generators_of
from autoaccum._data.loaders import can_be_looked_at, left_as_it_was
from autoaccum._data.random_state import set_states, states_of
from autoaccum._engine import devices
from autoaccum._engine.step_limit import drawn
from autoaccum._evaluation.evaluation import Evaluator
from autoaccum._oom import is_device_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from autoaccum._records import Evaluation, MemoryEvent
    from autoaccum._training.fit_context import FitContext


class Validation:
    """Evaluates during training.

    Args:
        call: The call of `fit`.
        val_loader: The validation data.
        on_oom: Called when memory runs out.

    Raises:
        InvalidInputError: A metric cannot be used.
    """

    def __init__(self, call: FitContext, val_loader: Iterable[Any], on_oom: Callable[[MemoryEvent], None]) -> None:
        self._step, self._random, self._val_loader = call.step, call.random, val_loader
        self._savings = call.savings
        self._part = call.world.part_of_validation(val_loader)  # of this process
        self._evaluator = Evaluator(call.step, call.metrics, on_oom, ranks=call.world.ranks)
        # Each evaluation draws the same from them, whether the run was resumed since the one before or not, and a
        # loader in the middle of an epoch may share them.
        self._generators = generators_of(self._part)
        self._is_kept = call.saving is not None  # a checkpoint of the state before may follow a failing evaluation

    @property
    def has_loss(self) -> bool | None:
        """Whether the samples evaluated last had a loss; None before."""
        return self._evaluator.has_loss

    def try_out(self, most: int | None) -> None:
        """Evaluate a few samples to detect a failing evaluation before the first optimizer step.

        The training is not affected. Skipped for loaders that can be read only once, for loaders that ranks share, and
        for models whose forward pass needs the other ranks.

        Args:
            most: The largest micro-batch that the user allows; None for no bound.

        Raises:
            InvalidInputError: There are no samples, a metric does not return a number, or there are neither metrics
                nor a loss.
            DeviceLostError: This process can no longer use the device.
        """
        if self._step.passes is not None or self._part is not self._val_loader:
            return
        if not can_be_looked_at(self._val_loader):
            return
        before = self._random.capture()
        state = self._step.savepoint.save()
        try:
            with (
                left_as_it_was(self._val_loader),
                devices.oom_explained(self._step.memory, "an evaluation"),
                self._savings.in_force(),
            ):
                self._evaluator.try_out(drawn(self._val_loader, self._step.memory), most)
        finally:
            state.restore()
            self._random.restore(before)

    @contextmanager
    def run(self, trained_size: int) -> Iterator[Evaluation]:
        """Evaluate and hand over the evaluation; if that or the block fails, leave what moves as it was before.

        The block is for those who are told of the evaluation: a checkpoint may follow their failure, and the resume
        evaluates again. Random state is the training's own within the block, too.

        Args:
            trained_size: The micro-batch of the training, with which the evaluation begins.
        """
        before = self._random.capture()
        state = self._step.savepoint.save() if self._is_kept else None
        try:
            yield self._evaluated(trained_size, before)
        except BaseException as error:
            if state is not None and not is_device_lost(error):
                state.restore()
            raise

    def _evaluated(self, trained_size: int, random: tuple[Any, ...]) -> Evaluation:
        """Evaluate, and restore the random state: a loader draws a seed for its workers, and a model may draw, too."""
        own = states_of(self._generators)
        try:
            with self._savings.in_force():
                return self._evaluator.run(drawn(self._part, self._step.memory), trained_size=trained_size)
        finally:
            set_states(self._generators, own)
            self._random.restore(random)
