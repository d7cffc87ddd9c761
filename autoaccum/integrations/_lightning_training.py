"""Computes the gradient of a Lightning trainer's batch in micro-batches that fit, within its automatic optimization."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import Window, count
from autoaccum._loss.loss_values import is_pair
from autoaccum._training.accumulator import Accumulator
from autoaccum.errors import InvalidInputError
from autoaccum.integrations._joined_parts import joined
from autoaccum.integrations._lightning_logs import HeldLogs

if TYPE_CHECKING:
    from autoaccum._engine.options import Options
    from autoaccum._records import BackwardReport
    from autoaccum.integrations._lightning_logs import Logged

_LOSS = "loss"
# Lightning's names of precisions in which its plugin enters autocast, and the accumulator's.
_PRECISIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


class _SkippedError(Exception):
    """`training_step` returned None, by which Lightning skips a batch."""


class Training:
    """Takes the place of a strategy's `training_step` and `backward`.

    Lightning clears gradients between the two, so those of the batch are set aside from the end of the first to the
    second. Earlier ones are cleared before the first instead, since there may be no memory for both.

    Args:
        trainer: The trainer, with its module on its device.
        options: What the callback was made with.

    Attributes:
        accumulator: Computes the gradients.
        report: Of the last batch.
    """

    def __init__(self, trainer: Any, options: Options) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._split = options.split
        self._logs = HeldLogs(trainer)
        self._of_batch = self._logs.of_batch  # found here, it is restored with the module
        self._further: tuple[Any, ...] = ()  # what `training_step` gets besides the batch
        self._parts: list[Logged] = []  # of each call for the batch, what was logged
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self.report: BackwardReport | None = None
        device = trainer.strategy.root_device if options.device is None else options.device
        plugin = trainer.precision_plugin
        self.accumulator = Accumulator._of(
            self._module,
            # The plugin's contexts are entered within the closure.
            replace(options, device=device, precision="fp32"),
            closure=self._loss,
            scale=getattr(plugin, "scaler", None),
            half=_PRECISIONS.get(str(plugin.precision)),
            batches=lambda: trainer.accumulate_grad_batches,
            is_models_own=True,
        )

    def training_step(self, batch: Any, *further: Any) -> Any:
        """Compute a batch's gradient; return its loss and what else the module returned; None if it is skipped."""
        trainer = self._trainer
        number = trainer.fit_loop.batch_idx
        if number % trainer.accumulate_grad_batches == 0:
            self._module.optimizer_zero_grad(trainer.current_epoch, number, trainer.optimizers[0])
        self._further, self._parts = further, []
        try:
            window = self._window(batch)
            with self._logs.of("training_step"):
                report = self.accumulator.backward(window, keep="outputs")
                sizes = report.micro_batches
                # Those before are of samples that the loss was checked on, and of attempts that failed.
                logged = self._parts[-len(sizes) :]
                is_alone = self.accumulator._step.passes is None  # else the others would have to run this pass too
                if is_alone and len(sizes) > 1 and sizes[0] > 1 and self._logs.is_unclear(logged[0]):
                    self._look_at_fewer(window, sizes[0] // 2)
        except _SkippedError:
            return None
        finally:
            self._further, self._parts = (), []
        self.report = report
        values = [loss.value for loss in report.device_losses.values()]
        loss = torch.as_tensor(values[0] if len(values) == 1 else sum(values), device=trainer.strategy.root_device)
        self._logs.log(logged, sizes, loss=loss)
        self._gradients = [(parameter, parameter.grad) for parameter in self._module.parameters()]
        for parameter, _ in self._gradients:
            parameter.grad = None
        outputs = report.outputs
        columns = {name: [of_part.get(name) for of_part in outputs] for of_part in outputs for name in of_part}
        return {_LOSS: loss} | {name: joined(column, sizes, loss=loss) for name, column in columns.items()}

    def backward(self, loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Put the batch's gradient into `.grad`, with the hooks of Lightning around a backward pass."""
        plugin = self._trainer.precision_plugin
        plugin.pre_backward(loss, self._module)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []
        plugin.post_backward(loss, self._module)
        return loss

    def _window(self, batch: Any) -> Window:
        try:
            return Window.of_checked([batch], self._split)
        except InvalidInputError as error:
            loader = self._trainer.train_dataloader
            if not isinstance(loader, dict | list | tuple):
                raise
            raise InvalidInputError(
                f"a batch is made of those of {len(loader)} loaders (CombinedLoader), which have no samples in common "
                "that could be split together; give all of them the same batch_size, or pass split="
            ) from error

    def _look_at_fewer(self, window: Window, size: int) -> None:
        """Note what is logged for fewer samples than a micro-batch has."""
        before = self.accumulator._step.savepoint.save()
        try:
            self._called(window.cut(0, size))
        finally:
            before.restore()

    def _called(self, batch: Any) -> Any:
        """Return what the module returned for a micro-batch."""
        with (
            self._logs.of_part(lambda: count(batch, self._split)) as logged,
            self._trainer.precision_plugin.train_step_context(),
        ):
            found = self._module.training_step(batch, *self._further)
        if not self.accumulator._step.is_spare:
            self._parts.append(logged)
        return found

    def _loss(self, batch: Any) -> Any:
        """Return the loss of a micro-batch, and what else the module returned."""
        found = self._called(batch)
        if found is None:
            if self._trainer.world_size == 1:
                raise _SkippedError
            raise InvalidInputError(
                "training_step returned None, by which Lightning skips a batch on one device alone; return a loss of 0 "
                "(as in 0.0 * outputs.sum()), or leave such batches out of the loader"
            )
        outputs = dict(found) if isinstance(found, dict) else {_LOSS: found}
        if _LOSS not in outputs and all(map(is_pair, outputs.values())):
            losses, outputs = outputs, {}
        else:
            losses = {_LOSS: outputs.pop(_LOSS, None)}
        if not losses or not all(isinstance(loss, Tensor) or is_pair(loss) for loss in losses.values()):
            raise InvalidInputError(
                f"training_step returned {type(found).__name__} without a loss that is a tensor; return the loss, a "
                "(sum, weight) pair, or a dictionary with it as 'loss', or of pairs alone"
            )
        return {**losses, "outputs": outputs}
