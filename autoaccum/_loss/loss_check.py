"""Checks on a few samples what was read of a loss: that two parts of them give together what they give at once.

The samples come from all over a window. Their losses and gradients, and those of two parts of unlike size, must agree
in one of the ways in which a loss over a batch can be put together from parts: as a mean, whose weights add up; as a
sum; or as a constant, which no sample changes. What a loss divides by is read from its graph. Where that cannot be
read, it is looked for among the counts of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum import _oom
from autoaccum._data.nesting import copied, numbers_in
from autoaccum._loss.batch_counts import LABELS, SUM, counts_in, counts_of
from autoaccum._loss.graph_reader import ReadTerm, read
from autoaccum._loss.observation import gradients_of, only, projected, tolerance_of
from autoaccum._loss.terms import Form, TermForm, no_mean, not_finite
from autoaccum.errors import AutoaccumError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._data.nesting import Path
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.loss_forms import LossForms
    from autoaccum._loss.modes import Mark
    from autoaccum._loss.terms import Term


# The most samples of a check, and the number below which its two parts are alike.
MOST_SAMPLES = 8
_TO_HALVE = 7
# The most samples that are looked at to choose these, and the most choices where nothing counts in the first.
_LOOKED_AT, _MOST_CHOICES = 64, 8
# The most samples that are read one by one.
_MOST_ALONE = 6
# After so many passes of a first check, the next check looks for hidden state.
_MOST_PASSES = 3
# Relative differences of weights, which are counts, or sums in single precision.
_SAME_WEIGHT = 1e-5
# Passes of other random numbers differ by less than so many times what two of the same samples differ by, where that is
# known of so many parameters; and values, which are less random, by this part of them.
_SPREADS, _FOR_SPREAD, _NEARLY = 6.0, 4, 0.15


@dataclass(slots=True)
class Run:
    """What a loss gave for some samples.

    Attributes:
        samples: Their number.
        value: The loss.
        terms: Its terms, with their weights on the host.
        gradients: One number for each parameter of each term, shape (terms, parameters), on the host.
        counts: What is counted in the samples.
        numbers: Numbers that the batch carries.
        is_stated: Whether the loss is a pair or a vector, which says what its mean runs over.
    """

    samples: int
    value: float
    terms: list[ReadTerm]
    gradients: Tensor
    counts: Mapping[Count, float]
    numbers: Mapping[Path, float]
    is_stated: bool = False

    def unread(self) -> Run:
        """Return the same as a loss of a single term that could not be read."""
        terms = [replace(self.terms[0], weight=None)]
        return replace(self, terms=terms, gradients=self.gradients.sum(0, keepdim=True))

    def as_one(self) -> Run:
        """Return the same as a loss of a single term, divided by what its first one is."""
        return replace(self, terms=self.terms[:1], gradients=self.gradients.sum(0, keepdim=True))


# --- samples ----------------------------------------------------------------------------------------------------------


def choices(window: Window, most: int, larger: int, known: Sequence[TermForm] = ()) -> Iterator[tuple[Window, int]]:
    """Return samples from all over a window, and how many of them are in the first of two parts; first the best choice.

    The first choice has a sample that tells more of the divisors of `known` forms. Later choices are of other samples,
    and of more, up to `larger`, until none are left. A window of which no two samples can be joined has none.
    """
    groups = window.groups()
    largest = max(range(len(groups)), key=groups.__getitem__)
    start, samples = sum(groups[:largest]), groups[largest]
    number = min(most, samples)
    if number <= 1:
        return
    evenly = [start + place * (samples - 1) // (number - 1) for place in range(number)]
    telling = _telling(window, known, start, samples) if number < samples else []
    counting, unusual = _unusual(window, start, samples) if number < samples else ([], [])
    unusual = unusual[: max(0, number // 2 - len(counting[1:]))]
    rows = list(dict.fromkeys([*counting[:1], *telling, *counting[1:], *unusual, *evenly]))[:number]
    rest = [start + row for row in torch.randperm(samples, generator=torch.Generator().manual_seed(0)).tolist()]
    for _ in range(_MOST_CHOICES):
        # About a third in the first part: losses may need two samples. One part is odd, since they may take pairs.
        first = (len(rows) + 1) // 3 if len(rows) >= _TO_HALVE else len(rows) // 2
        yield window.chosen([rows[0], *rows[:0:-1]]), first
        used, number = set(rows), min(2 * number, max(number, larger))
        rest = [row for row in rest if row not in used]
        rows = rest[:number]
        if len(rows) <= 1:
            return


def _unusual(window: Window, start: int, samples: int) -> tuple[list[int], list[int]]:
    """Return two samples in which most counts and one with the least; then the least and most of each count."""
    if not window.is_nested:
        return [], []
    rows = range(start, start + samples, max(1, samples // _LOOKED_AT))
    counts = [counts_in(window.cut(row, row + 1), 1) for row in rows]
    in_all = [count for count in counts[0] if all(count in of_row for of_row in counts)]
    numbers = {count: [of_row[count] for of_row in counts] for count in in_all}
    # Something has to count in both parts: labels, or what a mask keeps.
    masks = [of_rows for (way, _), of_rows in numbers.items() if way in (LABELS, SUM) and not min(of_rows)]
    labels = next((of_rows for (way, _), of_rows in numbers.items() if way == LABELS), None)
    in_each = [(sum(mask[at] > 0 for mask in masks), labels and labels[at]) for at in range(len(rows))]
    by_number = sorted(range(len(rows)), key=in_each.__getitem__)
    counting = [*by_number[:-3:-1], by_number[0]] if in_each[by_number[0]] != in_each[by_number[-1]] else []
    found = list[int]()
    for (way, _), of_rows in numbers.items():
        if way != SUM and min(of_rows) != max(of_rows):
            found += [of_rows.index(min(of_rows)), of_rows.index(max(of_rows))]
    return [rows[at] for at in counting], [rows[at] for at in dict.fromkeys(found)]


def _telling(window: Window, forms: Sequence[TermForm], start: int, samples: int) -> list[int]:
    """Return the sample whose counts tell most of the divisors of means; none if no sample tells anything.

    A sample with a count of 0 comes last: a check learns nothing where nothing counts.
    """
    doubtful = [form for form in forms if len(form.counts) > 1 and window.is_nested]
    wanted = frozenset(count for form in doubtful for count in form.counts)

    def told(row: int) -> tuple[bool, int, int]:
        counted = counts_of(window, row, row + 1, wanted)
        kinds = [{round(counted[count] * each, 6) for count, each in form.counts.items()} for form in doubtful]
        more = sum(map(len, kinds)) - len(doubtful)
        return bool(more) and all(counted.values()), more, -row

    rows = range(start, start + samples, max(1, samples // _LOOKED_AT)) if doubtful else ()
    _, more, row = max(map(told, rows), default=(False, 0, 0))
    return [-row] if more else []


# --- one run ----------------------------------------------------------------------------------------------------------


def run_of(term: Term, samples: int, batch: Any, parameters: Sequence[nn.Parameter], *, keep: bool) -> Run:
    """Return what a loss gave; its graph is used up."""
    loss, is_stated = term.value, term.over is not None
    if is_stated:  # its mean runs over what it says, whatever its graph says
        weight = float(samples if term.over is Form.VECTOR else term.weight or 0.0)
        loss = loss / weight if term.over is Form.PAIR else loss
        terms = [ReadTerm(loss.grad_fn, weight)]
    else:
        terms = read(loss)
        for one in terms:
            one.weight = _on_the_host(one.weight)
    rows = []
    for number in range(len(terms)) if parameters else ():
        with only(terms, number):
            rows.append(projected(gradients_of(loss, parameters, keep=keep or number + 1 < len(terms))))
    counts = counts_in(batch, samples)
    # Where gradients cannot be had, the value of a single term has to do.
    value = loss.detach().to("cpu", torch.float64)
    gradients = torch.stack(rows) if rows else value.new_zeros(len(terms), 1) if len(terms) > 1 else value.reshape(1, 1)
    return Run(samples, float(value), terms, gradients, counts, numbers_in(batch), is_stated=is_stated)


def _on_the_host(weight: Any) -> float | None:
    """Return a weight that was read as a number: 0 for what is multiplied by 0, which is not there."""
    return None if weight is None else 0.0 if math.isinf(weight) else float(weight)


# --- what runs show ---------------------------------------------------------------------------------------------------


def forms_of(whole: Run, parts: Sequence[Run], again: Run | None, tolerance: float) -> list[TermForm]:
    """Return how each term of a loss is put together.

    Args:
        whole: The run of all samples.
        parts: The runs of two parts of them.
        again: One more run of all samples, with other random numbers; None if nothing is random.
        tolerance: The relative difference that rounding may cause.
    """
    is_random = again is not None and _differ(whole, again, tolerance)
    if len({len(run.terms) for run in (whole, *parts)}) > 1:
        whole, parts = whole.unread(), [part.unread() for part in parts]
    runs = [whole, *parts]
    spread = again if is_random else None
    forms = [_Compared(number, runs, tolerance, spread).form() for number in range(len(whole.terms))]
    if forms[0].form is Form.UNCONFIRMED and forms[0].is_read and not (is_random or whole.is_stated or len(forms) > 1):
        # It was misread: perhaps a count of the batch fits.
        other = _Compared(0, [run.unread() for run in runs], tolerance, None).form()
        forms = forms if other.form is Form.UNCONFIRMED else [other]
    return forms


def _differ(one: Run, other: Run, tolerance: float) -> bool:
    """Whether two runs of the same samples are of unlike random numbers."""
    if not _close(one.value, other.value, tolerance * abs(one.value)):
        return True
    gradients, others = one.gradients.sum(0), other.gradients.sum(0)
    return float((gradients - others).norm()) > tolerance * float(gradients.norm())


class _Compared:
    """Compares one term of all samples with that of the parts.

    Args:
        number: The term.
        runs: All samples, then the parts.
        tolerance: The relative difference that rounding may cause.
        again: All samples with other random numbers, where they make a difference.
    """

    def __init__(self, number: int, runs: Sequence[Run], tolerance: float, again: Run | None) -> None:
        self._runs = runs
        self._terms = [run.terms[number] for run in runs]
        self._gradients = [run.gradients[number] for run in runs]
        self._added = [self._gradients]  # what adds up
        if len(runs[0].terms) == 1:  # otherwise the value of a term is not known
            self._added.append([torch.tensor([run.value], dtype=torch.float64) for run in runs])
        self._tolerance = tolerance
        self._is_random = again is not None
        is_alike = again is not None and len(again.terms) == len(runs[0].terms)
        self._again = again.gradients[number] if again is not None and is_alike else self._gradients[0]

    def form(self) -> TermForm:
        """Return how the term is put together."""
        weights = [term.weight for term in self._terms]
        is_read = None not in weights
        if is_read and (mean := self._read_mean(weights)) is not None:
            return mean
        whole, *parts = self._gradients
        norm = float(whole.norm())
        if norm and all(float((one - whole).norm()) <= self._tolerance * (float(one.norm()) + norm) for one in parts):
            return TermForm(Form.CONSTANT)
        if not is_read:
            return self._unread()
        weight, near = weights[0], _SAME_WEIGHT * abs(weights[0])
        if all(_close(one, weight, near) for one in weights) and self._is_sum():
            return _sum_of(self._terms[0], self._runs[0].numbers)
        return TermForm(Form.UNCONFIRMED)

    def _is_sum(self) -> bool:
        """Whether the parts add up to the whole: as far as can be seen, where passes are random."""
        whole, *parts = self._gradients
        if not all(float(one.norm()) for one in parts):  # a mean of the other part is a sum, too
            return not float(whole.norm())
        if not self._is_random:
            return self._agree([1.0] * len(parts))
        if len(whole) >= _FOR_SPREAD:
            off, spread = float((sum(parts) - whole).norm()), float((self._again - whole).norm())
            if off > _SPREADS * spread:
                return False
        return all(
            abs(float(sum(parts) - whole)) <= _NEARLY * float(sum(map(abs, parts)) + abs(whole))
            for whole, *parts in self._added[1:]
        )

    def _agree(self, factors: Sequence[float]) -> bool:
        """Whether gradients and values of the parts, times these factors, add up to those of the whole."""
        for whole, *parts in () if self._is_random else self._added:
            pairs = zip(factors, parts, strict=True)
            scaled = torch.stack([factor * one if factor else torch.zeros_like(one) for factor, one in pairs])
            room = self._tolerance * float(scaled.norm(dim=1).sum() + whole.norm())
            if not float((scaled.sum(0) - whole).norm()) <= room:  # also where it is NaN
                return False
        return True

    def _read_mean(self, weights: Sequence[float]) -> TermForm | None:
        """Return the form of a term whose weights add up; None if they do not."""
        # Weights in a pair may have half precision.
        room = (self._tolerance if self._runs[0].is_stated else _SAME_WEIGHT) * max(map(abs, weights))
        # max(1, n) reads 1 where nothing counts.
        counted = [0.0 if term.divisor == 1 else one for term, one in zip(self._terms, weights, strict=True)]
        for whole, *parts in (weights, [weights[0], *counted[1:]]):
            if whole and _close(sum(parts), whole, room) and self._agree([one / whole for one in parts]):
                is_clamped = parts != list(weights[1:])
                return None if is_clamped and self._is_random else self._mean([whole, *parts], is_clamped=is_clamped)
        return None

    def _mean(self, weights: Sequence[float], *, is_clamped: bool) -> TermForm:
        """Return the form of a term whose weights add up."""
        divisors = [term.divisor for term in self._terms]
        # max(1, n) is never below 1, and a divisor that is always 1 is no count.
        may_be = all(one is not None and float(one) >= 1 for one in divisors) and float(divisors[0] or 0) > 1
        return TermForm(
            Form.MEAN,
            is_counted=all(term.is_counted for term in self._terms),
            per_sample=abs(weights[0]) / self._runs[0].samples,
            shares=tuple(one / weights[0] for one in weights[1:]),
            counts=_divided_by(weights, [run.counts for run in self._runs]),
            least=min((one for one in weights[1:] if one > 0), default=math.inf),
            may_be_clamped=may_be or is_clamped,
            is_clamped=is_clamped,
        )

    def _unread(self) -> TermForm:
        """Return the form of a term that could not be read, if counts of the batch or a sum explain it."""
        unknown = TermForm(Form.UNCONFIRMED, is_read=False)
        whole, *parts = self._runs
        if (
            self._is_random
            or any(term.is_nonlinear for term in self._terms)
            or not all(float(one.norm()) for one in self._gradients[1:])
        ):
            return unknown  # their agreement says nothing
        shares = {
            count: tuple(part.counts.get(count, 0.0) / total for part in parts)
            for count, total in whole.counts.items()
            if total > 0
        }
        fitting = {count: of_parts for count, of_parts in shares.items() if self._agree(of_parts)}
        is_sum = self._agree([1.0] * len(parts))
        if not fitting:
            return TermForm(Form.SUM, is_read=False) if is_sum else unknown
        first, of_first = next(iter(fitting.items()))
        # Others that fit to within rounding, but weigh the parts otherwise, would make it a guess.
        pairs = [pair for of_parts in fitting.values() for pair in zip(of_parts, of_first, strict=True)]
        if is_sum or not all(_close(one, its, _SAME_WEIGHT) for one, its in pairs):
            return unknown
        per_sample, counts = whole.counts[first] / whole.samples, dict.fromkeys(fitting, 1.0)
        return TermForm(Form.MEAN, is_read=False, per_sample=per_sample, shares=of_first, counts=counts)


def _divided_by(
    weights: Sequence[float], counts: Sequence[Mapping[Count, float]], may_be_clamped: Sequence[bool] = ()
) -> dict[Count, float]:
    """Return the counts that runs are divided by, and what each is multiplied by.

    Args:
        weights: What each run is divided by.
        counts: What is counted in each.
        may_be_clamped: Whether each may be divided by max(1, n) of which n is 0; by default none.
    """
    may_be_clamped = may_be_clamped or [False] * len(weights)
    found: dict[Count, float] = {}
    for count in counts[0]:
        numbers = [of_run.get(count, 0.0) for of_run in counts]
        each = next((weight / number for weight, number in zip(weights, numbers, strict=True) if number > 0), 1.0)
        if each and all(
            _close(number * each, weight, _SAME_WEIGHT * abs(weight)) or (may_be and not number and each == 1.0)
            for number, weight, may_be in zip(numbers, weights, may_be_clamped, strict=True)
        ):
            found[count] = each
    return found


def _close(one: float, other: float, room: float) -> bool:
    return abs(one - other) <= room  # False where either is NaN


# --- passes of a check ------------------------------------------------------------------------------------------------


# Runs a pass: returns the terms of a number of samples, and outputs.
_Pass = Callable[[Any, int], "tuple[list[Term], Any]"]


@dataclass(slots=True)
class TrialLosses:
    """Tries losses on a few samples, with graphs. Each pass begins with the same state; the last one leaves its own.

    Attributes:
        mark: Taken before; restored before each pass.
        tells_of_state: Whether to look for state in attributes, which passes move: in training mode.
        is_complete: Whether every loss was confirmed: something counted in both parts, and its divisor tells its form.
        tolerance: The relative difference that rounding may cause, as of the last pass.
    """

    passes: Sequence[_Pass]
    weights: LossForms
    place: Callable[[Any], Any]
    mark: Mark
    autocast: Callable[[], AbstractContextManager[object]]
    casts: bool
    parameters: Sequence[nn.Parameter]
    tells_of_state: bool = False
    is_complete: bool = True
    tolerance: float = 0.0
    _divided_by_1: set[str] = field(default_factory=set)  # losses that look like sums
    _found: dict[str, list[TermForm]] = field(default_factory=dict)  # by the choices of samples until now
    _open: set[str] = field(default_factory=set)  # losses that no choice has confirmed yet
    _confirmed: set[str] = field(default_factory=set)
    _passes: int = 0

    def forms(self, window: Window, most: int, larger: int) -> dict[str, list[TermForm]] | None:
        """Return the terms of each loss that is a number, by name; None if the window has no two samples to try.

        Args:
            window: The window.
            most: The most samples to try.
            larger: What further choices may grow to, where those do not confirm a loss of which nothing is known.

        Raises:
            InvalidInputError: A pair is not (sum, weight), or a loss cannot be computed for a part of the samples.
        """
        has_tried = False
        # Ranks try the same samples, and may not know the same.
        known = [form for forms in self.weights.forms.values() for form in forms if self.weights.counted is None]
        for sample, first in choices(window, most, larger, known):
            open_before = set(self._open)
            try:
                for source in self.passes:
                    self._try(source, sample, first)
            except Exception as error:
                if not has_tried or not _oom.is_oom(error):
                    raise
                _oom.let_go(error)  # the choice was of more samples
                self._open |= open_before
                break
            has_tried = True
            if all(self._known(name) for name in self._open):
                break
        self.is_complete = not self._open
        for name in sorted(self._divided_by_1):
            self.weights.warn_of_divisor_1(name)
        return self._found if has_tried else None

    def _try(self, source: _Pass, sample: Window, first: int) -> None:
        """Find the terms of one source's losses that are not confirmed yet."""
        self._passes = 0
        whole = self._whole(source, sample)
        self._look_for_state(source, whole, sample)
        if self.weights.is_trusted:  # as `loss=None` shows only now
            self._try_model(source, whole, sample, first)
        else:
            self._try_loss(source, whole, sample, first)
        self._look_for_hidden_state(source, whole, sample)

    def _try_loss(self, source: _Pass, whole: Mapping[str, Run], sample: Window, first: int) -> None:
        """Find the terms of losses, given those of all samples."""
        halves = self._halves(source, whole, sample, first)
        for name, run in whole.items():
            if name in self._confirmed:
                continue
            self._open.discard(name)
            if any(term.weight == 0.0 for term in run.terms) or not run.gradients.any():  # nothing counts in it
                self._open.add(name)
                if not run.is_stated:
                    self._found[name] = self._known(name) or list(map(_of_nothing, run.terms))
            elif math.isfinite(run.value):
                parts = [_part_of(name, run, of_part, sample.samples) for of_part in halves]
                forms = self._forms_of(name, run, parts, partial(self._runs, source, sample, 0, sample.samples))
                if not run.is_stated:
                    self._found[name] = forms
                else:
                    self._confirm_stated(name, [run, *parts], forms[0])
                if name not in self._open:
                    self._confirmed.add(name)
            elif name not in self.weights.forms:  # otherwise it may result from the training itself
                raise not_finite({name: run.value})

    def _look_for_state(self, source: _Pass, whole: Mapping[str, Run], sample: Window) -> None:
        """Warn of attributes that passes move, if they make a difference: not of an attention kept to be looked at."""
        names = self.mark.moved_attributes() if self.tells_of_state else []
        # A flag that a buffer is filled makes a difference beside the empty buffer alone.
        if (
            whole
            and names
            and all(
                self._depends_on_state(source, whole, sample, with_buffers=also_buffers)
                for also_buffers in (False, True)
            )
        ):
            self.weights.warn_of_state(names)

    def _look_for_hidden_state(self, source: _Pass, whole: Mapping[str, Run], sample: Window) -> None:
        """Warn if another pass over all samples differs from the first, though all that is known was put back."""
        is_later = self._passes > _MOST_PASSES and not self.weights.forms.keys() >= whole.keys()
        if not (whole and self.tells_of_state) or self.weights.warnings or is_later:
            return
        again = self._runs(source, sample, 0, sample.samples)
        finite = {name: run for name, run in whole.items() if math.isfinite(run.value) and name in again}
        if any(_differ(run, again[name], self.tolerance) for name, run in finite.items()):
            self.weights.warn_of_hidden_state()

    def _depends_on_state(
        self, source: _Pass, whole: Mapping[str, Run], sample: Window, *, with_buffers: bool = True
    ) -> bool:
        """Whether a pass gives other losses after another one than before it, for the same samples."""

        def again(**restored: bool) -> bool:
            found = self._runs(source, sample, 0, sample.samples, **restored)
            return any(name in found and _differ(run, found[name], self.tolerance) for name, run in whole.items())

        # The second as random numbers that are not seeded make every time.
        has_moved = self.mark.has_moved()
        return has_moved and again(with_attributes=False, with_buffers=not with_buffers) and not again()

    def _forms_of(
        self, name: str, run: Run, parts: Sequence[Run], again: Callable[..., Mapping[str, Run]]
    ) -> list[TermForm]:
        """Return how the terms of a loss are put together; `again` runs all samples."""
        forms = forms_of(run, parts, None, self.tolerance)
        if any(form.form is Form.UNCONFIRMED for form in forms):
            forms = forms_of(run, parts, again(seed=1).get(name), self.tolerance)
            each = " and ".join(f"{part.value:.4g} for {part.samples}" for part in parts)
            state = ""
            if any(form.form is Form.UNCONFIRMED for form in forms) and self.mark.has_moved():
                moved, same = again(with_buffers=False).get(name, run), again().get(name, run)
                if _differ(run, moved, self.tolerance) and not _differ(run, same, self.tolerance):
                    state = f"; called again for all, it is {moved.value:.4g}: it depends on state that forward() moves"
            self.weights.tried[name] = f" (it is {run.value:.4g} for {run.samples} samples, and {each} of them{state})"
            if known := self._without_parts(name, run, parts):
                return known
        self._divided_by_1.discard(name)
        if any(_may_be_clamped(term, form) for term, form in zip(run.terms, forms, strict=False)):
            self._open.add(name)
            forms = self._known(name) or [replace(form, is_guess=form.form is Form.SUM) for form in forms]
            if any(form.form is Form.SUM for form in forms):
                self._divided_by_1.add(name)
        return forms

    def _without_parts(self, name: str, run: Run, parts: Sequence[Run]) -> list[TermForm]:
        """Return the forms of before, or that the graph suggests, where one part says nothing; none otherwise."""
        if run.is_stated or not any(_is_empty(part, run) for part in parts):
            return []
        self._open.add(name)
        # Neither a loss of torch nor with a divisor that counts, it may be a mean that was misread.
        are_read = all(
            (term.is_counted and term.divisor is not None) or hasattr(term.end, "_saved_reduction")
            for term in run.terms
        )
        known = self._known(name)
        if known or not are_read:
            return known
        # What counts is 0 in one part, so a divisor that is the same there is no count, unless it is max(1, n).
        if any(map(_is_divided_by_1, run.terms)):
            self._divided_by_1.add(name)
        return [
            _of_nothing(term) if term.divisor is None or _is_divided_by_1(term) else _sum_of(term, run.numbers)
            for term in run.terms
        ]

    def _known(self, name: str) -> list[TermForm]:
        """Return the terms of a loss that an earlier check, or an earlier choice of samples, has shown."""
        both = self.weights.forms.get(name, ()), self._found.get(name, ())
        return next((list(forms) for forms in both if forms and not any(form.is_guess for form in forms)), [])

    def _try_model(self, source: _Pass, whole: Mapping[str, Run], sample: Window, first: int) -> None:
        """Look whether a model compares samples, whose loss is one of torch."""
        if not whole:
            return
        try:
            halves = self._halves(source, whole, sample, first)
        except InvalidInputError:
            return  # micro-batches may have other sizes
        for name, run in whole.items():
            runs = [run, *(_part_of(name, run, of_part, sample.samples) for of_part in halves)]
            if not all(math.isfinite(one.value) and one.terms[0].weight for one in runs):
                continue  # nothing counts, or it cannot be read
            if not all(bool(one.gradients.isfinite().all() and one.gradients.any()) for one in runs):
                continue  # of which half precision is the reason, or nothing counts in a sum
            whole_run, *parts = (one.as_one() for one in runs)
            (form,) = forms_of(whole_run, parts, None, self.tolerance)
            if not self.weights.is_as_stated(name, form):
                again = self._runs(source, sample, 0, sample.samples, seed=1)
                if _differ(whole_run, again[name].as_one(), self.tolerance):
                    continue  # it is random
                self.weights.warn_of_compared_samples(by_state=self._depends_on_state(source, whole, sample))

    def _confirm_stated(self, name: str, runs: Sequence[Run], form: TermForm) -> None:
        """Reject a pair or a vector that is not what it says."""
        weights = [one.terms[0].weight for one in runs]
        if 0.0 in weights:  # of one part alone, a mean is the same as a sum over its weight
            self._open.add(name)
        is_finite = all(bool(one.gradients.isfinite().all()) for one in runs if one.terms[0].weight)
        if is_finite and (form.form is not Form.MEAN or form.is_clamped):
            raise no_mean(name, *((one.value, weight) for one, weight in zip(runs, weights, strict=True)))

    def unchecked(self, window: Window) -> dict[str, list[TermForm]]:
        """Return the terms of each loss as its graphs suggest of some samples, each by itself."""
        rows = [*dict.fromkeys((0, window.samples // 2, window.samples - 1))]
        cuts, of_rows = list[Any](), list[list[dict[str, list[ReadTerm]]]]()
        found = dict[str, list[TermForm]]()
        while len(cuts) < len(rows):
            cuts += [window.cut(row, row + 1) for row in rows[len(cuts) :]]
            of_rows += [[self._read_alone(source, cut) for source in self.passes] for cut in cuts[len(of_rows) :]]
            found = self._of_alone(window, cuts, of_rows)
            if len(rows) < _MOST_ALONE:
                every = [form for own in found.values() for form in own]
                rows += [row for row in _telling(window, every, 0, window.samples) if row not in rows]
        return {} if self.weights.is_trusted else found

    def _of_alone(
        self, window: Window, cuts: Sequence[Any], of_rows: Sequence[Sequence[Mapping[str, list[ReadTerm]]]]
    ) -> dict[str, list[TermForm]]:
        """Return the terms of each loss, given some samples and what was read of each, of one pass after the other."""
        found = dict[str, list[TermForm]]()
        alone = _Alone.of(window, cuts, self.weights.counted)
        for of_samples in zip(*of_rows, strict=True):
            for name, terms in of_samples[0].items():
                alike = [own for own in (of_sample.get(name, []) for of_sample in of_samples) if len(own) == len(terms)]
                is_known = len(alike) == len(cuts)
                found[name] = (
                    alone.forms(list(zip(*alike, strict=True))) if is_known else list(map(_by_graph_alone, terms))
                )
        return found

    def _read_alone(self, source: _Pass, cut: Any) -> dict[str, list[ReadTerm]]:
        """Return the terms of each loss of one sample, without their graphs."""
        found = dict[str, list[ReadTerm]]()
        for term in self._terms(source, cut, 1):
            if term.over is None and not term.is_reported:
                terms = read(term.value)
                may_be_0 = len(terms) > 1 or not float(term.value.detach())
                found[term.name] = [
                    replace(one, node=None, end=None, weight=_on_the_host(one.weight), may_be_0=may_be_0)
                    for one in terms
                ]
        return found

    # --- passes -------------------------------------------------------------------------------------------------------

    def _halves(self, source: _Pass, whole: Mapping[str, Run], sample: Window, first: int) -> list[dict[str, Run]]:
        """Return the losses of two parts: of such in which something counts, where there are any."""
        least, tried, halves = min(first, 2), set[int](), list[dict[str, Run]]()
        while True:
            tried.add(first)
            try:
                halves = [self._part(source, sample, *ends) for ends in ((0, first), (first, sample.samples))]
            except InvalidInputError:  # the loss takes no parts of these sizes
                if not halves and first <= least:
                    raise
                return halves or self._of_pairs(source, sample, first)
            empty = {
                place
                for place, part in enumerate(halves)
                for name, run in whole.items()
                if _is_empty(_part_of(name, run, part, sample.samples), run)
            }
            first += 1 if empty == {0} else -1
            if len(empty) != 1 or first in tried or not least <= first <= sample.samples - least:
                return halves

    def _of_pairs(self, source: _Pass, sample: Window, first: int) -> list[dict[str, Run]]:
        """Return the losses of parts for a loss that takes not every odd number of samples, as one of pairs does."""
        with suppress(InvalidInputError):  # what it does not take is an error in training too
            return [self._part(source, sample, *ends) for ends in pairwise((0, first, 2 * first, sample.samples))]
        return [self._part(source, sample, *ends) for ends in ((0, first - 1), (first - 1, sample.samples))]

    def _whole(self, source: _Pass, sample: Window) -> dict[str, Run]:
        """Return the losses of all samples; none if a model does not take so many, and needs no check."""
        try:
            return self._runs(source, sample, 0, sample.samples)
        except Exception as error:
            if _is_lack(error) or isinstance(error, AutoaccumError):
                raise
            if self.weights.is_trusted:
                return {}
            error.add_note(
                f"autoaccum: it is an error of the model or the loss, on the first {sample.samples} samples that were "
                "tried. Only if they take certain numbers of samples alone, pass loss_reduction='mean' or 'sum', which "
                "leaves this trial out, and a micro_batch= of such a number"
            )
            raise

    def _part(self, source: _Pass, sample: Window, start: int, stop: int) -> dict[str, Run]:
        try:
            return self._runs(source, sample, start, stop)
        except Exception as error:
            if _is_lack(error) or isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(
                f"the loss could be computed for {sample.samples} samples, and not for {stop - start} of them "
                f"({_oom.first_line(error)}), so micro-batches of such sizes cannot be trained on; "
                "loss_reduction='mean' or 'sum' leaves this check out"
            ) from error

    def _runs(
        self,
        source: _Pass,
        sample: Window,
        start: int,
        stop: int,
        seed: int = 0,
        *,
        with_buffers: bool = True,
        with_attributes: bool = True,
    ) -> dict[str, Run]:
        """Run samples `start` to `stop` (exclusive); return their losses by name.

        Args:
            source: The pass.
            sample: The samples.
            start: The first.
            stop: The one after the last.
            seed: Of the random numbers.
            with_buffers: Whether to begin with the state of before, and not as the last pass has left it.
            with_attributes: Whether that includes plain attributes.
        """
        self._passes += 1
        if with_buffers:
            self.mark.restore(with_attributes=with_attributes)
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
        # As tensors that a graph can save, and that a pass may change.
        batch = copied(self.place(cut))
        with self.autocast():
            return source(batch, samples)[0]


def _is_lack(error: Exception) -> bool:
    return _oom.is_oom(error) or _oom.is_too_large(error) or _oom.is_device_lost(error)


def _part_of(name: str, run: Run, part: Mapping[str, Run], samples: int) -> Run:
    """Return the run of a loss for a part; one of nothing where it has no graph, as where there are no targets."""
    if name in part:
        return part[name]
    other = next(iter(part.values()), None)
    number, counts = (samples, {}) if other is None else (other.samples, other.counts)
    terms, gradients = [ReadTerm(None, 0.0) for _ in run.terms], torch.zeros_like(run.gradients)
    return replace(run, samples=number, value=0.0, terms=terms, gradients=gradients, counts=counts)


def _is_empty(part: Run, whole: Run) -> bool:
    """Whether nothing counts in a part, though that cannot be read, or has to be compared."""
    weights, others = ([term.weight for term in run.terms] for run in (part, whole))
    if whole.is_stated:
        return bool(others[0]) and weights[0] == 0.0
    return weights == others and not bool(part.gradients.any()) and bool(whole.gradients.any())


def _sum_of(term: ReadTerm, numbers: Mapping[Path, float]) -> TermForm:
    """Return the form of a sum that is divided by the same in all parts, which may be a number of the batch."""
    weight = abs(float(term.weight or 0.0))
    near = _SAME_WEIGHT * weight
    # Without a divisor the 1 is that of a plain sum, and a number of the batch is 1 by accident.
    is_divided = term.divisor is not None or not _close(weight, 1.0, near)
    return TermForm(
        Form.SUM, number=next((at for at, one in numbers.items() if is_divided and _close(one, weight, near)), None)
    )


def _by_graph_alone(term: ReadTerm) -> TermForm:
    if term.weight is None:
        return TermForm(Form.UNCONFIRMED, is_read=False, is_guess=True)
    if term.is_counted or not term.weight:
        return TermForm(Form.MEAN, per_sample=abs(float(term.weight)), is_guess=True)
    return TermForm(Form.SUM, is_guess=True)


def _of_nothing(term: ReadTerm) -> TermForm:
    """Return what the graph suggests where nothing counts, so that a divisor of 1 is no count."""
    return TermForm(Form.SUM, is_guess=True) if _is_divided_by_1(term) else _by_graph_alone(term)


@dataclass(slots=True)
class _Alone:
    """What single samples of a window, of which no two fit or can be joined, tell of the terms of a loss.

    Attributes:
        counts: What is counted in each.
        of_window: What is counted in the whole window, of all ranks, where that takes no memory.
        numbers: The numbers that the batches of all of them carry alike.
    """

    counts: Sequence[Mapping[Count, float]]
    of_window: Mapping[Count, float]
    numbers: Mapping[Path, float]

    @classmethod
    def of(cls, window: Window, cuts: Sequence[Any], counted: Mapping[Count, float] | None) -> _Alone:
        counts = [counts_in(cut, 1) for cut in cuts]
        if not window.is_nested:
            return cls(counts, {}, {})  # a split may count what it joins
        first, *others = map(numbers_in, cuts)
        numbers = {at: one for at, one in first.items() if all(other.get(at) == one for other in others)}
        of_window = counts_of(window, 0, window.samples, frozenset(counts[0])) if counted is None else counted
        return cls(counts, of_window, numbers)

    def forms(self, by_term: Sequence[Sequence[ReadTerm]]) -> list[TermForm]:
        """Return what the graphs of the samples suggest; by terms, what each has of every sample."""
        if all(map(self._is_constant, by_term)):
            sums = [replace(_sum_of(terms[0], self.numbers), is_guess=True) for terms in by_term]
            if any(
                one.number is not None or self._counts_window(terms[0])
                for one, terms in zip(sums, by_term, strict=True)
            ):
                return sums
        # Of a sample in which nothing counts, a graph says little.
        telling = max(
            zip(*by_term, strict=True), key=lambda one: sum(bool(term.weight) - term.may_be_0 for term in one)
        )
        found = []
        for terms, one in zip(by_term, telling, strict=True):
            form = _by_graph_alone(one)
            is_mean = form.form is Form.MEAN and all(one.weight is not None for one in terms)
            weights = [abs(float(one.weight or 0.0)) for one in terms]
            may_be = [one.may_be_0 and _is_divided_by_1(one) for one in terms]
            counts = _divided_by(weights, self.counts, may_be) if is_mean else {}
            found.append(replace(form, counts=counts, may_be_clamped=bool(counts)))
        return found

    def _is_constant(self, terms: Sequence[ReadTerm]) -> bool:
        """Whether the samples' sums are divided by one number, which is no count of theirs."""
        if any(not one.weight or one.divisor is None or one.is_mean for one in terms):
            return False
        weights = [abs(float(one.weight)) for one in terms]
        near = _SAME_WEIGHT * weights[0]
        return all(_close(one, weights[0], near) for one in weights) and not any(
            all(_close(of_sample.get(count, 0.0), weights[0], near) for of_sample in self.counts)
            for count in self.counts[0]
        )

    def _counts_window(self, term: ReadTerm) -> bool:
        """Whether a term is divided by a count of the whole window."""
        divisor = abs(float(term.divisor or 0.0))
        return any(_close(one, divisor, _SAME_WEIGHT * divisor) for one in self.of_window.values())


def _is_divided_by_1(term: ReadTerm) -> bool:
    return term.divisor is not None and float(term.divisor) == 1.0


def _may_be_clamped(term: ReadTerm, form: TermForm) -> bool:
    """Whether what looks like a sum is divided by 1, as a mean is where max(1, n) is."""
    return form.form is Form.SUM and form.number is None and _is_divided_by_1(term)
