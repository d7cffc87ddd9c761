"""Evaluates a trainer's batches in parts that fit, of a size of their own."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_pt_utils import nested_concat

from autoaccum._data.batches import Window
from autoaccum._engine import devices
from autoaccum._engine.assembly import assemble_without_optimizer
from autoaccum._engine.does_not_fit import abridged, sample_of
from autoaccum._engine.options import Options
from autoaccum._engine.savepoint import Savepoint
from autoaccum._loss.closures import Closure
from autoaccum._oom import first_line, is_oom, is_too_large, let_go
from autoaccum._sizing.planner import balanced, shrink
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from autoaccum._data.pieces import Split
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._system.notices import Notices
    from autoaccum.integrations._trainer_metrics import Record, TrainerMetrics

# What a trainer's `prediction_step` returns: the loss, the outputs and the labels, each None if there is none.
_Predicted = tuple[Any, Any, Any]
_IGNORED = -100  # labels
_LOSS = "loss"


class EvaluationInParts:
    """Runs a trainer's `prediction_step` on parts of a batch, where it does not fit as a whole.

    The size that fits is found by failure, and kept for the batches that follow.

    Args:
        trainer: The trainer.
        metrics: Its metrics.
        split: As for `windowed`.
        notices: Reports choices made for the user.
    """

    def __init__(self, trainer: Any, metrics: TrainerMetrics, split: Split | None, notices: Notices) -> None:
        self._trainer = trainer
        self._metrics = metrics
        self._split = split
        self._notices = notices
        self._most: int | None = None
        self._model: nn.Module | None = None
        self._weights = _Weights(trainer, metrics, split, notices)

    def run(self, step: Callable[[Mapping[str, Any]], _Predicted], inputs: Mapping[str, Any]) -> _Predicted:
        """Return what a step returns for a batch.

        Args:
            step: The trainer's `prediction_step`, as a function of a batch.
            inputs: The batch.

        Raises:
            DoesNotFitError: Not even one sample fits.
        """
        try:
            window = Window([dict(inputs)], self._split)
        except InvalidInputError:  # what cannot be cut may fit as a whole
            return step(inputs)
        self._begin(self._trainer.model)
        done: list[tuple[_Predicted, Window]] = []
        records: list[Record] = []
        start, has_tried_again = 0, False
        while start < window.samples:
            size = min(self._most or window.samples, window.samples - start)
            record, found = self._try(step, partial(window.cut, start, start + size), size)
            if record is not None:
                records.append(record)
                done.append((found, window.part(start, start + size)))
                start += size
                continue
            smaller = shrink(window.samples, size)
            if smaller is None and has_tried_again:
                raise DoesNotFitError(
                    f"{sample_of(window, start)} does not fit on {self._memory.name} in an evaluation "
                    f"({abridged(found)}); evaluate on shorter samples, or set "
                    "eval_accumulation_steps=1, so that outputs leave the device"
                )
            has_tried_again = smaller is None  # with empty caches it may fit
            self._most = smaller or self._most
            self._notices.say("evaluation is cut into parts that fit, since memory ran out in it")
        self._metrics.append(records, "eval")
        loss, outputs, labels = done[0][0] if len(done) == 1 else self._joined(done, window)
        return self._over_all_ranks(loss, inputs), outputs, labels

    def _begin(self, model: nn.Module) -> None:
        if self._model is not model:
            self._model = model
            self._memory = devices.resolve(self._trainer.args.device, model, self._notices)
            self._mark = Savepoint([model], self._memory.device)

    def _try(
        self, step: Callable[[Mapping[str, Any]], _Predicted], cut: Callable[[], Mapping[str, Any]], size: int
    ) -> tuple[Record | None, Any]:
        """Cut a part and run a step on it; return its record and what it returns, or None and why memory ran out."""
        is_marked = False
        try:
            self._mark.take()
            is_marked = True
            batch = cut()
            with self._metrics.recorded(batch, size) as record, own_tokens(self._trainer.args):
                found = step(dict(batch))
        except Exception as error:
            if not (is_oom(error) or is_too_large(error)):
                raise
            failure = first_line(error)
            let_go(error)
        else:
            return record, found
        # The handler has ended: inside it the traceback would still pin the activations.
        if is_marked:
            self._mark.restore()
        self._memory.release()
        return None, failure

    def _joined(self, done: Sequence[tuple[_Predicted, Window]], window: Window) -> _Predicted:
        """Return what the parts of a batch give together."""
        losses, outputs, labels = zip(*(predicted for predicted, _ in done), strict=True)
        loss = None
        if losses[0] is not None:
            weights = self._weights.of(window, [part for _, part in done])
            whole = sum(weights)
            loss = sum(weight / whole * part for weight, part in zip(weights, losses, strict=True) if weight)
        return loss, _concatenated(outputs), _concatenated(labels)

    def _over_all_ranks(self, loss: Any, inputs: Mapping[str, Any]) -> Any:
        """Return the loss of this rank's batch so that the mean over ranks is one over the tokens of all of them.

        `Trainer` does so since its `prediction_step` counts them.
        """
        trainer = self._trainer
        ranks = trainer.accelerator.num_processes
        if loss is None or ranks == 1 or not trainer.args.average_tokens_across_devices or not _counts_tokens(trainer):
            return loss
        with own_tokens(trainer.args):
            own = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        if own is None:
            return loss
        own = torch.as_tensor(own, device=trainer.args.device)
        share = own / trainer.accelerator.gather(own.reshape(1)).sum()
        return torch.where(own > 0, loss * share * ranks, torch.zeros_like(loss))


@contextmanager
def own_tokens(args: Any) -> Iterator[None]:
    """Let a trainer compute losses of this rank's tokens within the block; other ranks may be elsewhere."""
    kept, args.average_tokens_across_devices = args.average_tokens_across_devices, False
    try:
        yield
    finally:
        args.average_tokens_across_devices = kept


