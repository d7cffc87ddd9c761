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
from autoaccum._loss.batch_counts import counts_in, counts_of
from autoaccum._loss.comparison import (
    are_same,
    by_graph,
    chooses,
    clamp_of,
    compare,
    guess_of,
    is_told,
    of_singles,
    says_nothing,
)
from autoaccum._loss.graph_reader import Summand
from autoaccum._loss.loss_values import check_weights, clamped_weight, no_mean, not_finite
from autoaccum._loss.modes import Clamps, quiet_training
from autoaccum._loss.observation import Observation, differ, observe, summands_on_host, tolerance_of
from autoaccum._loss.sample_choices import choices
from autoaccum._loss.summands import BY_SAMPLES, Known, Reduction, is_same
from autoaccum.errors import AutoaccumError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.modes import State

# After so many passes of a first check, the next check looks for hidden state.
_MOST_PASSES = 3

# Runs a pass: returns the losses of a number of samples, and outputs.
Pass = Callable[[Any, int], "tuple[list[LossValue], Any]"]


@dataclass(slots=True)
class LossCheck:
    """Tries losses on a few samples, with graphs. Each pass begins with the same state; the last one leaves its own.

    Attributes:
        before: The state that each pass begins with.
        is_complete: Whether every loss was confirmed: something counted in both parts.
        tolerance: The relative difference that rounding may cause, as of the last pass.
        tried: The values that were compared, by the name of the loss, to be shown.
        clamps: The numbers that the last pass has clamped.
    """

    passes: Sequence[Pass]
    knowledge: LossKnowledge
    place: Callable[[Any], Any]
    before: State
    autocast: Callable[[], AbstractContextManager[object]]
    casts: bool
    parameters: Sequence[nn.Parameter]
    modules: Sequence[nn.Module]
    is_complete: bool = True
    tolerance: float = 0.0
    tried: dict[str, str] = field(default_factory=dict)
    clamps: Clamps = field(default_factory=Clamps)
    _found: dict[str, list[Known]] = field(default_factory=dict)  # by the choices of samples until now
    _open: dict[str, bool] = field(default_factory=dict)  # losses that no choice confirmed: is their graph trusted?
    _passes: int = 0

    @property
    def tells_of_state(self) -> bool:
        """Whether to look for state in attributes, which passes move: in training mode."""
        return any(module.training for module in self.modules)

    def run(self, window: Window, most: int) -> dict[str, list[Known]] | None:
        """Return the summands of each loss, by name; None if the window has no two samples to try.

        Args:
            window: The window.
            most: The most samples to try.

        Raises:
            InvalidInputError: A pair is not (sum, weight), or a loss cannot be computed for a part of the samples.
        """
        has_tried = False
        for sample, first in choices(window, most, self.knowledge.now.contrasting):
            for source in self.passes:
                self._try(source, sample, first)
            has_tried = True
            if all(name in self.knowledge.summands for name in self._open):
                break
        self.is_complete = not self._open
        for name, is_trusted in self._open.items():
            if not is_trusted and not self.knowledge.is_confirmed(name):
                self.knowledge.said.of_unchecked(name)
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
            self._compare(name, run, own, partial(self._observe, source, sample, 0, sample.samples), len(whole))

    def _compare(
        self,
        name: str,
        run: Observation,
        parts: Sequence[Observation],
        again: Callable[..., Mapping[str, Observation]],
        losses: int,
    ) -> None:
        """Learn how the summands of a loss, one of so many, are put together; `again` runs all samples."""
        known = compare(run, parts, None, self.tolerance)
        if any(one.reduction is Reduction.UNCONFIRMED for one in known):
            known = compare(run, parts, again(seed=1).get(name), self.tolerance)
            self._explain(name, run, parts, known, again)
        runs = [run, *parts]
        alike = len({len(one.summands) for one in runs}) == 1
        dead = {number for number, one in enumerate(known) if alike and says_nothing(number, one, runs)}
        if dead:  # nothing counts in a part
            guess = guess_of(runs)
            are_told = all(is_told(number, guess[number], runs) for number in dead)
            self._open[name] = self._open.get(name, True) and are_told
            if run.is_pair and all(one.summands[0].node for one in runs):  # not what stands in for no loss
                whole, *of_parts = (float(one.weights[0] or 0.0) for one in runs)
                if not is_same(sum(of_parts), whole, self.tolerance):
                    check_weights(name, whole, *of_parts)
            if not run.is_stated:
                mixed = [guess[number] if number in dead else one for number, one in enumerate(known)]
                self._found.setdefault(name, mixed)
            return
        if run.is_stated:
            self._check_stated(name, runs, known[0], losses)
            return
        self._found[name] = known
        if any(map(run.is_dead, range(len(known)))):
            self._open.setdefault(name, True)  # what is 0 in all adds up, and other samples may tell more
        else:
            self._open.pop(name, None)
        if any(one.reduction is Reduction.SUM and one.least == 1.0 for one in known):
            self.knowledge.said.of_divisor(name, 1.0, is_only=losses == len(known) == 1)

    def _check_stated(self, name: str, runs: Sequence[Observation], known: Known, losses: int) -> None:
        """Reject a pair or a vector, one of so many losses, whose sums or weights do not add up."""
        run, weights = runs[0], [float(one.weights[0] or 0.0) for one in runs]
        if run.is_pair and clamp_of(runs, 0, weights) is not None:
            raise clamped_weight(name)
        if known.reduction is Reduction.MEAN:
            return
        check_weights(name, *weights)
        by_samples = losses > 1 and run.is_pair and all(one.weights[0] == one.samples for one in runs)
        values = [(one.value, weight) for one, weight in zip(runs, weights, strict=True)]
        if (error := no_mean(name, *values, by_samples=by_samples)) is not None:
            raise error
        self.knowledge.said.of_samples(name)

    def _explain(
        self,
        name: str,
        run: Observation,
        parts: Sequence[Observation],
        known: Sequence[Known],
        again: Callable[..., Mapping[str, Observation]],
    ) -> None:
        """Note what was compared, for an error."""
        first = next((number for number, one in enumerate(known) if one.reduction is Reduction.UNCONFIRMED), None)
        if first is not None and known[first].sums_add:
            whole, *own = (f"{one.weights[first]:.4g} for {one.samples}" for one in (run, *parts))
            self.tried[name] = f" ({whole} samples, and {' and '.join(own)} of them)"
            return
        if first is not None and chooses(first, [run, *parts]):
            self.tried[name] = " (it chooses among all samples, as topk, sort and max do)"
            return
        each, state = " and ".join(f"{part.value:.4g} for {part.samples}" for part in parts), ""
        if any(one.reduction is Reduction.UNCONFIRMED for one in known) and self.before.has_moved():
            moved, same = again(with_buffers=False).get(name, run), again().get(name, run)
            if differ(run, moved, self.tolerance) and not differ(run, same, self.tolerance):
                state = f"; called again for all, it is {moved.value:.4g}: it depends on state that forward() moves"
        self.tried[name] = f" (it is {run.value:.4g} for {run.samples} samples, and {each} of them{state})"

    # --- state, and models under a loss of torch ----------------------------------------------------------------------

    def _look_for_state(self, source: Pass, whole: Mapping[str, Observation], sample: Window) -> None:
        """Warn of attributes that passes move, if they make a difference: not of an attention kept to be looked at."""
        names = self.before.moved_attributes() if self.tells_of_state else []
        # A flag that a buffer is filled makes a difference beside the empty buffer alone.
        if names and whole and all(self._depends_on_state(source, whole, sample, also=one) for one in (False, True)):
            self.knowledge.said.of_state(names)

    def _depends_on_state(
        self, source: Pass, whole: Mapping[str, Observation], sample: Window, *, also: bool = True
    ) -> bool:
        """Whether a pass gives other losses after another one than before it; `also` in buffers it has moved."""

        def again(**restored: bool) -> bool:
            found = self._observe(source, sample, 0, sample.samples, **restored)
            return any(name in found and differ(run, found[name], self.tolerance) for name, run in whole.items())

        # The second as random numbers that are not seeded make every time.
        has_moved = self.before.has_moved()
        return has_moved and again(with_attributes=False, with_buffers=not also) and not again()

    def _look_for_hidden_state(self, source: Pass, whole: Mapping[str, Observation], sample: Window) -> None:
        """Warn if another pass over all samples differs from the first, though all that is known was put back."""
        is_later = self._passes > _MOST_PASSES and not self.knowledge.summands.keys() >= whole.keys()
        if not (whole and self.tells_of_state) or self.knowledge.said.texts or is_later:
            return
        again = self._observe(source, sample, 0, sample.samples)
        finite = {name: run for name, run in whole.items() if math.isfinite(run.value) and name in again}
        if any(differ(run, again[name], self.tolerance) for name, run in finite.items()):
            self.knowledge.said.of_hidden_state()

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
                    self.knowledge.said.of_compared_samples(by_state=self._depends_on_state(source, whole, sample))

    # --- single samples -----------------------------------------------------------------------------------------------

    def alone(self, window: Window) -> dict[str, list[Known]]:
        """Return the summands of each loss as its graphs suggest of some samples, each by itself."""
        rows = [*dict.fromkeys((0, window.samples // 2, window.samples - 1))]
        cuts = [window.cut(row, row + 1) for row in rows]
        counts, found = [counts_in(cut, 1) for cut in cuts], dict[str, list[Known]]()
        whole = Observation(window.samples, 0.0, [], torch.zeros(0), [])
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
                found[name] = of_singles(by_summand, counts, whole) or [by_graph(one) for one in summands]
            has_others = any(one.reduction is not Reduction.MEAN for name in read[0] for one in found[name])
            if len(rows) > 1 and has_others and not self.knowledge.is_torch_loss:
                self._find_constants(source, window, rows, found)
        return {} if self.knowledge.is_torch_loss else found

    def _find_constants(
        self, source: Pass, window: Window, rows: Sequence[int], found: Mapping[str, list[Known]]
    ) -> None:
        """Find the summands that have the same gradient in each single sample, as a penalty on parameters has."""
        of_rows: list[dict[str, Observation]] = []
        try:
            of_rows = [self._observe(source, window, row, row + 1) for row in rows]
        except Exception as error:
            if not _oom.is_oom(error):
                raise
            _oom.clear_traceback_frames(error)
            return  # gradients beside those that are there already
        for name in found.keys() & of_rows[0].keys():
            runs = [own for row in of_rows if (own := row.get(name)) and len(own.summands) == len(found[name])]
            for number, one in enumerate(found[name]):
                if one.reduction is not Reduction.MEAN and len(runs) > 1 and are_same(number, runs, self.tolerance):
                    found[name][number] = replace(BY_SAMPLES, reduction=Reduction.CONSTANT)

    def _read_alone(self, source: Pass, cut: Any) -> dict[str, list[Summand]]:
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
            self.before.restore(with_attributes=with_attributes)
        self.before.random.seed(seed)
        self.clamps.clear()
        cut, samples = sample.cut(start, stop), stop - start
        losses = [one for one in self._losses(source, cut, samples) if one.value.requires_grad and not one.is_reported]
        if losses:
            dtypes = (parameter.dtype for parameter in self.parameters)
            self.tolerance = tolerance_of(losses[0].value, casts=self.casts, dtypes=dtypes)
        last = len(losses) - 1
        found = {
            one.name: observe(one, samples, self.parameters, self._quietly, keep=place < last)
            for place, one in enumerate(losses)
        }
        counts, numbers = counts_in(cut, samples), numbers_in(cut)
        for one in losses:
            run = found[one.name]
            divisors = [one.weight] if one.weight is not None else [own.divided_by for own in run.summands]
            clamps = [*map(self.clamps.of, divisors)]
            found[one.name] = replace(run, counts=counts, numbers=numbers, clamps=clamps)
        return found

    def _losses(self, source: Pass, cut: Any, samples: int) -> list[LossValue]:
        # As tensors that a graph can save, and that a pass may change.
        batch = copied(self.place(cut))
        with self.autocast(), self._quietly():
            return source(batch, samples)[0]

    def _quietly(self) -> AbstractContextManager[None]:
        return quiet_training(self.modules, noting=self.clamps)


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
    summands, gradients = [Summand(None, 0.0) for _ in whole.summands], torch.zeros_like(whole.gradients)
    return replace(whole, samples=number, value=0.0, summands=summands, gradients=gradients, counts=counts)


def _is_empty(part: Observation, whole: Observation) -> bool:
    """Whether nothing counts in a part, though that cannot be read, or has to be compared."""
    if whole.is_stated:
        return bool(whole.weights[0]) and part.weights[0] == 0.0
    return part.weights == whole.weights and not bool(part.gradients.any()) and bool(whole.gradients.any())
