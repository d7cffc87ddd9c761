"""Lightning's Trainer with batches of any size: each is run in micro-batches that fit."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

try:
    import lightning.pytorch as pl
except ImportError:  # the package's older name, of the same interface
    import pytorch_lightning as pl  # type: ignore[no-redef]

from autoaccum._engine.dtensor import OTHERWISE, fsdp_modules
from autoaccum._engine.options import Options
from autoaccum.errors import InvalidInputError
from autoaccum.integrations._lightning_evaluation import STEPS, Evaluating
from autoaccum.integrations._lightning_training import Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._callbacks import Callback
    from autoaccum._data.pieces import Split
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import BackwardReport, Plan

__all__ = ["AutoAccumulate"]

_SHARDS = "ModelParallelStrategy"
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", _SHARDS)
_BY_HAND = "autoaccum.Accumulator(module, closure=...).backward(batch)"
_OWN_MODULES = ("lightning.", "pytorch_lightning.")


class AutoAccumulate(pl.Callback):
    """A callback with which each of the loader's batches is run in micro-batches that fit.

        trainer = lightning.pytorch.Trainer(callbacks=[AutoAccumulate(memory_limit="2GiB")])

    It takes the place of the strategy's steps and of its backward pass; all else stays Lightning's. The loader's batch
    is the batch of an optimizer step, or one of `accumulate_grad_batches`. `training_step` is called for each
    micro-batch, again after memory has run out, and for the few samples that its loss is checked on, so it must not
    change anything but the state of modules, metrics and random numbers. A batch is skipped if it returns None for any
    part of it. What it logs is logged once for the whole batch, means over samples. Callbacks and hooks run once a
    batch. Where `validation_step`, `test_step` or `predict_step` runs out of memory, it is run on parts of the batch,
    and its logs and outputs are joined.

    Args:
        loss_reduction: As for `Accumulator`.
        split: As for `Accumulator`.
        batchnorm: As for `Accumulator`.
        callbacks: As for `Accumulator`: autoaccum's callbacks, called when memory runs out and when the plan changes.
        device: A memory backend that stands for the trainer's device, such as `autoaccum.Simulated`; None for the
            trainer's own.
        micro_batch: As for `Accumulator`.
        memory_limit: As for `Accumulator`.
        save_memory: As for `Accumulator`.

    Raises:
        InvalidInputError: An argument cannot be used. When training begins: the trainer or its module does what
            micro-batches cannot be a part of.
    """

    def __init__(
        self,
        *,
        loss_reduction: str | None = None,
        split: Split | None = None,
        batchnorm: str = "keep",
        callbacks: Sequence[Callback] = (),
        device: MemoryBackend | None = None,
        micro_batch: int | str = "auto",
        memory_limit: float | str | None = None,
        save_memory: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._options = Options.of(AutoAccumulate, locals())
        self._training: Training | None = None

    @property
    def report(self) -> BackwardReport | None:
        """What was done for the last batch; None before the first one."""
        return None if self._training is None else self._training.report

    @property
    def plan(self) -> Plan | None:
        """How batches are split; None before the first one."""
        return None if self._training is None else self._training.accumulator.plan

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the trainer and its module, before anything is done.

        Raises:
            InvalidInputError: They do what micro-batches cannot be a part of.
        """
        _refuse_strategy(trainer.strategy)
        if stage == "fit":
            _refuse_training(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's signature
        """Take the place of the strategy's training step and backward pass."""
        self._training = Training(trainer, self._options)
        trainer.strategy.training_step = self._training.training_step
        trainer.strategy.backward = self._training.backward

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of the strategy's evaluation steps."""
        if "validation_step" not in vars(trainer.strategy) and not fsdp_modules([pl_module]):
            evaluating = Evaluating(trainer, self._options)
            for name in STEPS:
                setattr(trainer.strategy, name, partial(evaluating.run, name))

    on_test_start = on_predict_start = on_validation_start

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Give the strategy's steps back."""
        for name in ("training_step", "backward", *STEPS):
            vars(trainer.strategy).pop(name, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Give the strategy's steps back."""
        self.teardown(trainer, pl_module, "")


def _kind(strategy: Any) -> str:
    """Return the name of the class of Lightning's that a strategy is, or is made from."""
    kinds = (kind.__name__ for kind in type(strategy).__mro__ if kind.__module__.startswith(_OWN_MODULES))
    return next(kinds, "")


def _refuse_strategy(strategy: Any) -> None:
    """Check that the strategy leaves parameters whole and gradients to be reduced once, or leaves sharding to FSDP2."""
    kind = _kind(strategy)
    shares = strategy.device_mesh["tensor_parallel"].size() if kind == _SHARDS else 1
    if kind not in _STRATEGIES or shares > 1:
        of_tensors = f"(tensor_parallel_size={shares})" if shares > 1 else ""
        raise InvalidInputError(
            f"strategy={type(strategy).__name__}{of_tensors}: AutoAccumulate runs micro-batches outside of the strategy"
            " and reduces gradients itself, which holds for one device, for 'ddp', and for ModelParallelStrategy with "
            f"fully_shard (FSDP2) alone; use one of them, or leave AutoAccumulate out, and {OTHERWISE}"
        )


def _refuse_training(trainer: Any, module: Any) -> None:
    """Check that a trainer and its module can be trained in micro-batches."""
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise InvalidInputError(
            f"{kind} sets automatic_optimization = False, and AutoAccumulate takes the place of automatic "
            f"optimization's backward pass; call {_BY_HAND} in training_step, in place of manual_backward"
        )
    if any(type(callback).__name__ == "BatchSizeFinder" for callback in trainer.callbacks):
        raise InvalidInputError(
            "BatchSizeFinder changes the loader's batch size, which AutoAccumulate keeps as that of a step; leave it "
            "out"
        )
    if not type(module).backward.__module__.startswith(_OWN_MODULES):
        raise InvalidInputError(
            f"{kind} overrides backward, which AutoAccumulate does not call; leave it out, or use manual optimization "
            f"with {_BY_HAND}"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise InvalidInputError(
            "training_step(self, dataloader_iter) fetches batches itself, so AutoAccumulate cannot split them; take "
            "batch and batch_idx instead"
        )
