"""Runs the losses on a few samples of a window, and on two parts of them, for `loss_check`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from autoaccum import _oom
from autoaccum._data.nesting import map_tensors
from autoaccum._loss.graph_reader import read
from autoaccum._loss.loss_check import choose, forms_of, run_of, tolerance_of
from autoaccum._loss.modes import quiet_training
from autoaccum._loss.terms import Form, TermForm, check_pair, compares_samples, not_finite
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.graph_reader import ReadTerm
    from autoaccum._loss.loss_check import Run
    from autoaccum._loss.loss_weights import LossWeights
    from autoaccum._loss.modes import Mark
    from autoaccum._loss.terms import Term

# Runs a pass: returns the terms of a number of samples.
_Pass = Callable[[Any, int], "list[Term]"]
# The least relative difference between (sum, weight) pairs that is none.
_SAME_PAIR = 1e-4


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
        found = dict[str, list[TermForm]]()
        with torch.enable_grad(), quiet_training(self.modules):
            for source in self.passes:
                self._try(source, sample, first, found)
        return found

    def _try(self, source: _Pass, sample: Window, first: int, found: dict[str, list[TermForm]]) -> None:
        """Add the terms of one source's losses."""
        whole, pairs = self._runs(source, sample, 0, sample.samples)
        if self.weights.is_trusted:
            return  # as `loss=None` shows only now
        moves = bool(self.mark.settle())
        halves = [self._part(source, sample, *ends) for ends in ((0, first), (first, sample.samples))]
        room = max(self.tolerance, _SAME_PAIR)
        apart = {name: pair for name, pair in pairs.items() if not _checked(name, pair, halves, room)}
        again = self._try_again(source, sample, apart, room) if apart and not moves else None
        for name, run in whole.items():
            if not self._is_comparable(name, run, found):
                continue
            parts = [_part_of(name, run, runs, sample.samples) for runs, _ in halves]
            if is_vector := self.weights.is_vector(name):
                run, *parts = (_of_samples(one) for one in (run, *parts))  # noqa: PLW2901
            forms = forms_of(run, parts, None, self.tolerance, moves=moves)
            if any(form.form is Form.UNCONFIRMED for form in forms):
                again = self._runs(source, sample, 0, sample.samples, seed=1)[0] if again is None else again
                forms = forms_of(run, parts, again.get(name), self.tolerance, moves=moves)
            if is_vector:
                says = all(bool(one.gradients.isfinite().all()) for one in (run, *parts))
                if says and (forms[0].form is Form.UNCONFIRMED or not forms[0].is_read):
                    raise compares_samples(name)
                continue
            found[name] = forms

    def _try_again(
        self, source: _Pass, sample: Window, apart: Mapping[str, tuple[float, float]], room: float
    ) -> Mapping[str, Run]:
        """Run all samples with other random numbers, where sums of pairs do not add up.

        Raises:
            InvalidInputError: They are the same, so that samples are compared.
        """
        again, drawn = self._runs(source, sample, 0, sample.samples, seed=1)
        for name, pair in apart.items():
            if name in drawn and _adds_up(pair, [drawn[name]], room):
                raise compares_samples(name)
        return again

    def _is_comparable(self, name: str, run: Run, found: dict[str, list[TermForm]]) -> bool:
        """Whether a loss says something; where nothing counts in it, its form is supposed.

        Raises:
            InvalidInputError: It is not finite before anything was trained.
        """
        if any(weight == 0.0 for weight in run.weights):
            found[name] = [_supposed(term) for term in run.terms]
            self.is_complete = False
            return False
        if not math.isfinite(run.value) and name not in self.weights.forms:
            raise not_finite({name: run.value})
        return math.isfinite(run.value)  # otherwise it may result from the training itself

    def unchecked(self, window: Window) -> dict[str, list[TermForm]]:
        """Return the terms of each loss as the graph of a single sample suggests."""
        found = dict[str, list[TermForm]]()
        with torch.enable_grad(), quiet_training(self.modules):
            for source in self.passes:
                for term in self._numbers(self._terms(source, window.cut(0, 1), 1)):
                    found[term.name] = [_supposed(one) for one in read(term.value)]
        return {} if self.weights.is_trusted else found

    # --- passes -------------------------------------------------------------------------------------------------------

    def _part(self, source: _Pass, sample: Window, start: int, stop: int) -> Any:
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

    def _runs(
        self, source: _Pass, sample: Window, start: int, stop: int, seed: int = 0
    ) -> tuple[dict[str, Run], dict[str, tuple[float, float]]]:
        """Run samples `start` to `stop` (exclusive); return by name the losses that are no pairs, and pairs."""
        self.mark.restore()
        self.mark.random.seed(seed)
        cut, samples = sample.cut(start, stop), stop - start
        terms = self._terms(source, cut, samples)
        numbers = [term for term in terms if term.over is not Form.PAIR and term.value.requires_grad]
        pairs = {
            term.name: (float(term.value.detach()), float(term.weight or 0.0))
            for term in terms
            if term.over is Form.PAIR and not term.is_reported
        }
        if with_graph := [term.value for term in terms if term.value.requires_grad]:
            dtypes = (parameter.dtype for parameter in self.parameters)
            self.tolerance = tolerance_of(with_graph[0], casts=self.casts, dtypes=dtypes)
        last = len(numbers) - 1
        return {
            term.name: run_of(term.value, samples, cut, self.parameters, keep=place < last)
            for place, term in enumerate(numbers)
        }, pairs

    def _terms(self, source: _Pass, cut: Any, samples: int) -> list[Term]:
        # As tensors that a graph can save.
        batch = map_tensors(lambda one: one.clone() if one.is_inference() else one, self.place(cut))
        with self.autocast():
            return source(batch, samples)

    @staticmethod
    def _numbers(terms: Sequence[Term]) -> list[Term]:
        return [term for term in terms if not term.is_reported and term.over is None]


def _checked(name: str, pair: tuple[float, float], halves: Sequence[Any], room: float) -> bool:
    """Check a pair; return whether the sums of both parts, if both have it, add up to that of the whole."""
    parts = [of_half[name] for _, of_half in halves if name in of_half]
    if len(parts) < len(halves):
        return True
    check_pair(name, pair, parts, room)
    return _adds_up(pair, parts, room)


def _of_samples(run: Run) -> Run:
    """Return the run of a vector, whose mean runs over the samples, whatever its graph says."""
    return replace(run.whole(), weights=[float(run.samples)])


def _adds_up(pair: tuple[float, float], parts: Sequence[tuple[float, float]], room: float) -> bool:
    """Whether the sums of parts give that of the whole; also where it is no finite number."""
    added = sum(part[0] for part in parts)
    return not abs(pair[0] - added) > room * (abs(pair[0]) + sum(abs(part[0]) for part in parts))


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
