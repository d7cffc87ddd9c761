"""Runs the losses on a few samples of a window, and on two parts of them, for `loss_check`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoaccum import _oom
from autoaccum._data.nesting import map_tensors
from autoaccum._loss.graph_reader import read
from autoaccum._loss.loss_check import choose, forms_of, run_of, tolerance_of
from autoaccum._loss.modes import quiet_training
from autoaccum._loss.terms import Form, TermForm, no_mean, not_finite
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._loss.graph_reader import ReadTerm
    from autoaccum._loss.loss_check import Run
    from autoaccum._loss.loss_weights import LossWeights
    from autoaccum._loss.modes import Mark
    from autoaccum._loss.terms import Term

# Runs a pass: returns the terms of a number of samples.
_Pass = Callable[[Any, int], "list[Term]"]


@dataclass(slots=True)
class TrialLosses:
    """Tries losses on a few samples. Each pass begins with the same state; the last one leaves its own.

    Attributes:
        passes: The forward passes of a batch.
        modules: The modules that they run.
        weights: What is known of how losses weigh samples.
        place: Moves a batch to the device.
        mark: Taken before; restored before each pass.
        autocast: Returns the context that the model runs in.
        casts: Whether something casts.
        parameters: The parameters whose gradients are compared.
        is_complete: Whether something counted in every loss.
        tolerance: The relative difference that rounding may cause, as of the last pass.
    """

    passes: Sequence[_Pass]
    modules: Sequence[nn.Module]
    weights: LossWeights
    place: Callable[[Any], Any]
    mark: Mark
    autocast: Callable[[], AbstractContextManager[object]]
    casts: bool
    parameters: Sequence[nn.Parameter]
    is_complete: bool = True
    tolerance: float = 0.0

    def forms(self, window: Window, most: int) -> dict[str, list[TermForm]] | None:
        """Return the terms of each loss that is a number, by name; None if the window has no two samples to try.

        Args:
            window: The window.
            most: The most samples to try.

        Raises:
            InvalidInputError: A pair is not (sum, weight), or a loss cannot be computed for a part of the samples.
        """
        chosen = choose(window, most)
        if chosen is None:
            return None
        sample, first = chosen
        found = dict[str, list[TermForm]]()
        with torch.enable_grad(), quiet_training(self.modules):
            for source in self.passes:
                self._try(source, sample, first, found)
        return found

    def _try(self, source: _Pass, sample: Window, first: int, found: dict[str, list[TermForm]]) -> None:
        """Add the terms of one source's losses."""
        whole = self._runs(source, sample, 0, sample.samples)
        if self.weights.is_trusted:
            return  # as `loss=None` shows only now
        moves = bool(self.mark.settle())
        halves = [self._part(source, sample, *ends) for ends in ((0, first), (first, sample.samples))]
        again: Mapping[str, Run] | None = None
        for name, run in whole.items():
            if any(weight == 0.0 for weight in run.weights):  # nothing counts in it
                self.is_complete = False
                if not run.is_stated:
                    found[name] = [_supposed(term) for term in run.terms]
                continue
            if not math.isfinite(run.value):
                if name not in self.weights.forms:
                    raise not_finite({name: run.value})
                continue  # it may result from the training itself
            parts = [_part_of(name, run, of_part, sample.samples) for of_part in halves]
            forms = forms_of(run, parts, None, self.tolerance, moves=moves)
            if any(form.form is Form.UNCONFIRMED for form in forms):
                again = self._runs(source, sample, 0, sample.samples, seed=1) if again is None else again
                forms = forms_of(run, parts, again.get(name), self.tolerance, moves=moves)
            if not run.is_stated:
                found[name] = forms
            elif forms[0].form is not Form.MEAN or forms[0].is_clamped:
                raise no_mean(name, *((one.value, one.weights[0] or 0.0) for one in (run, *parts)))

    def unchecked(self, window: Window) -> dict[str, list[TermForm]]:
        """Return the terms of each loss as the graph of a single sample suggests."""
        found = dict[str, list[TermForm]]()
        with torch.enable_grad(), quiet_training(self.modules):
            for source in self.passes:
                for term in self._terms(source, window.cut(0, 1), 1):
                    if term.over is None and not term.is_reported:
                        found[term.name] = [_supposed(one) for one in read(term.value)]
        return {} if self.weights.is_trusted else found

    # --- passes -------------------------------------------------------------------------------------------------------

    def _part(self, source: _Pass, sample: Window, start: int, stop: int) -> dict[str, Run]:
        try:
            return self._runs(source, sample, start, stop)
        except Exception as error:
            is_lack = _oom.is_oom(error) or _oom.is_too_large(error) or _oom.is_device_lost(error)
            if is_lack or isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(
                f"the loss could be computed for {sample.samples} samples, and not for {stop - start} of them "
                f"({_oom.first_line(error)}), so micro-batches of such sizes cannot be trained on; "
                "loss_reduction='mean' or 'sum' leaves this check out"
            ) from error

    def _runs(self, source: _Pass, sample: Window, start: int, stop: int, seed: int = 0) -> dict[str, Run]:
        """Run samples `start` to `stop` (exclusive); return their losses by name."""
        self.mark.restore()
        self.mark.random.seed(seed)
        cut, samples = sample.cut(start, stop), stop - start
        terms = [one for one in self._terms(source, cut, samples) if one.value.requires_grad and not one.is_reported]
        if terms:
            dtypes = (parameter.dtype for parameter in self.parameters)
            self.tolerance = tolerance_of(terms[0].value, casts=self.casts, dtypes=dtypes)
        last = len(terms) - 1
        return {
            term.name: run_of(term, samples, cut, self.parameters, keep=place < last)
            for place, term in enumerate(terms)
        }

    def _terms(self, source: _Pass, cut: Any, samples: int) -> list[Term]:
        # As tensors that a graph can save.
        batch = map_tensors(lambda one: one.clone() if one.is_inference() else one, self.place(cut))
        with self.autocast():
            return source(batch, samples)


def _part_of(name: str, run: Run, part: Mapping[str, Run], samples: int) -> Run:
    """Return the run of a loss for a part; one of nothing where it has no graph, as where there are no targets."""
    if name in part:
        return part[name]
    other = next(iter(part.values()), None)
    return run.nothing(samples, {}) if other is None else run.nothing(other.samples, other.counts)


def _supposed(term: ReadTerm) -> TermForm:
    if term.weight is None:
        return TermForm(Form.UNCONFIRMED, is_read=False)
    return TermForm(Form.MEAN, per_sample=abs(float(term.weight))) if term.is_counted else TermForm(Form.SUM)
