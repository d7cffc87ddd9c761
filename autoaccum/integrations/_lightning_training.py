"""Computes the gradient of a Lightning trainer's batch in micro-batches that fit, within its automatic optimization."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import Window, count
from autoaccum._training.accumulator import Accumulator
from autoaccum.errors import InvalidInputError
from autoaccum.integrations._framework_backward import divide_gradients, tell_of_autocast
from autoaccum.integrations._joined_parts import joined
from autoaccum.integrations._lightning_logs import HeldLogs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.pieces import Split
    from autoaccum._engine.options import Options
    from autoaccum._records import BackwardReport

_LOSS = "loss"
# Lightning's names of precisions in which its plugin enters autocast, and the accumulator's.
_PRECISIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


class _SkippedError(Exception):
    """`training_step` returned None, by which Lightning skips a batch."""


class Step:
    """The closure of the accumulator: the module's `training_step` for one micro-batch.

    Args:
        trainer: The trainer.
        module: Its module.
        split: As for `Accumulator`.

    Attributes:
        parts: Of each call for the batch, what was logged and its number of samples.
        returns_more: Whether the module returns more than a loss, as far as is known.
    """

    def __init__(self, trainer: Any, module: Any, split: Split | None) -> None:
        self._trainer = trainer
        self._module = module
        self._further: tuple[Any, ...] = ()
        self._logs: HeldLogs | None = None
        self._split = split
        self.parts: list[tuple[Sequence[Any], int]] = []
        self.returns_more = self._keeps = True

    def begin(self, logs: HeldLogs, further: tuple[Any, ...]) -> None:
        """Begin a batch.

        Args:
            logs: Holds back what is logged.
            further: What `training_step` gets besides the batch.
        """
        self._logs, self._further = logs, further
        self.parts.clear()
        self._keeps = self.returns_more

    def end(self) -> None:
        """Let go of the batch."""
        self._logs, self._further = None, ()

    def __call__(self, batch: Any) -> Any:
        """Return the loss of a micro-batch, and what else is wanted of it."""
        assert self._logs is not None
        logged = self._logs.begin_part()
        with self._trainer.precision_plugin.train_step_context():
            found = self._module.training_step(batch, *self._further)
        if found is None:
            if self._trainer.world_size == 1:
                raise _SkippedError
            raise InvalidInputError(
                "training_step returned None, by which Lightning skips a batch on one device alone; return a loss of 0 "
                "(as in 0.0 * outputs.sum()), or leave such batches out of the loader"
            )
        extra = {key: value for key, value in found.items() if key != _LOSS} if isinstance(found, dict) else None
        loss = found.get(_LOSS) if isinstance(found, dict) else found
        is_pair = isinstance(loss, tuple) and len(loss) == 2  # noqa: PLR2004 - (sum, weight)
        if not isinstance(loss, Tensor) and not is_pair:
            raise InvalidInputError(
                f"training_step returned {type(found).__name__ if extra is None else 'a dictionary'} without a loss "
                "that is a tensor; return the loss, a (sum, weight) pair, or a dictionary with it as 'loss'"
            )
        self.parts.append((logged, count(batch, self._split) if logged else 0))
        self.returns_more = extra is not None
        return {_LOSS: loss, "outputs": extra or {}} if self._keeps else loss


class Training:
    """Takes the place of the closure in which automatic optimization runs a batch.

    Args:
        trainer: The trainer, with its module on its device.
        module: Its module.
        options: What the callback was made with.

    Attributes:
        accumulator: Computes the gradients.
        report: Of the last batch.
    """

    def __init__(self, trainer: Any, module: Any, options: Options) -> None:
        self._trainer = trainer
        self._step = Step(trainer, module, options.split)
        self._is_in_closure = False
        self._split = options.split
        self.report: BackwardReport | None = None
        device = trainer.strategy.root_device if options.device is None else options.device
        self.accumulator = Accumulator._of(
            module,
            # The plugin's contexts are entered within the closure.
            replace(options, device=device, precision="fp32"),
            closure=self._step,
            scale=getattr(trainer.precision_plugin, "scaler", None),
        )
        tell_of_autocast(self.accumulator, _PRECISIONS.get(str(trainer.precision_plugin.precision)))
        divide_gradients(self.accumulator, lambda: trainer.accumulate_grad_batches)

    def make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """Return what the optimizer calls for a batch, as `_AutomaticOptimization._make_closure` does."""
        loop = self._trainer.fit_loop.epoch_loop.automatic_optimization
        make = type(loop)._make_closure.__get__(loop)
        made = make(kwargs, optimizer, batch_idx)
        if loop._skip_backward:  # a pass for BatchNorm's statistics alone
            return made
        made.closure = partial(self._run, made._step_fn, made._zero_grad_fn)
        return made

    @torch.enable_grad()
    def _run(self, step: Any, zero_grad: Any, *_args: Any, **_kwargs: Any) -> Any:
        """Compute the gradient of a batch, with the hooks of Lightning around a backward pass.

        Args:
            step: Runs `training_step` by the strategy, which calls `training_step` of this object.
            zero_grad: Clears gradients; None for nothing.

        Returns:
            Lightning's result of the closure.
        """
        if zero_grad is not None:
            zero_grad()
        self._is_in_closure = True
        try:
            result = step()
        finally:
            self._is_in_closure = False
        if result.closure_loss is None:
            return result
        plugin, module = self._trainer.precision_plugin, self._trainer.lightning_module
        plugin.post_backward(plugin.pre_backward(result.closure_loss, module), module)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch's gradient to `.grad`, and return its loss, as the strategy's `training_step`."""
        if not self._is_in_closure:
            strategy = self._trainer.strategy
            return type(strategy).training_step(strategy, *args, **kwargs)
        batch, *further = [*args, *kwargs.values()]
        logs = HeldLogs(self._trainer)
        self._step.begin(logs, tuple(further))
        try:
            with logs.holding():
                keep = "outputs" if self._step.returns_more else None
                report = self.accumulator.backward(self._window(batch), keep=keep)
        except _SkippedError:
            return None
        finally:
            self._step.end()
        self.report = report
        # Those before are of samples that the loss was checked on, and of attempts that failed.
        logged, sizes = zip(*self._step.parts[-len(report.micro_batches) :], strict=True)
        logs.log(logged, sizes)
        loss = torch.as_tensor(report.device_losses[_LOSS].value, device=self._trainer.strategy.root_device)
        more = joined(report.outputs, report.micro_batches) if report.outputs else {}
        return {_LOSS: loss, **more} if more else loss

    def _window(self, batch: Any) -> Window:
        try:
            return Window.of_checked([batch], self._split)
        except InvalidInputError as error:
            loader = self._trainer.train_dataloader
            if not isinstance(loader, dict | list | tuple):
                raise
            raise InvalidInputError(
                f"a batch is made of those of {len(loader)} loaders (CombinedLoader), which have no samples in common "
                "that could be cut together; give all of them the same batch_size, or pass split="
            ) from error