def _counts_tokens(trainer: Any) -> bool:
    """Whether the trainer's own `prediction_step` counts the tokens of all ranks."""
    kinds = [kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("autoaccum.")]
    own = next(vars(kind)["prediction_step"] for kind in kinds if "prediction_step" in vars(kind))
    return "num_items_in_batch" in inspect.unwrap(own).__code__.co_varnames


class _Weights:
    """Infers what a trainer's loss is a mean of, in evaluation."""

    def __init__(self, trainer: Any, metrics: TrainerMetrics, split: Split | None, notices: Notices) -> None:
        self._trainer = trainer
        self._metrics = metrics
        self._split = split
        self._notices = notices
        self._step: GradientStep | None = None
        self._model: nn.Module | None = None

    def of(self, window: Window, parts: Sequence[Window]) -> list[float]:
        """Return the weights of the mean losses of parts of a window."""
        step = self._step_of(self._trainer.model)
        step.objective.begin_window()
        for is_last in (False, False, True):
            try:
                self._settle(step, window)
            except Exception as error:
                if is_last or not is_oom(error):
                    raise
                let_go(error)
            else:
                break
            step.memory.release()
        return [step.objective.weigh(_LOSS, part.cut(0, part.samples), part)[1] for part in parts]

    def _settle(self, step: GradientStep, window: Window) -> None:
        halves = balanced(window.samples, math.ceil(window.samples / 2))
        with torch.no_grad():
            step.objective.settle(window, halves, step.transfer.place, self._mark, step.precision.autocast)

    def _step_of(self, model: nn.Module) -> GradientStep:
        if self._step is None or self._model is not model:
            self._model = model
            self._step = assemble_without_optimizer(
                model,
                Options(loss=[Closure(self._loss)], precision="fp32", split=self._split),
                memory=devices.resolve(self._trainer.args.device, model, self._notices),
                notices=self._notices,
            )
            self._mark = Savepoint([model], self._step.memory.device)
        return self._step

    def _loss(self, batch: Mapping[str, Any]) -> Any:
        trainer = self._trainer
        with self._metrics.recorded(batch, 0), trainer.compute_loss_context_manager():
            return trainer.compute_loss(self._model, dict(batch))


def _concatenated(parts: Sequence[Any]) -> Any:
    """Return the outputs of all parts as those of one batch; as `Trainer` does it, other lengths are padded."""
    whole = parts[0]
    for part in parts[1:]:
        if whole is not None:
            whole = nested_concat(whole, part, padding_index=_IGNORED)  # type: ignore[no-untyped-call]
    return whole
