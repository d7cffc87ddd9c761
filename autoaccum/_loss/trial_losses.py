"""Runs the losses on a few samples of a window, and on two parts of them, for `loss_check`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from autoaccum import _oom
from autoaccum._data.nesting import map_tensors
from autoaccum._loss.graph_reader import read
from autoaccum._loss.loss_check import Form, TermForm, choose, forms_of, run_of, tolerance_of
from autoaccum._loss.terms import not_finite
from autoaccum._loss.training_mode import quiet_training
from autoaccum._loss.weighting import Over, check_pair
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.graph_reader import ReadTerm
    from autoaccum._loss.loss_check import Run
    from autoaccum._loss.loss_weights import LossWeights
    from autoaccum._loss.modes import Mark
    from autoaccum._loss.terms import Term

# How far from a term the value is looked for that it is computed from.
_STEPS = 8


class Tried(Protocol):
    """A model and its losses, as `Objective` has them."""

    weights: LossWeights
    nodes: dict[int, str]
    casts_itself: bool
    sources: tuple[Any, ...]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that a pass runs."""

    def terms(self, source: Any, batch: Any, samples: int) -> tuple[list[Term], Any]:
        """Run one source on one micro-batch."""


class TrialLosses:
    """Tries losses on a few samples. Each pass begins with the same state; the last one leaves its own.

    Args:
        objective: The model and its losses.
        place: Moves a batch to the device.
        mark: Taken before; restored before each pass.
        autocast: Returns the context that the model runs in.
        casts: Whether that context casts.
        parameters: The parameters whose gradients are compared.

    Attributes:
        is_complete: Whether something counted in every loss.
    """

    def __init__(
        self,
        objective: Tried,
        place: Callable[[Any], Any],
        mark: Mark,
        autocast: Callable[[], AbstractContextManager[object]],
        *,
        casts: bool,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._objective = objective
        self._place = place
        self._mark = mark
        self._autocast = autocast
        self._casts = casts or objective.casts_itself
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._tolerance = 0.0
        self.is_complete = True

    def forms(self, window: Window, most: int, telling: frozenset[Count]) -> dict[str, list[TermForm]] | None:
        """Return the terms of each loss that is a number, by name; None if the window has no two samples to try.

        Args:
            window: The window.
            most: The most samples to try.
            telling: Counts that the samples should tell apart.

        Raises:
            InvalidInputError: A pair is not (sum, weight), or a loss cannot be computed for a part of the samples.
        """
        chosen = choose(window, most, telling)
        if chosen is None:
            return None
        sample, first = chosen
        objective, found = self._objective, dict[str, list[TermForm]]()
        with torch.enable_grad(), quiet_training(objective.modules):
            for source in objective.sources:
                whole = self._runs(source, sample, 0, sample.samples)
                moves = bool(self._mark.settle())
                parts = [self._part(source, sample, *ends) for ends in ((0, first), (first, sample.samples))]
                again: dict[str, Run] | None = None
                for name, run in whole.items():
                    if not self._is_comparable(name, run, found):
                        continue
                    of_parts = [_part_of(name, run, part, sample.samples) for part in parts]
                    forms = forms_of(run, of_parts, None, self._tolerance, moves=moves)
                    if any(form.form is Form.UNCONFIRMED for form in forms):
                        if again is None:
                            again = self._runs(source, sample, 0, sample.samples, seed=1)
                        forms = forms_of(run, of_parts, again.get(name), self._tolerance, moves=moves)
                    pairs = zip(forms, run.terms, strict=False)
                    found[name] = [replace(form, name=self._name_of(term)) for form, term in pairs]
        return found

    def _is_comparable(self, name: str, run: Run, found: dict[str, list[TermForm]]) -> bool:
        """Whether a loss needs a check, and says something; where nothing counts in it, its form is supposed.

        Raises:
            InvalidInputError: It is not finite before anything was trained.
        """
        weights = self._objective.weights
        if any(weight == 0.0 for weight in run.weights):
            found[name] = [_supposed(term) for term in run.terms]
            self.is_complete = False
            return False
        if not math.isfinite(run.value):
            if name not in weights.forms:
                raise not_finite({name: run.value})
            return False  # it may result from the training itself
        return not weights.knows(name)

    def unchecked(self, window: Window) -> dict[str, list[TermForm]]:
        """Return the terms of each loss as the graph of a single sample suggests."""
        objective, found = self._objective, dict[str, list[TermForm]]()
        cut = window.cut(0, 1)
        with torch.enable_grad(), quiet_training(objective.modules):
            for source in objective.sources:
                with self._autocast():
                    terms, _ = objective.terms(source, self._placed(cut), 1)
                for term in terms:
                    if term.is_reported or term.over is not None or objective.weights.knows(term.name):
                        continue
                    found[term.name] = [_supposed(one) for one in read(term.value)]
        return found

    def _name_of(self, term: ReadTerm) -> str:
        """Return the name of the reported value that a term is computed from; "" if there is none."""
        node = term.node
        for _ in range(_STEPS):
            if node is None or id(node) in self._objective.nodes:
                return self._objective.nodes.get(id(node), "")
            inputs = [one for one, _ in node.next_functions if one is not None]
            node = inputs[0] if len(inputs) == 1 else None
        return ""

    def _part(self, source: Any, sample: Window, start: int, stop: int) -> dict[str, Run]:
        try:
            return self._runs(source, sample, start, stop)
        except Exception as error:
            if isinstance(error, InvalidInputError) or _oom.is_oom(error) or _oom.is_too_large(error):
                raise
            if _oom.is_device_lost(error):
                raise
            raise InvalidInputError(
                f"the loss could be computed for {sample.samples} samples, and not for {stop - start} of them "
                f"({_oom.first_line(error)}), so micro-batches of such sizes cannot be trained on; "
                "loss_reduction='mean' or 'sum' leaves this check out"
            ) from error

    def _placed(self, cut: Any) -> Any:
        """Return samples on the device, as tensors that a graph can save."""
        return map_tensors(lambda one: one.clone() if one.is_inference() else one, self._place(cut))

    def _runs(self, source: Any, sample: Window, start: int, stop: int, seed: int = 0) -> dict[str, Run]:
        """Return the losses of one forward pass by name, as runs of samples `start` to `stop` (exclusive)."""
        self._mark.restore()
        self._mark.random.seed(seed)
        cut, samples = sample.cut(start, stop), stop - start
        with self._autocast():
            terms, _ = self._objective.terms(source, self._placed(cut), samples)
        numbers = [term for term in terms if not term.is_reported and term.over is None and term.value.requires_grad]
        self._note_pairs(terms, start, stop, sample.samples)
        if numbers:
            dtypes = (parameter.dtype for parameter in self._parameters)
            self._tolerance = tolerance_of(numbers[0].value, casts=self._casts, dtypes=dtypes)
        last = len(numbers) - 1
        return {
            term.name: run_of(term.value, samples, cut, self._parameters, keep=place < last)
            for place, term in enumerate(numbers)
        }

    def _note_pairs(self, terms: Sequence[Term], start: int, stop: int, samples: int) -> None:
        """Check that the (sum, weight) pairs of the two parts add up to those of the whole."""
        pairs = {
            term.name: (float(term.value.detach()), float(term.weight or 0.0))
            for term in terms
            if term.over is Over.PAIR and not term.is_reported
        }
        if (start, stop) == (0, samples):
            self._whole_pairs: Mapping[str, tuple[float, float]] = pairs
        elif start == 0:
            self._first_pairs: Mapping[str, tuple[float, float]] = pairs
        else:
            for name, pair in pairs.items():
                if name in self._whole_pairs and name in self._first_pairs:
                    tolerance = max(self._tolerance, 1e-4)
                    check_pair(name, self._whole_pairs[name], [self._first_pairs[name], pair], tolerance)


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
