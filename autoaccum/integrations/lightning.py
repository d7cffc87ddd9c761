"""Lightning's Trainer with batches of any size: each is run in micro-batches that fit.

    from autoaccum.integrations.lightning import Windowed

    trainer = lightning.pytorch.Trainer(callbacks=[Windowed(memory_limit="2GiB")])

The callback takes the place of the closure in which automatic optimization runs a batch, and of the strategy's
evaluation steps. Optimizer steps, clipping, schedulers, logging, checkpoints and progress stay Lightning's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

try:
    import lightning.pytorch as pl
except ImportError:  # the package's older name, of the same interface
    import pytorch_lightning as pl  # type: ignore[no-redef]

from autoaccum._engine.options import Options
from autoaccum.integrations._lightning_evaluation import STEPS, Evaluating
from autoaccum.integrations._lightning_refusals import refuse_strategy, refuse_training
from autoaccum.integrations._lightning_training import Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._callbacks import Callback
    from autoaccum._data.pieces import Split
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import BackwardReport, Plan
    from autoaccum._system.notices import Notices

__all__ = ["Windowed"]


class Windowed(pl.Callback):
    """A callback with which each of the loader's batches is run in micro-batches that fit.

        trainer = Trainer(callbacks=[Windowed(memory_limit="2GiB")])

    The loader's batch is the batch of an update, or one of `accumulate_grad_batches`. `training_step` is called for
    each micro-batch, again after memory has run out, and for the few samples that its loss is checked on, so it must
    not change anything but the state of modules, metrics and random numbers. A batch is skipped if it returns None for
    any part of it. What it logs is held back, and logged once for the whole batch, means over samples; of a metric
    logged with `on_step=True`, the value of the last micro-batch. Callbacks and hooks run once a batch. Where
    `validation_step`, `test_step` or `predict_step` runs out of memory, it is run on parts of the batch, and its logs
    and outputs are joined.

    Args:
        memory_limit: As for `Accumulator`.
        memory: As for `Accumulator`.
        micro_batch: As for `Accumulator`.
        cache: As for `Accumulator`.
        loss_reduction: As for `Accumulator`.
        batchnorm: As for `Accumulator`.
        split: As for `Accumulator`.
        device: A memory backend that stands for the trainer's device, such as `autoaccum.Simulated`; None for the
            trainer's own.
        callbacks: As for `Accumulator`: autoaccum's callbacks, called when memory runs out and when the plan changes.
        notices: Reports choices made on your behalf; None for stderr.

    Raises:
        InvalidInputError: An argument cannot be used. When training begins: the trainer or its module does what
            micro-batches cannot be a part of.
    """

    def __init__(
        self,
        *,
        memory_limit: float | str | None = None,
        memory: str | Sequence[str] | None = None,
        micro_batch: int | str = "auto",
        cache: bool = True,
        loss_reduction: str | None = None,
        batchnorm: str = "keep",
        split: Split | None = None,
        device: MemoryBackend | None = None,
        callbacks: Sequence[Callback] = (),
        notices: Notices | None = None,
    ) -> None:
        super().__init__()
        self._options = Options.of(Windowed, locals())
        self._training: Training | None = None
        self._evaluating: Evaluating | None = None

    @property
    def report(self) -> BackwardReport | None:
        """What was done for the last batch; None before the first one."""
        return None if self._training is None else self._training.report

    @property
    def plan(self) -> Plan | None:
        """How batches are cut; None before the first one."""
        return None if self._training is None else self._training.accumulator.plan

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the trainer and its module, before anything is done.

        Raises:
            InvalidInputError: They do what micro-batches cannot be a part of.
        """
        refuse_strategy(trainer)
        if stage == "fit":
            refuse_training(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of automatic optimization's closure."""
        self._training = Training(trainer, pl_module, self._options)
        trainer.strategy.training_step = self._training.training_step
        trainer.fit_loop.epoch_loop.automatic_optimization._make_closure = self._training.make_closure
        self._evaluate_in_parts(trainer, pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of the evaluation's step."""
        self._evaluate_in_parts(trainer, pl_module)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of the evaluation's step."""
        self._evaluate_in_parts(trainer, pl_module)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of the prediction's step."""
        self._evaluate_in_parts(trainer, pl_module)

    def _evaluate_in_parts(self, trainer: Any, module: Any) -> None:
        if "validation_step" in vars(trainer.strategy):
            return
        self._evaluating = Evaluating(trainer, module, self._options)
        for name in STEPS:
            setattr(trainer.strategy, name, partial(self._evaluating.run, name))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Give the strategy's steps and the closure back."""
        self._give_back(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Give the strategy's steps and the closure back."""
        self._give_back(trainer)

    def _give_back(self, trainer: Any) -> None:
        for name in ("training_step", *STEPS):
            vars(trainer.strategy).pop(name, None)
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("_make_closure", None)
