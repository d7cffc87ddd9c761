"""Evaluates on validation data: mean loss and metrics over every sample once, in micro-batches of their own size."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import Window
from autoaccum._data.nesting import as_leaf, copied, map_tensors
from autoaccum._engine.does_not_fit import sample_does_not_fit, whole_does_not_fit
from autoaccum._engine.out_of_memory import TRIES_TO_WEIGH, Phase, resolvable_oom
from autoaccum._engine.window_loss import WindowLoss
from autoaccum._evaluation.metrics import CountingMetric, keeps_count, mean_of, metrics_by_name
from autoaccum._evaluation.parts_that_fit import PartsThatFit
from autoaccum._loss.evaluated import Share, is_ambiguous, is_read, share_of
from autoaccum._loss.knowledge import RecheckWindow
from autoaccum._loss.loss_values import in_full, is_pair
from autoaccum._loss.modes import evaluation_mode
from autoaccum._oom import clear_traceback_frames, is_oom, is_too_large
from autoaccum._records import Evaluation, MemoryEvent
from autoaccum._sizing.planner import balanced
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from autoaccum._engine.forward_backward import GradientStep, TrainingStep
    from autoaccum._engine.peers import Talk
    from autoaccum._evaluation.metrics import Metric
    from autoaccum._loss.loss_values import LossValue

_NO_SAMPLES = (
    "the validation loader gave no samples (val_loader=), so there is nothing to evaluate; make it a "
    "DataLoader or a list, since a generator can be read only once"
)
# Samples evaluated before training if running out of memory cannot be survived: few enough to fit anywhere, and enough
# for a metric that needs several.
_TRIED = 32
# Attempts at a loss over a whole batch.
_TRIES = 2
_LOSS, _REPORTED, _METRIC = "loss", "reported", "metric"


class _Sums(dict[tuple[str, str], tuple[Any, Any, float]]):
    """Of losses, of values that a loss only reports, and of metrics, by these kinds and names.

    Each has a sum, its weight, and the least that the weight of all can be.
    """

    def add(self, kind: str, name: str, total: Any, weight: Any, least: float = 0.0) -> None:
        before = self.get((kind, name), (0.0, 0.0, 0.0))
        # A pair's weight may be a whole number or in half precision, in which many would be rounded.
        weight = in_full(weight) if isinstance(weight, Tensor) else weight
        self[kind, name] = before[0] + total, before[1] + weight, max(before[2], least, key=abs)

    def add_all(self, others: Mapping[tuple[str, str], tuple[Any, Any, float]]) -> None:
        for key, share in others.items():
            self.add(*key, *share)

    def means(self, *kinds: str) -> dict[str, float]:
        """Return means by name; NaN, as in torch, if nothing has counted. Waits for the device."""
        found = {
            name: (float(total), max(float(weight), least, key=abs))
            for (kind, name), (total, weight, least) in self.items()
            if kind in kinds
        }
        return {name: total / weight if weight else math.nan for name, (total, weight) in found.items()}


class Evaluator:
    """Evaluates with the model and loss of a training step, which it leaves unchanged.

    The micro-batch size is found by failure alone, kept from one evaluation to the next, and grows back. The training's
    is not touched. With loss_scope="window" the loss is computed on each of the loader's batches as a whole; metrics
    see the micro-batches all the same.

    Args:
        step: The training step.
        metrics: As for `fit`. A callable may be called again for the same samples where memory has run out.
        on_oom: Called each time memory runs out.
        ranks: Other processes that also evaluate, each on the batches of its own loader; None if there are none.

    Attributes:
        has_loss: Whether the samples evaluated last had a loss, without which metrics are computed alone; None before.
    """

    has_loss: bool | None = None

    def __init__(
        self,
        step: TrainingStep,
        metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None,
        on_oom: Callable[[MemoryEvent], None] = lambda _: None,
        *,
        ranks: Talk | None = None,
    ) -> None:
        named, device = metrics_by_name(metrics), step.memory.device
        self._step = step
        self._ranks = ranks
        self._whole = WindowLoss(step) if step.options.loss_scope == "window" else None
        self._callables = {name: metric for name, metric in named.items() if not keeps_count(metric)}
        self._counting = [CountingMetric(*item, device, ranks) for item in named.items() if keeps_count(item[1])]
        self._has_metrics = bool(named)
        self._may_check = False  # whether losses can be checked where it is not known how they weigh samples
        self._parts = PartsThatFit(
            step.memory,
            step.savepoint,
            lambda said, sample: sample_does_not_fit(step, said, sample=sample, phase=Phase.EVALUATE),
            on_oom,
        )

    def run(self, batches: Iterable[Any], *, trained_size: int | None = None) -> Evaluation:
        """Evaluate `batches` once, without gradients; modes, and what a failed attempt has changed, are restored.

        Args:
            batches: A loader's batches.
            trained_size: A size known to fit in training, if any. If the device does not fail cleanly, the first
                attempt is no larger; otherwise it is a whole batch.
        """
        started = time.perf_counter()
        step, sums, samples = self._step, _Sums(), 0
        # If a failure within a pass ends all ranks, an attempt larger than what is known to fit would end them again.
        is_survived = step.memory.fails_cleanly and step.passes is None
        self._parts.begin(None if is_survived else trained_size, step.witness)
        for metric in self._counting:
            metric.reset()
        self.has_loss = None
        step.objective.knowledge.begin_evaluation()
        with self._evaluating():
            windows = (Window.of_checked([batch], step.objective.split) for batch in batches)
            first = next(windows, None)
            if step.passes is not None:  # it may come before any window, where a run goes on with it
                step.passes.prepare(first, trained_size or 1)
            found = itertools.chain([] if first is None else [first], windows)
            del first  # a batch, of which the memory is needed
            for window in found:
                self._one_batch(window, sums)
                samples += window.samples
            if step.passes is not None:
                step.passes.evaluate_with_others(self._passes)
        self._parts.end()
        if self._ranks is not None:
            mine = {key: (float(total), float(weight), least) for key, (total, weight, least) in sums.items()}
            said = self._ranks.exchange("evaluation", (mine, samples, self.has_loss))
            sums, samples = _Sums(), sum(number for _, number, _ in said)
            for others, _, has_loss in said:
                self._note_loss(has_loss)
                sums.add_all(others)
        if not samples:
            raise InvalidInputError(_NO_SAMPLES)
        metrics = sums.means(_METRIC)
        for metric in self._counting:
            metrics |= metric.result()
        loss = sum(sums.means(_LOSS).values()) if self.has_loss else None
        losses = sums.means(_LOSS, _REPORTED)
        return Evaluation(loss, metrics, samples, time.perf_counter() - started, losses=losses)

    def try_out(self, batches: Iterable[Any], most: int | None = None) -> None:
        """Evaluate one micro-batch of at most `most` samples, whose lack of memory is no error; modes are restored."""
        split, self.has_loss = self._step.objective.split, None
        self._may_check = False
        try:
            with self._evaluating(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about too few samples are irrelevant here
                windows = (Window([batch], split) for batch in batches)
                self._try_first((window for window in windows if window.samples), most)
        except Exception as error:
            if not (is_oom(error) or is_too_large(error)):
                error.add_note("autoaccum: found by evaluating a few samples of val_loader before training")
                raise
            clear_traceback_frames(error)
        self._step.memory.release()

    def _try_first(self, windows: Iterator[Window], most: int | None) -> None:
        if (window := next(windows, None)) is None:
            if self._ranks is None:  # other ranks may have some
                raise InvalidInputError(_NO_SAMPLES)
            return
        size = window.samples if self._step.memory.fails_cleanly else min(window.samples, most or _TRIED, _TRIED)
        _, outputs, targets, kept = self._one_part(window, 0, size)
        if self._whole is not None:
            self._over_all(self._whole, window.part(0, size), [kept])
        for metric in self._counting:
            metric.try_out(outputs, targets, size)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Let passes in the block be those of an evaluation."""
        objective = self._step.objective
        objective.calls.may_lack_loss = self._has_metrics
        try:
            with (
                evaluation_mode(objective.modules),
                torch.inference_mode(False),  # the caller's, in which graphs of losses say nothing
                torch.no_grad(),
            ):
                yield
        finally:
            objective.calls.may_lack_loss = False

    def _note_loss(self, has_loss: bool | None) -> None:
        """Note whether some samples have a loss; None for no samples."""
        if None not in (has_loss, self.has_loss) and has_loss is not self.has_loss:
            raise InvalidInputError(
                "the model returned a loss for some of the validation samples (val_loader=), and none for others, so "
                "there is no mean over all; return one for each batch in evaluation mode, or for none"
            )
        self.has_loss = self.has_loss if has_loss is None else has_loss

    # --- micro-batches ------------------------------------------------------------------------------------------------

    def _one_batch(self, window: Window, sums: _Sums) -> None:
        parts: list[Any] = []
        if window.samples and self._whole is None and self._step.passes is None:
            check_losses(self._step, window)
        for size, (found, outputs, targets, kept) in self._parts.of(window, partial(self._checked_part, window)):
            sums.add_all(found)
            for metric in self._counting:
                metric.update(outputs, targets, size)
            if self._whole is not None:
                parts.append(kept)
            del found, outputs, targets, kept  # the next micro-batch needs their memory
        if self._whole is not None and parts:
            sums.add_all(self._of_whole(partial(self._over_all, self._whole, window, parts), window))

    def _of_whole(self, work: Callable[[], _Sums], window: Window) -> _Sums:
        for _ in range(_TRIES):  # there is no smaller size: try once more with empty caches
            done = self._parts.attempt(work, window)
            if not isinstance(done, MemoryEvent):
                return done
            said = done.message
        what = f"the loss over all {window.samples} samples of a batch"
        raise whole_does_not_fit(self._step, said, Phase.EVALUATE, _TRIES, what)

    def _checked_part(self, window: Window, start: int, size: int) -> tuple[_Sums, Any, Any, Any]:
        """Run a micro-batch; again, if a loss in it is not what a check has found earlier."""
        # Not a loss over whole windows, nor one of a model that communicates in its passes.
        self._may_check = self._whole is None and self._step.passes is None
        knowledge = self._step.objective.knowledge
        knowledge.begin_asking(may=self._may_check)
        if self._may_check and size < window.samples:
            check_losses(self._step, window.part(start, start + size))
        while True:
            try:
                return self._one_part(window, start, size)
            except RecheckWindow as error:
                if not knowledge.may_ask:
                    raise error.error from None
            self._may_check = False
            knowledge.ask_for_check()
            check_losses(self._step, window.part(start, start + size))

    def _one_part(self, window: Window, start: int, size: int) -> tuple[_Sums, Any, Any, Any]:
        """Run a micro-batch; return its sums, without losses that are taken over the whole batch, outputs and targets.

        Last come the outputs to keep for such losses, as they were before metrics, which may write into them.
        """
        step, part, sums = self._step, window.part(start, start + size), _Sums()
        cut = window.cut(start, start + size)
        batch = step.transfer.place(cut)
        if any(map(Tensor.is_inference, window.tensors())):  # which graphs of losses may not hold
            batch = map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, batch)
        kept: Any = None
        with nullcontext() if step.passes is None else step.passes.evaluation_pass(size):
            if self._whole is None:
                losses, outputs = self._passes(batch, size)
                self._note_loss(any(losses))
                for of_pass in losses:
                    self._add(of_pass, part, sums)
            else:
                outputs, self.has_loss = self._whole.outputs(batch, size), True
                kept = copied(outputs)  # outputs may be views of a whole layer and keep it alive
        targets = batch[1] if is_pair(batch) else batch
        for name, metric in self._callables.items():
            sums.add(_METRIC, name, mean_of(name, metric(outputs, targets), size) * size, size)
        return sums, outputs, targets, kept

    def _passes(self, batch: Any, size: int) -> tuple[list[list[LossValue]], Any]:
        """Run a micro-batch's forward passes; return the losses of each, and the outputs if metrics need them."""
        objective = self._step.objective
        losses: list[list[LossValue]] = []
        outputs: Any = None
        with self._step.precision.autocast():
            if objective.calls.takes_outputs and is_read(objective.knowledge):
                # The graph of the loss alone says what it is divided by.
                outputs = objective.calls.outputs(batch)
                with torch.enable_grad():
                    return [objective.values_of(map_tensors(as_leaf, outputs), batch, size)], outputs
            for source in objective.calls.sources:
                found, outputs = objective.values(source, batch, size)
                losses.append(found)
            if (self._callables or self._counting) and outputs is None:
                outputs = objective.calls.outputs(batch)
        return losses, outputs

    def _over_all(self, whole: WindowLoss, window: Window, parts: list[Any]) -> _Sums:
        sums = _Sums()
        joined, reads = whole.join(parts), is_read(self._step.objective.knowledge)
        with torch.set_grad_enabled(reads):  # the graph of the loss alone says what it is divided by
            joined = map_tensors(as_leaf, joined) if reads else joined
            losses = whole.values(joined, whole.batch(window), window.samples)
        self._add(losses, window, sums)
        return sums

    def _add(self, values: Sequence[LossValue], part: Window, sums: _Sums) -> None:
        """Add the losses and reported values of one forward pass."""
        knowledge, samples = self._step.objective.knowledge, float(part.samples)
        shares = []
        for loss in values:
            if not loss.is_reported:
                is_known = self._may_check or loss.weight is not None or loss.name in knowledge.summands
                shares.append(share_of(knowledge, loss, part) if is_known else Share(samples, samples))
                sums.add(_LOSS, loss.name, _times(loss.value, shares[-1].factor), *shares[-1][1:])
        # A number reported beside a loss is weighted as that.
        is_sum = bool(knowledge.summands) and knowledge.adds_all
        usual = shares[0] if len(shares) == 1 else Share(1.0 if is_sum else samples, samples)
        for one in values:
            if one.is_reported:
                share = usual if one.weight is None else share_of(knowledge, one, part)
                sums.add(_REPORTED, one.name, _times(one.value, share.factor), *share[1:])


