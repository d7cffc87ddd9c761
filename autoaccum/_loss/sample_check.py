"""Tries losses on a few samples and on two parts of them, to learn how each summand is put together.

The samples come from all over a window. Choices in which something counts in both parts are preferred; where one part
of a choice counts nothing, others are tried.
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

from autoaccum import _oom
from autoaccum._data.nesting import copied, numbers_in
from autoaccum._loss.batch_counts import LABELS, SUM, counts_in, counts_of
from autoaccum._loss.comparison import compare, sum_of
from autoaccum._loss.graph_reader import ReadTerm
from autoaccum._loss.loss_values import no_mean, not_finite
from autoaccum._loss.observation import Observation, differ, observe, summands_on_host, tolerance_of
from autoaccum._loss.summands import Known, Reduction, Source, counts_of_divisor, hints_of, is_same
from autoaccum.errors import AutoaccumError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.modes import Mark

# The most samples of a check, and the number below which its two parts are alike.
MOST_SAMPLES = 8
_TO_HALVE = 7
# The most samples that are looked at to choose these, and the most choices where nothing counts in the first.
_LOOKED_AT, _MOST_CHOICES = 64, 8
# After so many passes of a first check, the next check looks for hidden state.
_MOST_PASSES = 3

# Runs a pass: returns the losses of a number of samples, and outputs.
Pass = Callable[[Any, int], "tuple[list[LossValue], Any]"]


# --- samples ----------------------------------------------------------------------------------------------------------


def choices(window: Window, most: int, larger: int) -> Iterator[tuple[Window, int]]:
    """Yield samples from all over a window, and how many of them are in the first of two parts; the best choice first.

    Later choices are of other samples, and of more, up to `larger`, until none are left. A window of which no two
    samples can be joined has none.
    """
    groups = window.groups()
    largest = max(range(len(groups)), key=groups.__getitem__)
    start, samples = sum(groups[:largest]), groups[largest]
    number = min(most, samples)
    if number <= 1:
        return
    evenly = [start + place * (samples - 1) // (number - 1) for place in range(number)]
    unlike = _unlike(window, start, samples) if number < samples else []
    rows = list(dict.fromkeys([*unlike[: number // 2 + 1], *evenly]))[:number]
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


def _unlike(window: Window, start: int, samples: int) -> list[int]:
    """Return two samples in which most counts and one with the least; then the least and most of each count."""
    if not window.is_nested:
        return []
    rows = range(start, start + samples, max(1, samples // _LOOKED_AT))
    counts = [counts_in(window.cut(row, row + 1), 1) for row in rows]
    in_all = [count for count in counts[0] if all(count in of_row for of_row in counts)]
    numbers = {count: [of_row[count] for of_row in counts] for count in in_all}
    # Something has to count in both parts: labels, or what a mask keeps.
    masks = [of_rows for (way, _), of_rows in numbers.items() if way in (LABELS, SUM) and not min(of_rows)]
    labels = next((of_rows for (way, _), of_rows in numbers.items() if way == LABELS), None)
    in_each = [(sum(mask[at] > 0 for mask in masks), labels and labels[at]) for at in range(len(rows))]
    by_number = sorted(range(len(rows)), key=in_each.__getitem__)
    found = [*by_number[:-3:-1], by_number[0]] if in_each[by_number[0]] != in_each[by_number[-1]] else []
    for (way, _), of_rows in numbers.items():
        if way != SUM and min(of_rows) != max(of_rows):
            found += [of_rows.index(min(of_rows)), of_rows.index(max(of_rows))]
    return [rows[at] for at in dict.fromkeys(found)]


# --- the check --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LossCheck:
    """Tries losses on a few samples, with graphs. Each pass begins with the same state; the last one leaves its own.

    Attributes:
        mark: Taken before; restored before each pass.
        tells_of_state: Whether to look for state in attributes, which passes move: in training mode.
        is_complete: Whether every loss was confirmed: something counted in both parts.
        tolerance: The relative difference that rounding may cause, as of the last pass.
    """

    passes: Sequence[Pass]
    knowledge: LossKnowledge
    place: Callable[[Any], Any]
    mark: Mark
    autocast: Callable[[], AbstractContextManager[object]]
    casts: bool
    parameters: Sequence[nn.Parameter]
    tells_of_state: bool = False
    is_complete: bool = True
    tolerance: float = 0.0
    _found: dict[str, list[Known]] = field(default_factory=dict)  # by the choices of samples until now
    _open: dict[str, bool] = field(default_factory=dict)  # losses that no choice confirmed: is their graph trusted?
    _passes: int = 0

    def run(self, window: Window, most: int, larger: int) -> dict[str, list[Known]] | None:
        """Return the summands of each loss, by name; None if the window has no two samples to try.

        Args:
            window: The window.
            most: The most samples to try.
            larger: What further choices may grow to, where those do not confirm a loss of which nothing is known.

        Raises:
            InvalidInputError: A pair is not (sum, weight), or a loss cannot be computed for a part of the samples.
        """
        has_tried = False
        for sample, first in choices(window, most, larger):
            try:
                for source in self.passes:
                    self._try(source, sample, first)
            except Exception as error:
                if not has_tried or not _oom.is_oom(error):
                    raise
                _oom.let_go(error)  # the choice was of more samples
                break
            has_tried = True
            if all(name in self.knowledge.summands for name in self._open):
                break
        self.is_complete = not self._open
        for name, is_trusted in self._open.items():
            if not is_trusted and not self.knowledge.is_confirmed(name):
                self.knowledge.warn_of_unchecked(name)
        return self._found if has_tried else None

    def _try(self, source: Pass, sample: Window, first: int) -> None:
        """Find the summands of one source's losses that are not confirmed yet."""
        self._passes = 0
        whole = self._whole(source, sample)
        self._look_for_state(source, whole, sample)
        if self.knowledge.is_torch_loss:  # as `loss=None` shows only now
            self._try_model(source, whole, sample, first)
        else:
            self._try_losses(source, whole, sample, first)
        self._look_for_hidden_state(source, whole, sample)

    def _try_losses(self, source: Pass, whole: Mapping[str, Observation], sample: Window, first: int) -> None:
        """Compare losses that are not confirmed yet with those of parts."""
        parts = self._parts(source, whole, sample, first)
        for name, run in whole.items():
            if name in self._found and name not in self._open:
                continue
            if not math.isfinite(run.value) and 0.0 not in run.weights:
                if name not in self.knowledge.summands:  # otherwise it may result from the training itself
                    raise not_finite({name: run.value})
                continue
            own = [_part_of(run, part.get(name), part, sample) for part in parts]
            self._compare(name, run, own, partial(self._observe, source, sample, 0, sample.samples))

    def _compare(
        self, name: str, run: Observation, parts: Sequence[Observation], again: Callable[..., Mapping[str, Observation]]
    ) -> None:
        """Learn how the summands of a loss are put together; `again` runs all samples."""
        known = compare(run, parts, None, self.tolerance)
        if any(one.reduction is Reduction.UNCONFIRMED for one in known):
            known = compare(run, parts, again(seed=1).get(name), self.tolerance)
            self._explain(name, run, parts, known, again)
        runs = [run, *parts]
        alike = len({len(one.summands) for one in runs}) == 1
        dead = {number for number, one in enumerate(known) if alike and _says_nothing(number, one, runs)}
        if dead:  # nothing counts in a part
            guess = guess_of(runs)
            is_told = all(_is_told(number, guess[number], runs) for number in dead)
            self._open[name] = self._open.get(name, True) and is_told
            if not run.is_stated:
                mixed = [guess[number] if number in dead else one for number, one in enumerate(known)]
                self._found.setdefault(name, mixed)
            return
        if run.is_stated:
            if known[0].reduction is not Reduction.MEAN:
                raise no_mean(name, *((one.value, float(one.weights[0] or 0.0)) for one in runs))
            return
        self._open.pop(name, None)
        self._found[name] = known
        if any(one.reduction is Reduction.SUM and one.least == 1.0 for one in known):
            self.knowledge.warn_of_divisor(name, 1.0)

    def _explain(
        self,
        name: str,
        run: Observation,
        parts: Sequence[Observation],
        known: Sequence[Known],
        again: Callable[..., Mapping[str, Observation]],
    ) -> None:
        """Note what was compared, for an error."""
        each, state = " and ".join(f"{part.value:.4g} for {part.samples}" for part in parts), ""
        if any(one.reduction is Reduction.UNCONFIRMED for one in known) and self.mark.has_moved():
            moved, same = again(with_buffers=False).get(name, run), again().get(name, run)
            if differ(run, moved, self.tolerance) and not differ(run, same, self.tolerance):
                state = f"; called again for all, it is {moved.value:.4g}: it depends on state that forward() moves"
        self.knowledge.tried[name] = f" (it is {run.value:.4g} for {run.samples} samples, and {each} of them{state})"

    # --- state, and models under a loss of torch ----------------------------------------------------------------------

    def _look_for_state(self, source: Pass, whole: Mapping[str, Observation], sample: Window) -> None:
        """Warn of attributes that passes move, if they make a difference: not of an attention kept to be looked at."""
        names = self.mark.moved_attributes() if self.tells_of_state else []
        # A flag that a buffer is filled makes a difference beside the empty buffer alone.
        if names and whole and all(self._depends_on_state(source, whole, sample, also=one) for one in (False, True)):
            self.knowledge.warn_of_state(names)

    def _depends_on_state(
        self, source: Pass, whole: Mapping[str, Observation], sample: Window, *, also: bool = True
    ) -> bool:
        """Whether a pass gives other losses after another one than before it; `also` in buffers it has moved."""

        def again(**restored: bool) -> bool:
            found = self._observe(source, sample, 0, sample.samples, **restored)
            return any(name in found and differ(run, found[name], self.tolerance) for name, run in whole.items())

        # The second as random numbers that are not seeded make every time.
        has_moved = self.mark.has_moved()
        return has_moved and again(with_attributes=False, with_buffers=not also) and not again()

    def _look_for_hidden_state(self, source: Pass, whole: Mapping[str, Observation], sample: Window) -> None:
        """Warn if another pass over all samples differs from the first, though all that is known was put back."""
        is_later = self._passes > _MOST_PASSES and not self.knowledge.summands.keys() >= whole.keys()
        if not (whole and self.tells_of_state) or self.knowledge.warnings or is_later:
            return
        again = self._observe(source, sample, 0, sample.samples)
        finite = {name: run for name, run in whole.items() if math.isfinite(run.value) and name in again}
        if any(differ(run, again[name], self.tolerance) for name, run in finite.items()):
            self.knowledge.warn_of_hidden_state()

    def _try_model(self, source: Pass, whole: Mapping[str, Observation], sample: Window, first: int) -> None:
        """Look whether a model compares samples, whose loss is one of torch."""
        if not whole:
            return
        try:
            parts = self._parts(source, whole, sample, first)
        except InvalidInputError:
            return  # micro-batches may have other sizes
        for name, run in whole.items():
            runs = [run, *(_part_of(run, part.get(name), part, sample) for part in parts)]
            if not all(math.isfinite(one.value) and one.weights[0] for one in runs):
                continue  # nothing counts, or it cannot be read
            if any(one.is_dead(number) for one in runs for number in range(len(one.summands))):
                continue  # of which half precision is the reason, or nothing counts in a sum
            whole_run, *of_parts = (one.as_one(one.weights[0]) for one in runs)
            (known,) = compare(whole_run, of_parts, None, self.tolerance)
            meant = self.knowledge.summands[name][0].reduction
            if known.reduction not in (meant, Reduction.CONSTANT if meant is Reduction.MEAN else meant):
                again = self._observe(source, sample, 0, sample.samples, seed=1)
                if not differ(whole_run, again[name].as_one(), self.tolerance):  # otherwise it is random
                    self.knowledge.warn_of_compared_samples(by_state=self._depends_on_state(source, whole, sample))

    # --- single samples -----------------------------------------------------------------------------------------------

    def alone(self, window: Window) -> dict[str, list[Known]]:
        """Return the summands of each loss as its graphs suggest of some samples, each by itself."""
        rows = [*dict.fromkeys((0, window.samples // 2, window.samples - 1))]
        cuts = [window.cut(row, row + 1) for row in rows]
        counts, found = [counts_in(cut, 1) for cut in cuts], dict[str, list[Known]]()
        whole = Observation(window.samples, 0.0, [], torch.zeros(0), {}, {})
        if window.is_nested:  # a split may count what it joins
            first, *others = map(numbers_in, cuts)
            whole.numbers = {at: one for at, one in first.items() if all(other.get(at) == one for other in others)}
            of_ranks = self.knowledge.counted
            whole.counts = counts_of(window, 0, window.samples, frozenset(counts[0])) if of_ranks is None else of_ranks
        for source in self.passes:
            read = [self._read_alone(source, cut) for cut in cuts]
            for name, summands in read[0].items():
                alike = [of_row[name] for of_row in read if len(of_row.get(name, ())) == len(summands)]
                by_summand = list(zip(*alike, strict=True)) if len(alike) == len(cuts) else []
                found[name] = _of_singles(by_summand, counts, whole) or [by_graph(one) for one in summands]
        return {} if self.knowledge.is_torch_loss else found

    def _read_alone(self, source: Pass, cut: Any) -> dict[str, list[ReadTerm]]:
        """Return the summands of each loss of one sample, without their graphs."""
        losses = [one for one in self._losses(source, cut, 1) if one.weight is None and not one.is_reported]
        return {
            one.name: [replace(summand, node=None, end=None) for summand in summands_on_host(one)] for one in losses
        }

    # --- passes -------------------------------------------------------------------------------------------------------

    def _parts(
        self, source: Pass, whole: Mapping[str, Observation], sample: Window, first: int
    ) -> list[dict[str, Observation]]:
        """Return the losses of two parts: of such in which something counts, where there are any."""
        least, tried, parts = min(first, 2), set[int](), list[dict[str, Observation]]()
        while True:
            tried.add(first)
            try:
                parts = [self._part(source, sample, *ends) for ends in ((0, first), (first, sample.samples))]
            except InvalidInputError:  # the loss takes no parts of these sizes
                if not parts and first <= least:
                    raise
                return parts or self._of_pairs(source, sample, first)
            empty = {
                place
                for place, part in enumerate(parts)
                for name, run in whole.items()
                if _is_empty(_part_of(run, part.get(name), part, sample), run)
            }
            first += 1 if empty == {0} else -1
            if len(empty) != 1 or first in tried or not least <= first <= sample.samples - least:
                return parts

    def _of_pairs(self, source: Pass, sample: Window, first: int) -> list[dict[str, Observation]]:
        """Return the losses of parts for a loss that takes not every odd number of samples, as one of pairs does."""
        with suppress(InvalidInputError):  # what it does not take is an error in training too
            return [self._part(source, sample, *ends) for ends in pairwise((0, first, 2 * first, sample.samples))]
        return [self._part(source, sample, *ends) for ends in ((0, first - 1), (first - 1, sample.samples))]

    def _whole(self, source: Pass, sample: Window) -> dict[str, Observation]:
        """Return the losses of all samples; none if a model does not take so many, and needs no check."""
        try:
            return self._observe(source, sample, 0, sample.samples)
        except Exception as error:
            if _is_lack(error) or isinstance(error, AutoaccumError):
                raise
            if self.knowledge.is_torch_loss:
                return {}
            error.add_note(
                f"autoaccum: it is an error of the model or the loss, on the first {sample.samples} samples that were "
                "tried. Only if they take certain numbers of samples alone, pass loss_reduction='mean' or 'sum', which "
                "leaves this trial out, and a micro_batch= of such a number"
            )
            raise

    def _part(self, source: Pass, sample: Window, start: int, stop: int) -> dict[str, Observation]:
        try:
            return self._observe(source, sample, start, stop)
        except Exception as error:
            if _is_lack(error) or isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(
                f"the loss could be computed for {sample.samples} samples, and not for {stop - start} of them "
                f"({_oom.first_line(error)}), so micro-batches of such sizes cannot be trained on; "
                "loss_reduction='mean' or 'sum' leaves this check out"
            ) from error

    def _observe(
        self,
        source: Pass,
        sample: Window,
        start: int,
        stop: int,
        seed: int = 0,
        *,
        with_buffers: bool = True,
        with_attributes: bool = True,
    ) -> dict[str, Observation]:
        """Run samples `start` to `stop` (exclusive); return what their losses gave, by name.

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
        losses = [one for one in self._losses(source, cut, samples) if one.value.requires_grad and not one.is_reported]
        if losses:
            dtypes = (parameter.dtype for parameter in self.parameters)
            self.tolerance = tolerance_of(losses[0].value, casts=self.casts, dtypes=dtypes)
        last = len(losses) - 1
        return {
            one.name: observe(one, samples, cut, self.parameters, keep=place < last) for place, one in enumerate(losses)
        }

    def _losses(self, source: Pass, cut: Any, samples: int) -> list[LossValue]:
        # As tensors that a graph can save, and that a pass may change.
        batch = copied(self.place(cut))
        with self.autocast():
            return source(batch, samples)[0]


def _is_lack(error: Exception) -> bool:
    return _oom.is_oom(error) or _oom.is_too_large(error) or _oom.is_device_lost(error)


def _part_of(
    whole: Observation, own: Observation | None, part: Mapping[str, Observation], sample: Window
) -> Observation:
    """Return a loss of a part; one of nothing where it has no graph, as where there are no targets."""
    if own is not None:
        return own
    other = next(iter(part.values()), None)
    number, counts = (sample.samples, {}) if other is None else (other.samples, other.counts)
    summands, gradients = [ReadTerm(None, 0.0) for _ in whole.summands], torch.zeros_like(whole.gradients)
    return replace(whole, samples=number, value=0.0, summands=summands, gradients=gradients, counts=counts)


def _is_empty(part: Observation, whole: Observation) -> bool:
    """Whether nothing counts in a part, though that cannot be read, or has to be compared."""
    if whole.is_stated:
        return bool(whole.weights[0]) and part.weights[0] == 0.0
    return part.weights == whole.weights and not bool(part.gradients.any()) and bool(whole.gradients.any())


def by_graph(summand: ReadTerm) -> Known:
    """Return what the graph of some samples suggests of a summand."""
    if summand.weight is None:
        return Known(Reduction.UNCONFIRMED, Source.COUNTED, is_guess=True)
    if summand.is_counted or not summand.weight:
        return Known(Reduction.MEAN, per_sample=abs(float(summand.weight)), is_guess=True)
    return Known(Reduction.SUM, is_guess=True)


def _says_nothing(number: int, known: Known, runs: Sequence[Observation]) -> bool:
    """Whether a summand says nothing in some run, since nothing counts there."""
    return any(
        run.is_dead(number) and (known.reduction is not Reduction.MEAN or run.summands[number].weight == 0.0)
        for run in runs
    )


def _is_told(number: int, guess: Known, runs: Sequence[Observation]) -> bool:
    """Whether the graph says what a summand is, where a part of the samples does not.

    So it is where weights are 0 in which nothing counts, where it is divided by a number of the batch, or an operator
    of torch reduces it; and where nothing counts at all, it makes no difference.
    """
    whole = runs[0]
    return (
        whole.is_dead(number)
        or guess.number is not None
        or hasattr(whole.summands[number].end, "_saved_reduction")
        or all(run.summands[number].weight == 0.0 for run in runs if run.is_dead(number))
    )


def guess_of(runs: Sequence[Observation]) -> list[Known]:
    """Return what the graphs of all samples suggest of their summands, where a part of them says nothing.

    Nothing counts there, so a divisor that is the same in all is no count, unless it is 1, as of max(1, n).
    """
    found = []
    for summands in zip(*(run.summands for run in runs), strict=True):
        weights, divisors = [one.weight for one in summands], [one.divisor for one in summands]
        is_same_in_all = (
            None not in weights and None not in divisors and all(is_same(one, weights[0]) for one in weights)
        )
        is_number = is_same_in_all and divisors[0] != 1.0
        found.append(replace(sum_of(summands[0], runs[0]), is_guess=True) if is_number else by_graph(summands[0]))
    return found


def _of_singles(
    by_summand: Sequence[Sequence[ReadTerm]], counts: Sequence[Mapping[Count, float]], whole: Observation
) -> list[Known]:
    """Return what the graphs of single samples suggest of summands.

    They are sums, if all are divided by the same in all samples, one of them by a number or a count of the whole.
    """
    sums = [replace(sum_of(summands[0], whole), is_guess=True) for summands in by_summand]
    divisors = [summands[0].divisor for summands in by_summand]
    is_of_whole = any(
        one.number is not None or any(divisor and is_same(number, float(divisor)) for number in whole.counts.values())
        for one, divisor in zip(sums, divisors, strict=True)
    )
    if is_of_whole and all(_is_constant(summands, counts) for summands in by_summand):
        return sums
    return [_of_single(list(summands), counts) for summands in by_summand]


def _is_constant(summands: Sequence[ReadTerm], counts: Sequence[Mapping[Count, float]]) -> bool:
    """Whether a summand of several single samples is divided by one number, which is no count of theirs."""
    weights, divisors = [one.weight for one in summands], [float(one.divisor or 0.0) for one in summands]
    return (
        len(summands) > 1
        and all(divisors)
        and None not in weights
        and all(is_same(one, weights[0]) for one in weights)
        and not counts_of_divisor(divisors, counts)
    )


def _of_single(summands: Sequence[ReadTerm], counts: Sequence[Mapping[Count, float]]) -> Known:
    """Return what the graphs of single samples suggest of a summand that may be a mean."""
    guess, weights = by_graph(summands[0]), [float(one.weight or 0.0) for one in summands]
    if guess.reduction is not Reduction.MEAN or any(one.weight is None for one in summands):
        return guess
    divisors = [float(one.divisor or 0.0) for one in summands]
    if all(divisors) and (found := counts_of_divisor(divisors, counts)):
        return replace(guess, hints=dict.fromkeys(found, weights[0] / divisors[0]), is_divisor=True)
    return replace(guess, hints=hints_of(weights, counts))
