"""A window by `LossCheck` and `WindowWeights` alone: without an engine, ranks, a scaler or lack of memory."""

import itertools
from contextlib import nullcontext

import torch

from autoaccum._data.batches import Window
from autoaccum._engine.savepoint import Savepoint
from autoaccum._loss.graph_reader import leaves_of
from autoaccum._loss.knowledge import LossKnowledge, RecheckWindow
from autoaccum._loss.loss_values import loss_value
from autoaccum._loss.modes import quiet_training
from autoaccum._loss.sample_check import MOST_SAMPLES, LossCheck
from autoaccum._loss.window_weights import RemakeWindow, WindowWeights

CPU = torch.device("cpu")


class BySummands:
    """Leaves the gradient of windows in `.grad`.

    Attributes:
        knowledge: What is known of the losses.
        remade: Windows that were made again.
    """

    def __init__(self, run, model, *, is_models_own=False):
        self._run, self._parameters = run, [one for one in model.parameters() if one.requires_grad]
        self._model, self._mark, self._start = model, Savepoint([model], CPU), Savepoint([model], CPU)
        self.knowledge, self.remade, self._windows = LossKnowledge(), 0, 0
        self.knowledge.is_models_own = is_models_own

    def window(self, batch, sizes):
        """Return the loss of a window that is cut into these sizes."""
        self._windows += 1
        self._window, self._parts = (
            Window([batch]),
            list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)),
        )
        self.knowledge.begin_window()
        self._start.take()
        if self._windows & (self._windows - 1) == 0 or not self.knowledge.is_checked:
            self._check()
        totals, is_checked_again = None, False
        while True:
            self._start.restore()
            for parameter in self._parameters:
                parameter.grad = None
            try:
                if totals is None and self.knowledge.runs_forward_first:
                    totals = self._forward()
                    continue
                return self._attempt(totals)
            except RemakeWindow as wrong:
                self.remade += 1
                totals = wrong.totals
            except RecheckWindow as unknown:
                if is_checked_again:
                    raise unknown.error from None
                if not unknown.is_known:
                    is_checked_again = True
                    self._start.restore()
                    self._check()

    def _losses(self, batch, samples):
        raw = self._run(batch)
        raw = raw if isinstance(raw, dict) else {"loss": raw}
        raw = {"loss": raw["loss"]} if "loss" in raw else raw
        losses = [loss_value(name, value, samples, summed=False) for name, value in raw.items()]
        self.knowledge.note(losses)
        return losses, None

    def _of_part(self, start, size):
        return self._losses(self._window.cut(start, start + size), size)[0]

    def check(self):
        """Return a check of the losses."""
        return LossCheck(
            [self._losses], self.knowledge, lambda batch: batch, self._mark, nullcontext, casts=False,
            parameters=self._parameters,
        )  # fmt: skip

    def _check(self):
        check = self.check()
        self._mark.take(with_attributes=True)
        try:
            with quiet_training([self._model]):
                found = check.run(self._window, MOST_SAMPLES, 32)
        finally:
            self._mark.restore()
        self.knowledge.learn(found, is_complete=check.is_complete)

    def _forward(self):
        weights = WindowWeights(self.knowledge, self._window)
        for start, size in self._parts:
            for loss in self._of_part(start, size):
                weights.note(loss, start, size)
        return {key: float(total) for key, total in weights.totals().items()}

    def _attempt(self, totals):
        weights = WindowWeights(self.knowledge, self._window, totals=totals, is_exact=totals is not None)
        reported, reached = 0.0, []
        for start, size in self._parts:
            losses = self._of_part(start, size)
            weighed = [(loss, weights.weigh(loss, start, size)) for loss in losses]
            reached += [leaf for loss, value in weighed if value is None for leaf in leaves_of(loss.value)]
            values = [(loss, value) for loss, value in weighed if value is not None]
            for loss, value in values:
                reported += float(value.detach().nan_to_num() if loss.may_be_nan else value.detach())
            if values:
                sum(value for _, value in values).backward()
        correction = float(weights.correction())
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(correction)
        for leaf in reached:
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return reported * correction


def by_summands(form, model, optimizer):
    """A way to train, as those in `loss_outcomes`."""
    made = BySummands(lambda batch: form.raw(model, batch), model, is_models_own=form.loss is None)

    def train(batches):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            loss = made.window(batches[0], form.cut)
        except Exception:
            model.load_state_dict(state)
            optimizer.zero_grad()
            raise
        optimizer.step()
        return [loss], made.knowledge.warnings

    return train
