"""Evaluates on validation data during training without affecting the training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._data.loaders import can_be_looked_at, generators_of, left_as_it_was
from autoaccum._data.random_state import set_states, states_of
from autoaccum._engine import devices
from autoaccum._engine.evaluation import Evaluator
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.step_limit import drawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from autoaccum._data.random_state import RandomState
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.metrics import Metric
    from autoaccum._records import Evaluation, MemoryEvent


class Validation:
    """Evaluates during training.

    Args:
        step: The training step.
        val_loader: The validation data, as passed by the user.
        metrics: As for `fit`.
        on_oom: Called when memory runs out.
        part: This process's part of the validation data.
        ranks: The ranks that evaluate together; None for a single process.
        random: The generators to restore afterwards.
        is_between_windows: Whether evaluations come in the middle of an epoch, whose loader may share generators.
        is_kept: Whether a failing evaluation may be followed by a checkpoint of the state before it.

    Raises:
        InvalidInputError: A metric cannot be used.
    """

    def __init__(
        self,
        step: TrainingStep,
        val_loader: Iterable[Any],
        metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None,
        on_oom: Callable[[MemoryEvent], None],
        *,
        part: Iterable[Any],
        ranks: Ranks | None,
        random: RandomState,
        is_between_windows: bool,
        is_kept: bool,
    ) -> None:
        self._step = step
        self._val_loader = val_loader
        self._part = part
        self._evaluator = Evaluator(step, metrics, on_oom, ranks=ranks)
        self._random = random
        self._is_between_windows = is_between_windows
        self._is_kept = is_kept

    def try_out(self, most: int | None) -> None:
        """Evaluate a few samples to detect a failing evaluation before the first update.

        The training is not affected. Skipped for loaders that can be read only once, for loaders that ranks share, and
        for models whose forward pass needs the other ranks.

        Args:
            most: The largest micro-batch that the user allows; None for no bound.

        Raises:
            InvalidInputError: There are no samples, a metric does not return a number, or the model returns no loss in
                evaluation mode.
            DeviceLostError: This process can no longer use the device.
        """
        if self._step.passes is not None or self._part is not self._val_loader:
            return
        if not can_be_looked_at(self._val_loader):
            return
        before = self._random.take()
        mark = Savepoint(self._step.objective.modules, self._step.memory.device, self._step.objective.functions)
        mark.take()
        try:
            with (
                left_as_it_was(self._val_loader),
                devices.failures_told(self._step.memory, "an evaluation"),
            ):
                self._evaluator.try_out(drawn(self._val_loader, self._step.memory), most)
        finally:
            mark.restore()
            self._random.put_back(before)

    def run(self, trained_size: int) -> Evaluation:
        """Evaluate and restore the random state; on failure, also restore buffers if checkpoints are written.

        Args:
            trained_size: The micro-batch of the training, with which the evaluation begins.
        """
        # A loader draws a seed for its workers, and a model may draw random numbers in evaluation mode too.
        before = self._random.take()
        generators = generators_of(self._part) if self._is_between_windows else []
        own = states_of(generators)
        mark = None
        if self._is_kept:
            mark = Savepoint(self._step.objective.modules, self._step.memory.device, self._step.objective.functions)
            mark.take()
        try:
            evaluation = self._evaluator.run(drawn(self._part, self._step.memory), trained_size=trained_size)
        except BaseException:
            if mark is not None:
                mark.restore()
            raise
        set_states(generators, own)
        self._random.put_back(before)
        return evaluation
