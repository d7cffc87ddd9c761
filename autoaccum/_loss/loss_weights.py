"""Weights micro-batches within the loss of their window, by the known forms of losses and what the graph of each says.

What a mean is divided by is known after its forward pass. A micro-batch therefore runs backward with its weight over a
provisional total, and gradients and losses are multiplied by the quotient once at the end of the window. Only where
several divisors meet in one gradient are they counted before, in the entries of the batch that a check has matched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from autoaccum._data.nesting import numbers_in
from autoaccum._loss.batch_counts import ELEMENTS, SAMPLES, TARGETS, counts_of, has_no_labels, in_words
from autoaccum._loss.graph_reader import (
    ReadTerm,
    has_only_weights_of_0,
    is_mean_over_classes,
    read,
    stop,
    weight_at_once,
)
from autoaccum._loss.loss_forms import LossForms, Weighting, share_a_divisor
from autoaccum._loss.terms import Form, TermForm, in_full
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.terms import Term

# Relative differences of counts in double precision, of what is read in single precision, and of sums of split.weight.
_SAME_COUNT, _SAME_WEIGHT, _ADDS_UP = 1e-9, 1e-5, 1e-6
# So often an evaluation asks for a check that may tell which count a mean is divided by.
_MOST_ASKED = 8
# The totals of a window's samples, and of what split.weight counts, among the totals of its divisors.
OF_SAMPLES, _OF_SPLIT = ("", 0), ("", 1)
_HOST = torch.device("cpu")
_COMPILED = "CompiledFunctionBackward"  # the node of compiled code, whose graph says nothing
# A term of a loss: the name of the loss, and the term's number.
Slot = tuple[str, int]


@dataclass(slots=True)
class Factors:
    """The factors of the losses of one micro-batch, with which those of a window add up to its loss.

    Attributes:
        alone: Whether the micro-batch is the whole window, so that every loss is as it is.
        usual: For a loss that counts by samples, or as the arguments say.
        of_samples: For the loss of each sample, whatever the arguments say of others.
        scale: A further factor for all losses, to compensate for a reduction that divides gradients.
        weight: What a loss is divided by if its graph does not say so; None if it does.
        pairs: For the sums of (sum, weight) pairs whose total is known, by name.
        terms: For each term of a loss that has divisors of its own, by name.
        expected: What these terms are divided by, as each count of the batch that may be meant says.
        empty: The names of losses with a term in which nothing counts in the window.
        units: What the first loss is divided by, in units of what a sample had when losses were checked.
    """

    alone: bool = False
    usual: float = 1.0
    of_samples: float = 1.0
    scale: float = 1.0
    weight: float | None = None
    pairs: dict[str, float] = field(default_factory=dict)
    terms: dict[str, list[float]] = field(default_factory=dict)
    expected: dict[Slot, dict[Count, float]] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)
    units: float | None = None


class NotCheckedError(Exception):
    """A loss is not what it was when it was checked, or has not been checked: the window begins again with a check.

    Args:
        error: The error for the user, if the check has been made already.
        is_known: Whether it is known by now, so that no check is needed.
    """

    def __init__(self, error: InvalidInputError, *, is_known: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_known = is_known


class LossWeights(LossForms):
    """Weights of the losses of micro-batches.

    Attributes:
        window: The window that is being computed, and the first sample of the current micro-batch in it.
        start: See `window`.
        has_to_pass: Whether a loss in which nothing counts has a backward pass all the same.
    """

    def __init__(self, asked: Weighting | None, split: str = "") -> None:
        super().__init__(asked)
        self.window: Window | None = None
        self.start = 0
        self.has_to_pass = False
        self._split = split
        self._adds_up = False  # whether the split's weight was seen to
        self._provisional: dict[str, float] = {}  # about what each loss is divided by in this window
        self._seen: set[tuple[Any, ...]] = set()  # how each loss was put together in the graphs of checked windows
        self._unseen: set[str] = set()  # losses in which nothing counted yet in this process's parts of these windows
        self._has_weighed = False  # whether any micro-batch was weighed
        self._asked_of: list[list[TermForm]] = []  # means of which evaluations have asked for another check
        self._exists: dict[str, bool] = {}  # whether losses are finite in the micro-batches in which nothing counts
        self._added: dict[str, list[Any]] = {}  # what each sum was divided by in the first micro-batch of this window

    def learn(
        self, found: Mapping[str, Sequence[TermForm]], *, is_checked: bool = True, is_complete: bool = True
    ) -> None:
        """Take what a check has shown: see `LossForms.learn`."""
        super().learn(found, is_checked=is_checked, is_complete=is_complete)
        self.is_checked_now |= not self._has_weighed  # no micro-batch was compared with an earlier check

    def begin_window(self) -> None:
        """Begin a window, for which losses have not been checked yet."""
        self._added.clear()
        self._exists.clear()
        self.is_checked_now = False

    # --- before a window ----------------------------------------------------------------------------------------------

    def totals(self, window: Window) -> dict[Slot, float]:
        """Return what each term with a divisor of its own is divided by in a window, as the batch counts it."""
        found: dict[Slot, float] = {OF_SAMPLES: float(window.samples)}
        if not window.samples:
            return found
        if self._weighs_by_split():
            found[_OF_SPLIT] = window.weight(0, window.samples)
        for name, forms in self.forms.items():
            found[name, -1] = _expected(forms[0], window)
            for number, form in enumerate(forms):
                if form.form is Form.MEAN and form.counts:
                    found[name, number] = _count(form, window)
        return found

    def lack(self, totals: Mapping[Slot, float]) -> bool:
        """Whether something is divided by 0 in a window, of which that cannot be max(1, 0)."""
        clamped = {
            (name, number)
            for name, forms in self.forms.items()
            for number, form in enumerate(forms)
            if form.may_be_clamped
        }
        return any(not total and slot not in clamped for slot, total in totals.items() if slot[1] >= 0)

    def factors(
        self, window: Window, sizes: Sequence[int], totals: Mapping[Slot, float] | None = None, *, is_part: bool = False
    ) -> list[Factors]:
        """Return the factors of each micro-batch's losses.

        Args:
            window: The samples.
            sizes: The micro-batch sizes.
            totals: `totals` of the window that these samples are a part of; None if they are the whole.
            is_part: Whether they are a part, which is put together with others by its weight.
        """
        weighting = self.weighting
        if (number := self._number) is not None and (is_part or window.carries_numbers()):
            called = repr(number[-1]) if isinstance(number[-1], str) else f"item {number[-1]}"
            raise InvalidInputError(
                f"the loss is a sum divided by {called}, a number of a batch of the loader, and the window is "
                "no such batch; return a (sum, weight) pair whose weight counts what the micro-batch holds, or, if the "
                "number is that of the whole window or a scale, pass loss_reduction='sum'"
            )
        if len(sizes) == 1 and not is_part:
            return [Factors(alone=True)]
        self._added.clear()
        if weighting is Weighting.SUM:
            return [Factors() for _ in sizes]
        total = sum(sizes) if totals is None else totals[OF_SAMPLES]
        factors = [Factors(usual=size / total, of_samples=size / total) for size in sizes]
        if self._weighs_by_split():
            self._weigh_by_split(factors, window, sizes, None if totals is None else totals[_OF_SPLIT])
        if weighting is Weighting.DIVISOR:
            self.set_provisional(window, totals)
            if unread := self._unread():  # its graph does not say it: a count of the batch does
                counted = _counts(window, sizes, unread[0])
                _refuse_ambiguous(counted)
                for factor, counts in zip(factors, counted, strict=True):
                    factor.weight = counts[min(counts)]
        if weighting is Weighting.OWN_DIVISORS:
            # Ranks exchange totals anew if they have learnt only now that these are needed.
            is_whole = totals is not None or not is_part
            self._weigh_each_term(factors, window, sizes, totals or self.totals(window), is_whole=is_whole)
        return factors

    def _weighs_by_split(self) -> bool:
        """Whether any loss counts by the split's weight; those of each sample and pairs do not."""
        return self.stated is Weighting.SPLIT and self.weighting in (Weighting.SPLIT, Weighting.OWN_DIVISORS)

    def _weigh_by_split(
        self, factors: Sequence[Factors], window: Window, sizes: Sequence[int], total: float | None
    ) -> None:
        """Let losses count by the split's weight; reject one that does not add up, in the first window that is cut."""
        stops = accumulate(sizes)
        weights = [window.weight(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        added = sum(weights)
        if not self._adds_up and len(weights) > 1:
            whole = window.weight(0, window.samples)
            if not math.isclose(whole, added, rel_tol=_ADDS_UP):
                raise InvalidInputError(
                    f"split={self._split}: weight does not add up: {whole:g} for a window, and {added:g} for its "
                    f"{len(weights)} micro-batches together, as a mean or a maximum would; return a sum, such as the "
                    "tokens"
                )
            self._adds_up = True
        total = added if total is None else total
        if not total:
            raise nothing_counts("split.weight(batch) is 0", len(sizes))
        for factor, weight in zip(factors, weights, strict=True):
            factor.usual = weight / total

    def _weigh_each_term(
        self,
        factors: Sequence[Factors],
        window: Window,
        sizes: Sequence[int],
        totals: Mapping[Slot, float],
        *,
        is_whole: bool,
    ) -> None:
        for name, forms in self.forms.items():
            if forms[0].form in (Form.PAIR, Form.VECTOR):
                continue
            for number, form in enumerate(forms):
                if form.form is Form.MEAN:
                    count = min(form.counts)
                    counted, total = _counts(window, sizes, form), totals[name, number]
                    if not total and is_whole and not form.may_be_clamped:
                        raise nothing_counts(f"nothing counts ({in_words(count)})", len(sizes))
                    own = [one[count] / (total or 1.0) for one in counted]
                    for one in () if total or not is_whole else factors:
                        one.empty.add(name)
                    for one, counts in zip(factors, counted, strict=True):
                        one.expected[name, number] = {of: counts[of] * each for of, each in form.counts.items()}
                else:
                    own = [1.0 if form.form is Form.SUM else one.usual for one in factors]
                for one, factor in zip(factors, own, strict=True):
                    one.terms.setdefault(name, []).append(factor)

    def set_provisional(self, window: Window, totals: Mapping[Slot, float] | None = None) -> float:
        """Set about what each loss is divided by in a window, so that gradients have about their final magnitude.

        Args:
            window: The window, or this process's part of it.
            totals: `totals` of the whole, if all parts need the same; None if each has its own.

        Returns:
            That of the first loss.
        """
        self.window = window
        rounds = len(self.forms) == 1
        self._provisional = {
            name: _expected(forms[0], window, rounds=rounds)
            if totals is None
            else totals.get((name, -1), totals[OF_SAMPLES])
            for name, forms in self.forms.items()
        }
        return next(iter(self._provisional.values()), 1.0)

    def provisional_total(self, name: str) -> float:
        """Return about what a loss is divided by in this window, by which it is multiplied at the end."""
        return self._provisional.get(name, 1.0)

    # --- parts of windows, and evaluation -----------------------------------------------------------------------------

    def part_weight(self, window: Window) -> float | None:
        """Return by what a part of a window is put together with others; None if parts are added."""
        if self.weighting is Weighting.SUM:
            return None
        return window.weight(0, window.samples) if self.weighting is Weighting.SPLIT else float(window.samples)

    def multiplier_and_weight(
        self, name: str, window: Window, loss: Tensor | None = None
    ) -> tuple[float | Tensor, float | Tensor]:
        """Return what a loss of some samples is multiplied by for its sum, and the weight of that.

        Args:
            name: Its name.
            window: The samples.
            loss: The loss, whose graph may say it; otherwise their counts do, or their number.
        """
        form = self.forms[name][0] if name in self.forms else None
        if form is not None and form.number is not None:
            span = window.spans[0]
            number = numbers_in(span.piece.batch)[form.number]
            return number, number * span.samples / span.piece.samples
        if self.weighting is Weighting.SUM:
            return 1.0, float(window.samples)
        own = self.forms.get(name, ()) if self.weighting is Weighting.OWN_DIVISORS else ()
        if own and own[0].form is Form.SUM and len(own) == 1:
            return 1.0, float(window.samples)
        weight: float | Tensor
        if len(own) > 1:
            weight = self._weight_of_several(name, window, loss)
        elif self.weighting is Weighting.DIVISOR or (own and own[0].form is Form.MEAN):
            weight = self._weight_of_mean(name, window, loss)
        else:
            is_by_split = self.stated is Weighting.SPLIT and not self.is_vector(name)
            weight = window.weight(0, window.samples) if is_by_split else float(window.samples)
        return weight, weight

    def _weight_of_mean(self, name: str, window: Window, loss: Tensor | None) -> float | Tensor:
        if loss is not None and loss.requires_grad:
            return self.weight_of(name, loss, window.samples, of=window)
        form = self.forms[name][0] if name in self.forms else None
        if form is not None and form.counts:
            return self._counted(name, form, window, loss)
        self.warn(
            f"loss {name!r} is evaluated by the model itself, and what it is divided by is no count of the batch: "
            "the evaluation's mean weighs micro-batches by their samples"
        )
        is_nan = loss is not None and bool(loss.detach().isnan())
        return 0.0 if is_nan and has_no_labels(window) else float(window.samples)

    def _weight_of_several(self, name: str, window: Window, loss: Tensor | None) -> float:
        """Return by what a loss is weighed whose terms have divisors of their own; 0 where it is NaN."""
        self.warn(
            f"loss {name!r} has terms that are divided by numbers of their own, of which an evaluation knows the "
            "sum alone: it weighs micro-batches by one of these numbers; return the terms by name"
        )
        if loss is not None and bool(loss.detach().isnan()):
            return 0.0
        # Of max(1, n), what counts may be 0 where other terms are not.
        form = next((one for one in self.forms[name] if one.counts and not one.may_be_clamped), None)
        return self._counted(name, form, window, loss) if form is not None else float(window.samples)

    def _counted(self, name: str, form: TermForm, window: Window, loss: Tensor | None) -> float:
        """Return what a mean is divided by, as the batch counts it; the least, where it cannot be told."""
        of_counts = _divisors(form, window)
        if not all(of_counts.values()) and loss is not None:
            value = float(loss.detach())
            if math.isnan(value):
                return 0.0
            # Something counts where a mean is not 0.
            of_counts = {count: n for count, n in of_counts.items() if n or not value} or of_counts
        if form.is_read and not _are_same(of_counts.values()):
            self.warn(
                f"what loss {name!r} is divided by could be {_or(of_counts)}, which differ in an evaluation: it "
                "weighs micro-batches by the least; return a (sum, weight) pair"
            )
        return min(of_counts.values()) if form.is_read else of_counts[min(of_counts)]

    def is_ambiguous(self, window: Window) -> bool:
        """Whether counts that a mean may be divided by, which were alike when it was checked, differ in a window.

        Not so where checks have told no more of them, several times.
        """
        read = [form for form in self._all_forms() if form.is_read and len(form.counts) > 1]
        if self._asked_of[:1] != [read]:
            self._asked_of = []
        if len(self._asked_of) >= _MOST_ASKED or all(_are_same(_divisors(form, window).values()) for form in read):
            return False
        self._asked_of.append(read)
        return True

    def total(self, name: str, found: Sequence[float | Tensor], *, may_be_nothing: bool = False) -> float | Tensor:
        """Return the weight of a window, or a part of one, from those of its micro-batches.

        Args:
            name: The loss.
            found: What the micro-batches' losses are divided by.
            may_be_nothing: Whether other parts may have what this one lacks: it is NaN then, where a loss in which
                nothing counts does not exist.

        Raises:
            InvalidInputError: Nothing counts in the window, and its loss does not exist.
        """
        total: Any = sum(found[1:], start=found[0])
        if isinstance(total, Tensor) and total.device.type != "cpu":
            # It may be an integer, which would round a quotient to single precision.
            return in_full(total)
        if float(total):
            return float(total)
        if may_be_nothing:
            return 0.0 if self._exists.get(name) else math.nan
        if not self._exists.get(name):
            raise nothing_counts(f"what loss {name!r} is divided by is 0", len(found))
        return self.provisional_total(name)  # there is nothing to correct: it is 0, and so is its gradient

    # --- after a forward pass -----------------------------------------------------------------------------------------

    def weigh(self, term: Term, samples: int, factors: Factors) -> Tensor | None:
        """Return what a loss adds to that of the window; None if nothing in it counts.

        Its weight is noted in the term, if there is one to note.
        """
        value = self._weighed(term, samples, factors) if factors.scale else None
        self._has_weighed = True
        return value if value is None or factors.scale == 1.0 else value * factors.scale

    def _weighed(self, term: Term, samples: int, factors: Factors) -> Tensor | None:
        name, value = term.name, term.value
        if term.over is Form.PAIR:
            if name not in factors.pairs and self.weighting is Weighting.OWN_DIVISORS and not factors.alone:
                raise _changed(name, None, (), is_known=True)  # which was not known before
            factor = factors.pairs.get(name) or 1.0 / self.provisional_total(name)
            return value / term.weight if factors.alone else value * factor  # type: ignore[operator]
        if factors.alone and value.requires_grad:
            self.refuse_nothing(name, value)
        if factors.alone or not value.requires_grad:
            return value  # the caller says of a loss that it has no gradient
        if name in factors.terms:
            return self._weigh_terms(term, factors)
        if term.over is None and self.stated is None and (name not in self.forms or self.is_vector(name)):
            raise _changed(name, None, read(value))
        if term.over is None and self.are_weighed_unread:
            self.compare_with_check(name, value)
        if term.over is Form.VECTOR or self.weighting is not Weighting.DIVISOR:
            share = factors.of_samples if term.over is Form.VECTOR else factors.usual
            return value if share == 1.0 else value * share if share else None  # a mean over nothing is NaN
        term.weight = self.weight_of(name, value, samples) if factors.weight is None else factors.weight
        each = self.forms[name][0].per_sample if len(self.forms) > 1 and name in self.forms else None
        if each:  # of several losses
            term.weight = float(term.weight)
            factors.units = term.weight / each if factors.units is None else factors.units
            self._compare_with(name, term.weight, factors.units * each)
        # The steady path divides first, too: the last bit is the same.
        is_there = isinstance(term.weight, Tensor) or term.weight or self._nothing_in(name, value, [])
        return value * (term.weight / self.provisional_total(name)) if is_there else None

    def weight_of(self, name: str, loss: Tensor, samples: int, *, of: Window | None = None) -> float | Tensor:
        """Return what a loss is divided by, as its graph says, or the batch where compiled code has no readable graph.

        It is on the device if only the device knows it and nothing has to be compared with it: of cross entropy alone.

        Args:
            name: Its name.
            loss: The loss.
            samples: How many samples it is of.
            of: All of them, where they are not trained on.

        Raises:
            NotCheckedError: It has another form than when it was checked.
            InvalidInputError: It is divided by no finite number.
        """
        forms = self.forms.get(name)
        if forms is not None and len(forms) == 1 and (weight := weight_at_once(loss)) is not None:
            return weight or self._nothing_in(name, loss, [])
        found = read(loss)
        first, window = found[0], of or self.window
        if forms is not None and _is_compiled(found) and window is not None and not self.is_trusted and _counted(forms):
            start = 0 if of else self.start
            counted = counts_of(window, start, start + samples, frozenset(forms[0].counts))
            return _agreed({count: counted[count] * each for count, each in forms[0].counts.items()})
        if forms is None or _is_unread(found) or (len(forms) != len(found) and not self.is_trusted):
            raise _changed(name, forms, found)
        # The gradient of a division by 0 is NaN, even times 0.
        if len(forms) > 1 or any(one.divisor is not None for one in found):
            _wait(found)
        if of is None and not self.is_trusted:
            self._note_or_compare(name, found)
            self._refuse_uncounted(name, found, samples)
        if len(forms) > 1:
            own, unit = forms[0].per_sample or 1.0, first.weight
            for one, form in zip(found[1:], forms[1:], strict=True):
                self._compare_with(name, one.weight, unit * ((form.per_sample or 1.0) / own))
        if isinstance(first.weight, Tensor):
            return first.weight
        weight = self._unclamped(name, loss, first, samples, of=of)
        if math.isnan(weight):
            raise InvalidInputError(f"loss {name!r} divides by NaN; look for NaN among the weights")
        is_there = weight and not math.isinf(weight)  # what is multiplied by 0 is not there
        return weight if is_there else self._nothing_in(name, loss, [] if weight else found)

    def _nothing_in(self, name: str, loss: Tensor, terms: Sequence[ReadTerm]) -> float:
        """Note whether a loss in which nothing counts exists, as one divided by max(1, n) does; return 0."""
        is_there = not isinstance(loss, FakeTensor) and bool(loss.detach().isfinite())
        self._exists[name] = self._exists.get(name, True) and is_there
        self._stop(terms)
        return _refuse_lost(name, loss, terms)

    def _stop(self, terms: Sequence[ReadTerm]) -> None:
        """Let no gradient of a loss pass in which nothing counts: a division by 0 makes NaN of 0."""
        for term in terms if self.has_to_pass else ():
            stop(term)

    def _unclamped(self, name: str, loss: Tensor, term: ReadTerm, samples: int, *, of: Window | None) -> float:
        """Return what a loss is divided by: 0 in place of max(1, 0); warn where it is more than what is counted."""
        form, weight = self.forms[name][0], float(term.weight)
        if term.divisor is None and is_mean_over_classes(term.end):  # which torch counts, and nothing else divides
            return weight
        of_samples = samples * form.counts.get(SAMPLES, 0.0)
        is_one = form.may_be_clamped and term.divisor == 1.0
        window, start = (self.window, self.start) if of is None else (of, 0)
        is_unknown = of is not None or window is None or not self.is_checked_now or self.is_trusted or not form.counts
        if not is_one and is_unknown:
            return weight
        numbers: list[float] = []
        if window is not None and window.is_on(_HOST):
            numbers = list(_divisors(form, window, start, start + samples).values())
        is_counted = any(_is_same(weight, number) for number in numbers)
        if is_one and 0.0 in numbers and not is_counted and not float(loss.detach()):
            return 0.0
        if is_one and _is_same(weight, of_samples):  # a guess was warned of before
            is_clamped = not form.is_guess and 0.0 in numbers and not float(loss.detach())
        elif is_one and form.is_guess:
            is_clamped = bool(numbers) and not is_counted
        elif is_one:
            is_clamped = not is_counted or min(numbers) < weight * (1 - _SAME_WEIGHT)
        else:
            # What clamps was not above any divisor of the check; otherwise the count fitted by accident.
            is_clamped = bool(numbers) and weight <= form.least * (1 + _SAME_WEIGHT)
            is_clamped = is_clamped and all(weight > number * (1 + _SAME_WEIGHT) > 0 for number in numbers)
        if is_clamped:
            self.warn_of_clamp(name)
        return weight

    def _weigh_terms(self, term: Term, factors: Factors) -> Tensor | None:
        """Return a loss whose terms have factors of their own, which its backward pass applies."""
        own, forms = factors.terms[term.name], self.forms[term.name]
        # What is logged: beside a sum, a mean counts once for each micro-batch, since values of terms are not known.
        share = 1.0 if any(form.form is Form.SUM for form in forms) else factors.usual
        found = read(term.value)
        if len(found) != len(own):
            raise _changed(term.name, forms, found)
        _wait(found)
        self._note_or_compare(term.name, found)
        self._compare_terms(term.name, found, factors)
        if not all(own):
            _refuse_lost(term.name, term.value, found)
            if term.name in factors.empty and bool(term.value.detach().isnan()):
                raise nothing_counts(f"what loss {term.name!r} is divided by is 0", 1)
        if len(own) == 1:
            if not own[0]:
                self._stop(found)
            return term.value * own[0] if own[0] else None
        for one, factor in zip(found, own, strict=True):
            if factor != share:
                one.node.register_prehook(_scaling(factor / share))
            if not factor:
                term.has_nothing = True
                stop(one)
        return term.value * share

    def _compare_terms(self, name: str, found: Sequence[ReadTerm], factors: Factors) -> None:
        """Compare what each term is divided by with what the batch counts; as `_compare`."""
        forms = self.forms[name]
        for number, (one, form) in enumerate(zip(found, forms, strict=True)):
            if form.form is Form.MEAN and form.is_read:
                if one.weight is None and not _is_compiled([one]):
                    raise _changed(name, forms, found)
                self._compare((name, number), one, factors.expected[name, number])

    def _compare(self, slot: Slot, term: ReadTerm, expected: Mapping[Count, float]) -> None:
        """Compare what a term is divided by with what the batch counts.

        Raises:
            NotCheckedError: Another count than the one that was taken is meant.
            InvalidInputError: None is.
        """
        if term.weight is None:  # of compiled code, which was checked as it is written
            _agreed(expected)
            return
        (name, number), taken, forms = slot, min(expected), list(self.forms[slot[0]])
        meant = [count for count, counted in expected.items() if _is_same(term.weight, counted)]
        if term.divisor == 1.0 and forms[number].may_be_clamped:
            meant += [count for count, counted in expected.items() if not counted]  # it may be max(1, 0)
            if not meant or not expected[taken]:
                self.warn_of_clamp(name)
            if not meant:
                return
        if meant and len(meant) < len(expected):
            counts = {count: each for count, each in forms[number].counts.items() if count in meant}
            forms[number] = replace(forms[number], counts=counts)
            self.forms[name] = tuple(forms)
        if taken not in meant:
            error = InvalidInputError(
                f"loss {name!r} has a mean beside other terms that was divided by something else than "
                f"{expected[taken]:g}, which the batch counts and which it was divided by when the loss was checked; "
                "return its terms by name as (sum, weight) pairs"
            )
            raise NotCheckedError(error, is_known=True) if meant else error

    def _compare_with(self, name: str, weight: float, expected: float) -> None:
        """Compare what a term is divided by with what the first one says.

        Raises:
            NotCheckedError: They are not proportional, as they were when they were checked.
        """
        if abs(weight - expected) > _SAME_WEIGHT * abs(expected):  # not so for NaN
            self.have_diverged = True
            self._refuse_what_is_not_counted()
            raise _changed(name, None, (), is_known=True)

    def compare_with_check(self, name: str, loss: Tensor) -> None:
        """Compare a loss whose divisor does not count with what it was in the check, and in other micro-batches.

        Raises:
            NotCheckedError: It is put together otherwise.
        """
        if name not in self.forms or not self.forms[name][0].is_read:
            return
        found = read(loss)
        self._note_or_compare(name, found)
        if self.weighting is not Weighting.SUM:
            return
        # As far as can be seen without waiting for a device; where it is 0, nothing counts.
        weights = [one.weight if isinstance(one.weight, float) and one.weight else math.inf for one in found]
        first = self._added.setdefault(name, weights)
        pairs = zip(weights, first, strict=False)  # where nothing counts in a term, it may be joined with another
        if any(math.isfinite(one * before) and not _is_same(one, before) for one, before in pairs):
            self.warn(
                f"loss {name!r} was a sum, divided by one number, when it was checked, and is divided by different "
                "numbers in the micro-batches of a window, which are added all the same: its gradient may differ from "
                "the whole batch's; return a (sum, weight) pair"
            )

    def _note_or_compare(self, name: str, found: Sequence[ReadTerm]) -> None:
        """Note how a loss is put together, if it was checked for this window; otherwise compare it.

        Raises:
            NotCheckedError: It was never put together so in a window that was checked.
        """
        if self.stated is not None:
            return
        if any(isinstance(one.weight, float) and not (one.weight and math.isfinite(one.weight)) for one in found):
            if self.is_checked_now and not any(name == before[0] for before in self._seen):
                self._unseen.add(name)
            return  # nothing counts
        built = (name, *((one.is_counted, one.divisor is None, one.end and one.end.name()) for one in found))
        if built not in self._seen:
            if not self.is_checked_now and name not in self._unseen:
                raise _changed(name, self.forms.get(name), found)
            self._seen.add(built)
        self._unseen.discard(name)

    def _refuse_uncounted(self, name: str, found: Sequence[ReadTerm], samples: int) -> None:
        """Reject a sum in place of a mean, unless its samples count as 1.

        Raises:
            NotCheckedError: The loss is a sum here, and was a mean when it was checked.
        """
        forms = self.forms[name]
        for one, form in zip(found, forms, strict=False):
            if one.is_counted or not form.is_counted or not isinstance(one.weight, float) or math.isinf(one.weight):
                continue
            counted = {} if self.window is None else _divisors(form, self.window, self.start, self.start + samples)
            if not any(_is_same(one.weight, number) for number in counted.values()):
                raise _changed(name, forms, found)

    def refuse_nothing(self, name: str, loss: Tensor) -> None:
        """Reject a window of one micro-batch in which nothing counts, if that can be seen without waiting."""
        if self.stated is not None or isinstance(loss, FakeTensor) or weight_at_once(loss):
            return
        if any(isinstance(one.weight, float) and not one.weight for one in read(loss)):
            raise nothing_counts(f"what loss {name!r} is divided by is 0", 1)


# --- counting ---------------------------------------------------------------------------------------------------------


def _counts(window: Window, sizes: Sequence[int], form: TermForm) -> list[dict[Count, float]]:
    """Return the counts that a term may be divided by, of each micro-batch."""
    wanted, stops = frozenset(form.counts), accumulate(sizes)
    return [counts_of(window, stop - size, stop, wanted) for size, stop in zip(sizes, stops, strict=True)]


def _count(form: TermForm, window: Window) -> float:
    """Return the count that a term is divided by in a window."""
    count = min(form.counts)
    return counts_of(window, 0, window.samples, frozenset([count]))[count]


def _divisors(form: TermForm, window: Window, start: int = 0, stop: int | None = None) -> dict[Count, float]:
    """Return what a term is divided by in some samples, as each count says that may be meant: of no factor, if any."""
    meant: Iterable[Count] = form.counts.keys() - form.varying or form.counts
    meant = [count for count in meant if _is_same(form.counts[count], 1.0)] or meant
    counted = counts_of(window, start, window.samples if stop is None else stop, frozenset(meant))
    return {count: counted[count] * form.counts[count] for count in sorted(meant)}


def _is_unread(terms: Sequence[ReadTerm]) -> bool:
    return any(term.weight is None for term in terms)


def _is_compiled(terms: Sequence[ReadTerm]) -> bool:
    """Whether all that could not be read is compiled code."""
    unread = [term for term in terms if term.weight is None]
    return bool(unread) and all(term.end is not None and term.end.name() == _COMPILED for term in unread)


def _counted(forms: Sequence[TermForm]) -> bool:
    """Whether a check has read what a loss is divided by, all terms by the same, and it was a count of the batch."""
    return all(form.form is Form.MEAN and form.is_read and form.counts for form in forms) and share_a_divisor(forms)


def _agreed(numbers: Mapping[Count, float]) -> float:
    """Return what a loss is divided by as all counts of the batch that were found to fit say."""
    if not _are_same(numbers.values()):
        raise _ambiguous(numbers)
    return numbers[min(numbers)]


def _refuse_ambiguous(counted: Sequence[Mapping[Count, float]]) -> None:
    """Reject counts of micro-batches which weighed all samples so far alike and do not weigh these alike.

    Raises:
        NotCheckedError: A check of this window may tell which is meant.
    """
    totals = {count: sum(one[count] for one in counted) or 1.0 for count in counted[0]}
    first = min(totals)
    pairs = [(one[count] / totals[count], one[first] / totals[first]) for one in counted for count in totals]
    if any(abs(share - its) > _SAME_COUNT for share, its in pairs):
        raise _ambiguous(totals)


def _or(counts: Iterable[Count]) -> str:
    return " or ".join(sorted(map(in_words, counts)))


def _ambiguous(counts: Iterable[Count]) -> NotCheckedError:
    error = InvalidInputError(
        f"what the loss is divided by could be {_or(counts)}, which differ in this "
        "window; return a (sum, weight) pair, or pass loss_reduction="
    )
    return NotCheckedError(error)  # a check of this window may tell


def _expected(form: TermForm, window: Window, *, rounds: bool = False) -> float:
    """Return about what a loss is divided by in a window; exactly, where its samples or its batches are counted.

    Gradients then need no multiplication at the end of the window. Otherwise it depends on the samples of the last
    check. A power of two makes the optimizer step independent of that to the last bit, as after a resume; but those of
    several losses have to keep their ratio.
    """
    expected, is_exact = _estimated(form, window)
    if not rounds or is_exact or not 0 < expected < math.inf:
        return expected
    return 2.0 ** round(math.log2(expected))


def _estimated(form: TermForm, window: Window) -> tuple[float, bool]:
    """Return about what a loss is divided by in a window, and whether that does not depend on the last check."""
    if SAMPLES in form.counts:
        each = form.counts[SAMPLES]
        return window.samples * each, each == 1.0
    counts = [count for count in form.counts if count[0] == ELEMENTS or window.is_on(_HOST)]
    if not counts and window.is_nested and form.form is Form.MEAN and form.per_sample is None:
        counts = [(ELEMENTS, TARGETS)]  # without waiting for the device
    stop = window.samples if window.is_nested else 1  # what a split makes takes memory
    for count in counts:
        if found := counts_of(window, 0, stop, frozenset([count]))[count]:
            each = form.counts.get(count, 1.0)
            return found * each * (window.samples / stop), each == 1.0 and stop == window.samples
    each = form.per_sample or 1.0
    known = math.isfinite(each) and each > 0
    return window.samples * (each if known else 1.0), form.form is not Form.MEAN or form.per_sample is None


def _wait(terms: Sequence[ReadTerm]) -> None:
    """Bring what terms are divided by to the host."""
    for one in terms:
        one.weight = float(one.weight) if isinstance(one.weight, Tensor) else one.weight
        one.divisor = float(one.divisor) if isinstance(one.divisor, Tensor) else one.divisor


def _is_same(weight: Any, expected: float) -> bool:
    return isinstance(weight, float) and abs(weight - expected) <= _SAME_WEIGHT * abs(expected)


def _are_same(numbers: Iterable[float]) -> bool:
    first, *others = numbers
    return all(_is_same(number, first) for number in others)


def _scaling(factor: float) -> Any:
    def scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else one * factor for one in gradients)

    return scaled


# --- errors -----------------------------------------------------------------------------------------------------------


def nothing_counts(why: str, micro_batches: int) -> InvalidInputError:
    """Return the error for a window in which nothing counts."""
    return InvalidInputError(
        f"no target of this window counts ({why} in its {micro_batches} micro-batches), so the mean loss over it does "
        "not exist; leave such samples out"
    )


def _refuse_lost(name: str, loss: Tensor, terms: Sequence[ReadTerm]) -> float:
    """Reject a micro-batch that is divided by 0 although something in it counts; return 0 where nothing does."""
    lacking = [term for term in terms if not term.weight]
    is_smoothed = len(lacking) > 1 and any(has_only_weights_of_0(term.end) for term in lacking)
    if is_smoothed or (not isinstance(loss, FakeTensor) and bool(loss.detach().isinf())):
        raise InvalidInputError(
            f"loss {name!r} divides by 0 in a micro-batch in which something counts: weights that cancel out there, or "
            "classes of weight 0 with label_smoothing, so what these samples add to the whole batch is lost; return "
            "the (sum, weight) pair"
        )
    return 0.0


def _changed(
    name: str, forms: Sequence[TermForm] | None, found: Sequence[ReadTerm], *, is_known: bool = False
) -> NotCheckedError:
    """Return the error for a loss that has another form than it had when it was checked."""
    before, now = "was not there", "is"
    if forms is not None:
        is_alike = len(forms) == len(found)
        before, now = f"had {len(forms)} terms", "ends in other operations" if is_alike else f"has {len(found)}"
    remedy = "the same form in every micro-batch (a term of 0 where nothing counts), "
    if _is_compiled(found):
        now, remedy = "has a graph that cannot be read, as compiled code has none", ""
    error = InvalidInputError(
        f"loss {name!r} {before} when it was checked, and now {now}; return {remedy}a (sum, weight) pair, or pass "
        "loss_reduction="
    )
    return NotCheckedError(error, is_known=is_known)
