"""Evaluates a trainer's batches in parts that fit, of a size of their own."""

from __future__ import annotations

import inspect
import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_pt_utils import nested_concat

from autoaccum._engine import devices
from autoaccum._engine.assembly import assemble_without_optimizer
from autoaccum._engine.does_not_fit import refusal
from autoaccum._engine.options import Options
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.step_limit import StepLimit
from autoaccum._evaluation.evaluation import check_losses
from autoaccum._evaluation.parts_that_fit import PartsThatFit
from autoaccum._loss.closures import Closure
from autoaccum._loss.evaluated import share_of
from autoaccum._loss.loss_values import LossValue
from autoaccum._sizing.events import Events
from autoaccum._system.attributes import replaced
from autoaccum._system.reason_file import writes_reason
from autoaccum.integrations._joined_parts import mean
from autoaccum.integrations._trainer_logs import held_logs, log_held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._system.notices import Notices
    from autoaccum.integrations._trainer_logs import Held

# What a trainer's `prediction_step` returns: the loss, the outputs and the labels, each None if there is none.
_Predicted = tuple[Any, Any, Any]
_LOSS = "loss"


class EvaluationInParts:
    """Runs a trainer's `prediction_step` on parts of a batch, where it does not fit as a whole.

    The size that fits is found by failure, kept for the batches that follow, and grows back.

    Args:
        trainer: The trainer.
        options: What `auto_accumulate` was called with, with the split in force.
        notices: Reports choices made for the user.

    Attributes:
        model: The trainer's model, of which this holds.
    """

    def __init__(self, trainer: Any, options: Options, notices: Notices) -> None:
        self.model = trainer.model
        self._trainer = trainer
        self._split = options.split
        self._notices = notices
        device = trainer.args.device if options.device is None else options.device
        self._memory = memory = devices.resolve(device, self.model, notices)
        self._limit = StepLimit(memory, options.limit_bytes(memory))
        self._events = Events(memory, options.callbacks, notices)
        remedies = ["shorter samples", "eval_accumulation_steps=1, so that outputs leave the device"]
        self._parts = PartsThatFit(
            memory,
            Savepoint([self.model], memory.device),
            lambda said, sample: refusal(memory, f"{sample} does not fit in an evaluation", said, remedies),
            self._events.ran_out,
        )

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

        def one_part(batch: Mapping[str, Any], _: int) -> tuple[Held, _Predicted]:
            with held_logs(self._trainer) as held, own_tokens(self._trainer.args):
                return held, step(dict(batch))

        self._events.windows = self._trainer.state.global_step
        with self._limit.in_force():
            done, sizes, window = self._parts.of_batch(dict(inputs), self._split, one_part)
            losses, outputs, labels = zip(*(predicted for _, predicted in done), strict=True)
            loss = losses[0]
            if window is not None and len(losses) > 1 and loss is not None:
                loss = self._loss_of(window, sizes, losses)
        log_held(self._trainer, [held for held, _ in done])
        return self._over_all_ranks(loss, inputs), _concatenated(outputs), _concatenated(labels)

    def _loss_of(self, window: Window, sizes: Sequence[int], losses: Sequence[Any]) -> Any:
        """Return the loss of a batch, given those of its parts."""
        knowledge = self._step.objective.knowledge
        self._step.objective.begin_window()
        starts = itertools.accumulate(sizes, initial=0)
        parts = [window.part(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        for samples in (window, *parts):
            check_losses(self._step, samples)
        knowledge.begin_evaluation()
        values = [LossValue(_LOSS, loss) for loss in losses]
        knowledge.note(values)
        shares = [share_of(knowledge, *of_part) for of_part in zip(values, parts, strict=True)]
        if all(not known.is_weighed for known in knowledge.summands.get(_LOSS, ())):
            return torch.stack(list(losses)).sum()
        factors, weight = [float(share.factor) for share in shares], sum(float(share.weight) for share in shares)
        weight = max(weight, *(share.least for share in shares), key=abs)
        # They differ where a part is divided by the k of max(k, n).
        return mean(losses, factors) * (sum(factors) / weight if weight else 1.0)

    @cached_property
    def _step(self) -> GradientStep:
        """By which the loss in evaluation is read and checked."""
        options = Options(loss=[Closure(self._loss)], precision="fp32", split=self._split)
        step = assemble_without_optimizer(self.model, options, memory=self._memory, notices=self._notices)
        step.objective.knowledge.is_models_own = True
        return step

    def _loss(self, batch: Mapping[str, Any]) -> Any:
        trainer = self._trainer
        with held_logs(trainer), own_tokens(trainer.args), trainer.compute_loss_context_manager():
            if not self._counts_tokens:
                return trainer.compute_loss(self.model, dict(batch))
            # As in `prediction_step`: the count may differ from what the loss runs over.
            items = self._items_of(batch)
            return trainer.compute_loss(self.model, dict(batch), return_outputs=True, num_items_in_batch=items)[0]

    def _over_all_ranks(self, loss: Any, inputs: Mapping[str, Any]) -> Any:
        """Return the loss of this rank's batch so that the mean over ranks is one over the tokens of all of them.

        `Trainer` does so since its `prediction_step` counts them.
        """
        trainer = self._trainer
        ranks = trainer.accelerator.num_processes
        if loss is None or ranks == 1 or not trainer.args.average_tokens_across_devices or not self._counts_tokens:
            return loss
        with own_tokens(trainer.args):
            own = self._items_of(inputs)
        if own is None:
            return loss
        own = torch.as_tensor(own, device=trainer.args.device)
        share = own / trainer.accelerator.gather(own.reshape(1)).sum()
        return torch.where(own > 0, loss * share * ranks, torch.zeros_like(loss))

    def _items_of(self, inputs: Mapping[str, Any]) -> Any:
        return self._trainer.get_batch_samples(iter([inputs]), 1, self._trainer.args.device)[1]

    @cached_property
    def _counts_tokens(self) -> bool:
        """Whether the trainer's own `prediction_step` counts the tokens of all ranks."""
        kinds = [kind for kind in type(self._trainer).__mro__ if not kind.__module__.startswith("autoaccum.")]
        own = next(vars(kind)["prediction_step"] for kind in kinds if "prediction_step" in vars(kind))
        return "num_items_in_batch" in inspect.unwrap(own).__code__.co_varnames


def own_tokens(args: Any) -> AbstractContextManager[None]:
    """Let a trainer compute losses of this rank's tokens within the block; other ranks may be elsewhere."""
    return replaced((args, "average_tokens_across_devices", False))


def _concatenated(parts: Sequence[Any]) -> Any:
    """Return the outputs of all parts as those of one batch; as `Trainer` does it, other lengths are padded."""
    whole = parts[0]
    for part in parts[1:]:
        if whole is not None:
            whole = nested_concat(whole, part, padding_index=-100)  # type: ignore[no-untyped-call]
    return whole