def check_losses(step: GradientStep, window: Window) -> None:
    """Try the losses on a few samples, and on fewer if memory runs out, where it is not known how they weigh them."""
    objective, halves = step.objective, balanced(window.samples, math.ceil(window.samples / 2))
    if is_ambiguous(objective.knowledge, window):
        objective.knowledge.ask_for_check()
    is_alone = window.samples == 1  # a check sees the divisor alone
    if objective.knowledge.is_stated or not objective.needs_check(window, halves, is_part=is_alone, is_due=False):
        return
    said = ""
    for _ in range(TRIES_TO_WEIGH):
        try:
            with torch.inference_mode(False):
                step.check_losses(window)
                objective.knowledge.warn_if_unchecked(is_said=not is_alone)
        except Exception as error:
            event = resolvable_oom(error, Phase.WEIGH, None, step.witness)
            if event is None:
                raise
        else:
            if objective.knowledge.is_torch_loss:  # which is known by now; the model is tried when it trains
                objective.knowledge.ask_for_check()
            return
        said = event.message
        step.memory.release()
        if step.savepoint.unrestored is not None:
            step.savepoint.unrestored.restore()
    objective.check_anew()
    raise whole_does_not_fit(step, said, Phase.WEIGH, TRIES_TO_WEIGH)


def _times(value: Tensor, factor: Any) -> Tensor:
    value = in_full(value.detach())  # the sum could overflow in half precision
    # If nothing counts, a mean is NaN and must add nothing.
    return torch.zeros_like(value) if isinstance(factor, float) and not factor else value * factor
