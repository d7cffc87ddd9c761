"""Evaluates a trainer's batches in parts that fit, of a size of their own."""

from __future__ import annotations

import inspect
import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_pt_utils import nested_concat

from autoaccum._engine import devices
from autoaccum._engine.assembly import assemble_without_optimizer
from autoaccum._engine.does_not_fit import refusal
from autoaccum._engine.evaluation import check_losses
from autoaccum._engine.options import Options
from autoaccum._engine.parts_that_fit import PartsThatFit
from autoaccum._engine.savepoint import Savepoint
from autoaccum._loss.closures import Closure
from autoaccum._loss.loss_forms import Common
from autoaccum._loss.terms import Form
from autoaccum._system.reason_file import writes_reason
from autoaccum.integrations._joined_parts import mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._loss.loss_weights import LossWeights
    from autoaccum._system.notices import Notices
    from autoaccum.integrations._trainer_logs import Held, TrainerLogs

# What a trainer's `prediction_step` returns: the loss, the outputs and the labels, each None if there is none.
_Predicted = tuple[Any, Any, Any]
_IGNORED = -100  # labels
_LOSS = "loss"


class EvaluationInParts:
    """Runs a trainer's `prediction_step` on parts of a batch, where it does not fit as a whole.

    The size that fits is found by failure, kept for the batches that follow, and grows back.

    Args:
        trainer: The trainer.
        logs: What it logs.
        split: As for `windowed`.
        notices: Reports choices made for the user.
    """

    def __init__(self, trainer: Any, logs: TrainerLogs, split: Split | None, notices: Notices) -> None:
        self._trainer = trainer
        self._logs = logs
        self._split = split
        self._notices = notices
        self._model: nn.Module | None = None
        self._weights = _LossWeights(trainer, logs, split, notices)

    @writes_reason
    def run(self, step: Callable[[Mapping[str, Any]], _Predicted], inputs: Mapping[str, Any]) -> _Predicted:
        """Return what a step returns for a batch.

        Args:
            step: The trainer's `prediction_step`, as a function of a batch.
            inputs: The batch.

        Raises:
            DoesNotFitError: Not even one sample fits.
            InvalidInputError: Memory ran out, and the batch cannot be cut.
        """
        self._begin(self._trainer.model)

        def one_part(batch: Mapping[str, Any], _: int) -> tuple[Held, _Predicted]:
            with self._logs.held() as held, own_tokens(self._trainer.args):
                return held, step(dict(batch))

        done, sizes, window = self._parts.of_batch(dict(inputs), self._split, one_part)
        self._logs.append([held for held, _ in done], "eval")
        found = [predicted for _, predicted in done]
        loss, outputs, labels = found[0] if window is None or len(found) == 1 else self._joined(found, window, sizes)
        return self._over_all_ranks(loss, inputs), outputs, labels

    def _begin(self, model: nn.Module) -> None:
        if self._model is model:
            return
        self._model = model
        notices = self._notices
        memory = devices.resolve(self._trainer.args.device, model, notices)
        remedies = ["shorter samples", "eval_accumulation_steps=1, so that outputs leave the device"]
        self._parts = PartsThatFit(
            memory,
            Savepoint([model], memory.device),
            lambda said, sample: refusal(memory, f"{sample} does not fit in an evaluation", said, remedies),
            lambda _: notices.say("evaluation is cut into parts that fit, since memory ran out in it"),
        )

    def _joined(self, found: Sequence[_Predicted], window: Window, sizes: Sequence[int]) -> _Predicted:
        """Return what the parts of a batch give together."""
        losses, outputs, labels = zip(*found, strict=True)
        loss = None
        if losses[0] is not None:
            weights = self._weights.of(window, sizes)
            loss = torch.stack(losses).sum() if weights is None else mean(losses, weights)
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
            own = _items_of(trainer, inputs)
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


def _items_of(trainer: Any, inputs: Mapping[str, Any]) -> Any:
    return trainer._get_num_items_in_batch([inputs], trainer.args.device)


class _LossWeights:
    """Infers what a trainer's loss is a mean of, in evaluation."""

    def __init__(self, trainer: Any, logs: TrainerLogs, split: Split | None, notices: Notices) -> None:
        self._trainer = trainer
        self._logs = logs
        self._split = split
        self._notices = notices
        self._step: GradientStep | None = None
        self._model: nn.Module | None = None

    def of(self, window: Window, sizes: Sequence[int]) -> list[float] | None:
        """Return what the losses of parts of a window weigh in its own; None if they add up to it."""
        step = self._step_of(self._trainer.model)
        step.objective.begin_window()
        check_losses(step, window, self._mark)
        return _weights(sizes, window, step.objective.weights)

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
        with (
            self._logs.held(),
            own_tokens(trainer.args),
            trainer.compute_loss_context_manager(),
        ):
            # As in `prediction_step`: the count may differ from what the loss runs over.
            given = {"num_items_in_batch": _items_of(trainer, batch)} if _counts_tokens(trainer) else {}
            return trainer.compute_loss(self._model, dict(batch), **given)


def _weights(sizes: Sequence[int], window: Window, known: LossWeights) -> list[float] | None:
    """Return what each part of a batch weighs in its mean loss; None if the losses add up.

    Args:
        sizes: The samples of each part.
        window: The batch.
        known: How its loss is weighted.
    """
    if _adds_up(known):
        return None
    starts = itertools.accumulate(sizes[:-1], initial=0)
    parts = [window.part(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return [float(known.of_samples(_LOSS, part)[1]) for part in parts]


def _adds_up(known: LossWeights) -> bool:
    """Whether the loss of a batch is the sum of its parts' losses, be it divided by a number that the batch carries."""
    forms = known.forms.get(_LOSS, ())
    return known.common is Common.SUM or (bool(forms) and all(form.form is Form.SUM for form in forms))


def _concatenated(parts: Sequence[Any]) -> Any:
    """Return the outputs of all parts as those of one batch; as `Trainer` does it, other lengths are padded."""
    whole = parts[0]
    for part in parts[1:]:
        if whole is not None:
            whole = nested_concat(whole, part, padding_index=_IGNORED)  # type: ignore[no-untyped-call]
    return whole
