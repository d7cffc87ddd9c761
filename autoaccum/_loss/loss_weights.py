"""Weights micro-batches within the loss of their window, by what a check has shown and the graph of each loss says.

What a mean is divided by is known after its forward pass. A micro-batch therefore runs backward with its weight over a
provisional total, and gradients and losses are multiplied by the quotient once at the end of the window. Only where
several divisors meet in one gradient are they counted before, in the entries of the batch that a check has matched.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from autoaccum._data.numbers import spelled
from autoaccum._loss import divisor
from autoaccum._loss.batch_counts import ELEMENTS, SAMPLES, TARGETS, counted_at_once, counts_of, in_words
from autoaccum._loss.divisor import carries_numbers
from autoaccum._loss.graph_reader import ReadTerm, followed, read, weight_at_once
from autoaccum._loss.loss_check import share_a_divisor, stopped
from autoaccum._loss.terms import Form, TermForm, in_full
from autoaccum.errors import InvalidInputError, LossWarning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._data.numbers import Path
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.terms import Term

# The most divisors of their own that may meet in one gradient.
_MOST_DIVISORS = 3
# Relative differences of counts in double precision, and of what is read in single precision.
_SAME_COUNT, _SAME_WEIGHT = 1e-9, 1e-5
# The same of the weight that a split gives for a window, and the sum of those of micro-batches.
_ADDS_UP = 1e-6
# The totals of a window's samples, and of what split.weight counts, among the totals of its divisors.
OF_SAMPLES, _OF_SPLIT = ("", 0), ("", 1)
_HOST = torch.device("cpu")
# A term of a loss: the name of the loss, and the term's number.
Slot = tuple[str, int]


class Common(Enum):
    """What all losses of a window have in common."""

    SUM = "micro-batches are added"
    SAMPLES = "micro-batches count by their samples"
    SPLIT = "micro-batches count by split.weight"
    DIVISOR = "one divisor, known after the forward pass"
    NOTHING = "divisors of their own"


_COMMON = {
    Form.MEAN: Common.DIVISOR,
    Form.PAIR: Common.DIVISOR,
    Form.SUM: Common.SUM,
    Form.CONSTANT: Common.SAMPLES,
    Form.UNCONFIRMED: Common.SAMPLES,
}


@dataclass(slots=True)
class Factors:
    """The factors of the losses of one micro-batch, with which those of a window add up to its loss.

    Attributes:
        alone: Whether the micro-batch is the whole window, so that every loss is as it is.
        usual: For a loss that counts by samples.
        scale: A further factor for all losses, to compensate for a reduction that divides gradients.
        weight: What a loss is divided by if its graph does not say so; None if it does.
        pairs: For the sums of (sum, weight) pairs whose total is known, by name.
        terms: For each term of a loss that has divisors of its own, by name.
        expected: What these terms are divided by, as each count of the batch that may be meant says.
        units: What the first loss is divided by, in units of what a sample had when losses were checked.
    """

    alone: bool = False
    usual: float = 1.0
    scale: float = 1.0
    weight: float | None = None
    pairs: dict[str, float] = field(default_factory=dict)
    terms: dict[str, list[float]] = field(default_factory=dict)
    expected: dict[Slot, dict[Count, float]] = field(default_factory=dict)
    units: Any = None


class NotCheckedError(Exception):
    """A loss is not what it was when it was checked, or has not been checked: the window begins again with a check.

    Args:
        said: The error for the user, if the check has been made already.
        is_known: Whether it is known by now, so that no check is needed.
    """

    def __init__(self, said: InvalidInputError, *, is_known: bool = False) -> None:
        super().__init__(str(said))
        self.said = said
        self.is_known = is_known


class LossWeights:
    """What is known of how the losses of micro-batches make the loss of a window.

    Args:
        asked: What the arguments say of every loss that is a number; None to find it out.
        split: The split, for a message.

    Attributes:
        said: The same; None for a loss of torch, which says it better.
        forms: The terms of each loss, by name; of those that are numbers only if it is not said.
        is_checked: Whether losses were tried on several samples, or on one where no two can be.
        is_trusted: Whether the loss is one of torch, which needs no check.
        divided_by: What the sums of this window are divided by together, where each loader batch carries a number.
        window: The window that is being computed, and the first sample of the current micro-batch in it.
        start: See `window`.
        is_scaled: Whether batches carry a scale of the loss, which may differ between them.
        warnings: What was said of gradients that may be wrong.
    """

    def __init__(self, asked: Common | None, split: str = "") -> None:
        self._split = split
        self._adds_up = False  # whether the split's weight was seen to
        self.said = self._asked = asked
        self.forms: dict[str, tuple[TermForm, ...]] = {}
        self.is_checked = self.is_trusted = False
        self.divided_by: float | None = None
        self.window: Window | None = None
        self.start = 0
        self.warnings: list[str] = []
        self.is_scaled = False
        self._is_supposed = False
        self._provisional: dict[str, float] = {}  # about what each loss is divided by in this window
        self._trails: dict[str, list[ReadTerm]] = {}  # the terms of each loss, as of the last graph
        self._are_apart = False  # whether divisors that were proportional turned out not to be
        self._is_new = False  # whether losses were checked for this window, so that what is read in it is known
        self._seen: set[tuple[Any, ...]] = set()  # how each loss was put together in the graphs of such windows
        self._added: dict[str, list[Any]] = {}  # what each sum was divided by in the first micro-batch of this window
        # Found on the device, to be looked at a window later: whether something is wrong, and what is to be said then.
        self._later: list[tuple[Tensor, str | InvalidInputError]] = []

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def common(self) -> Common:
        """What all losses have in common."""
        forms = self._all_forms()
        kinds = {self._common_of(form) for form in forms}
        means = [form for form in forms if form.form is Form.MEAN]
        have_one = len(means) < len(("one", "another")) or (share_a_divisor(means) and not self._are_apart)
        pairs = sum(form.form is Form.PAIR for form in forms)
        if pairs + bool(means) > 1 or not have_one or len(kinds) > 1:
            return Common.NOTHING
        return kinds.pop() if kinds else self.said or Common.SAMPLES

    def _common_of(self, form: TermForm) -> Common:
        if form.form is Form.VECTOR:
            return Common.SUM if self.said is Common.SUM else Common.SAMPLES
        if self.said is not None and form.form is not Form.PAIR:
            return self.said
        return Common.DIVISOR if form.number is not None else _COMMON[form.form]

    def _all_forms(self) -> list[TermForm]:
        return [form for forms in self.forms.values() for form in forms]

    @property
    def knows_all(self) -> bool:
        """Whether no loss needs a check, as far as is known."""
        return self.said is not None or self.is_trusted

    def is_vector(self, name: str) -> bool:
        """Whether a loss is one for each sample."""
        return name in self.forms and self.forms[name][0].form is Form.VECTOR

    @property
    def mixes_pairs(self) -> bool:
        """Whether one of several losses with divisors of their own is a (sum, weight) pair."""
        return any(form.form is Form.PAIR for form in self._all_forms()) and self.common is Common.NOTHING

    @property
    def are_read(self) -> bool:
        """Whether factors depend on nothing that is counted in the batch."""
        return self.common not in (Common.NOTHING, Common.SPLIT) and not self._counted() and self._number is None

    @property
    def _number(self) -> Path | None:
        """Where each batch carries the number that all losses are divided by; None if there is none."""
        numbers = {form.number for form in self._all_forms()}
        return numbers.pop() if len(numbers) == 1 else None

    def _counted(self) -> list[TermForm]:
        """Return the means whose weights are counted in the batch."""
        is_mixed = self.common is Common.NOTHING
        return [form for form in self._all_forms() if form.form is Form.MEAN and (is_mixed or not form.is_read)]

    def note(self, terms: Sequence[Term]) -> None:
        """Note which losses are pairs, which are losses of each sample, and which are what the arguments say."""
        for term in terms:
            if term.is_reported or (term.over is None and self.said is None):
                continue
            if term.over is None:
                self.forms[term.name] = (TermForm(Form.SUM if self.said is Common.SUM else Form.UNCONFIRMED),)
                continue
            before = self.forms.get(term.name, (None,))[0]
            if term.over is Form.PAIR and before is not None and before.form not in (Form.PAIR, Form.VECTOR):
                raise InvalidInputError(
                    f"loss {term.name!r} is a (sum, weight) pair, and was a number in earlier windows; return the same "
                    "form in all of them"
                )
            if before is None or before.form is not term.over:
                self.forms[term.name] = (TermForm(term.over),)

    def trust(self, name: str, form: TermForm | None) -> None:
        """Take the form of a loss of torch, which needs no check; None if it is no such loss."""
        self.forms.pop(name, None)
        self.is_trusted = form is not None
        self.said = self._asked if form is None else None
        if form is not None:
            self.forms[name] = (form,)

    def forget(self, name: str) -> None:
        """Forget a loss that turned out to be only reported."""
        self.forms.pop(name, None)

    def learn(self, found: Mapping[str, Sequence[TermForm]], *, is_checked: bool = True) -> None:
        """Take what a check has shown.

        Args:
            found: The terms of each loss, by name.
            is_checked: Whether they were tried on several samples.

        Raises:
            InvalidInputError: Losses cannot be put together from micro-batches.
        """
        self.is_checked = self._is_new = True
        found = {name: forms for name, forms in found.items() if is_checked or name not in self.forms}
        for name, forms in found.items():
            before = self.forms.get(name, ())
            if len(before) == len(forms) and any(
                was.is_read and not now.is_read for was, now in zip(before, forms, strict=True)
            ):
                raise InvalidInputError(
                    f"loss {name!r} was {_in_words(before)} in earlier windows, as its graph says, and is not in this "
                    "one; return the same form in all windows, a (sum, weight) pair, or pass loss_reduction="
                )
            self.forms[name] = _both(forms, before) or tuple(forms)
        for name, forms in found.items():
            self._refuse_or_warn(name, forms)
        self._is_supposed = bool(found) and not is_checked
        if self.common is Common.NOTHING:
            self._refuse_what_is_not_counted()

    def tell_supposed(self) -> None:
        """Warn of what is known of a single sample alone; not before that sample has fitted."""
        if self._is_supposed:
            self._is_supposed = False
            self.warn(
                "two samples that can be joined do not fit at once, so what the loss is divided by is read from its "
                "graph and not checked; a (sum, weight) pair or loss_reduction= says it"
            )

    def _refuse_or_warn(self, name: str, forms: Sequence[TermForm]) -> None:
        """Reject a loss of which a check confirms nothing, and warn of single terms that it does not confirm."""
        doubtful = [number for number, form in enumerate(forms) if form.form is Form.UNCONFIRMED]
        if doubtful and all(form.form in (Form.UNCONFIRMED, Form.CONSTANT) for form in forms):
            what = "is" if forms[0].is_read else "cannot be read from its graph, and is"
            raise InvalidInputError(
                f"loss {name!r} {what} neither a mean nor a sum over samples: micro-batches do not give the gradient "
                "of the whole batch. Return a (sum, weight) pair; pass loss_scope='window' to fit, Runner or "
                "Accumulator if the loss compares samples; or loss_reduction='mean' to average micro-batches all the "
                "same"
            )
        for number in doubtful:
            term = f"{forms[number].name!r}" if forms[number].name else f"term {number + 1} of {len(forms)}"
            self.warn(
                f"loss {name!r}: {term} is neither a mean nor a sum over samples, as a router's balancing loss is "
                "not: it counts by samples in each micro-batch, and its gradient may differ from the whole batch's"
            )
        if any(form.is_clamped for form in forms):
            self.warn(_clamp_text(name))

    def _refuse_what_is_not_counted(self) -> None:
        divisors: list[TermForm] = []
        for name, forms in self.forms.items():
            for form in forms:
                if form.form is not Form.MEAN:
                    continue
                if not any(share_a_divisor([form, other]) for other in divisors):
                    divisors.append(form)
                if not form.counts:
                    raise InvalidInputError(
                        f"loss {name!r} has a mean beside terms that are divided otherwise, and what it is divided by "
                        "is no count of the batch, so its total over a window is not known before the backward pass; "
                        "return its terms by name, {'a': (sum, weight), 'b': (sum, weight)}, or pass "
                        "loss_reduction='mean'"
                    )
        if len(divisors) > _MOST_DIVISORS:
            raise InvalidInputError(
                f"the loss has {len(divisors)} means, each divided by a number of its own, as a mean for each time "
                "step has; divide one masked sum by one count, (loss * mask).sum() / mask.sum(), or pass "
                "loss_reduction='mean'"
            )

    def warn(self, text: str) -> None:
        """Warn once that a gradient may be wrong."""
        if text not in self.warnings:
            self.warnings.append(text)
            warnings.warn(f"autoaccum: {text}", LossWarning, stacklevel=2)

    # --- several ranks ------------------------------------------------------------------------------------------------

    @property
    def knowledge(self) -> tuple[Any, ...]:
        """Everything that is known of losses."""
        return self.forms, self.is_checked, self._are_apart

    def in_short(self) -> Any:
        """Return what must be the same on all ranks, to be compared."""
        forms = {
            name: [(form.form.name, form.is_read, min(form.counts, default=None)) for form in of_name]
            for name, of_name in sorted(self.forms.items())
        }
        return self.common.name, forms

    def adopt(self, known: Sequence[tuple[Any, ...]]) -> None:
        """Take what all ranks know together.

        Raises:
            InvalidInputError: They know different things of one loss.
        """
        self._is_new = True
        if not self.is_trusted:
            self.forms = {}
        for forms, is_checked, are_apart in known:
            self.is_checked |= is_checked
            self._are_apart |= are_apart
            for name, theirs in forms.items():
                mine = self.forms.get(name, theirs)
                both = _both(mine, theirs)
                if both is None:
                    raise InvalidInputError(
                        f"loss {name!r} is put together otherwise on some ranks: {_in_words(mine)}, and "
                        f"{_in_words(theirs)}; return the same form on all, a (sum, weight) pair, or pass "
                        "loss_reduction="
                    )
                self.forms[name] = both

    # --- before a window ----------------------------------------------------------------------------------------------

    def is_ambiguous(self, window: Window, sizes: Sequence[int], *, only_unread: bool = False) -> frozenset[Count]:
        """Return counts which fitted all samples so far, of which only some can be right in this window."""
        for form in self._counted():
            if only_unread and form.is_read:
                continue  # the graph will tell
            if len(form.counts) > 1 and len(sizes) > 1:
                counted = _counts(window, sizes, frozenset(form.counts))
                totals = {count: sum(one[count] for one in counted) or 1.0 for count in form.counts}
                shares = [[one[count] / total for one in counted] for count, total in totals.items()]
                pairs = [pair for one in shares for pair in zip(one, shares[0], strict=True)]
                if any(abs(mine - its) > _SAME_COUNT for mine, its in pairs):
                    return frozenset(form.counts)
        return frozenset()

    def totals(self, window: Window) -> dict[Slot, float]:
        """Return what each term with a divisor of its own is divided by in a window, as the batch counts it."""
        found: dict[Slot, float] = {OF_SAMPLES: float(window.samples)}
        if self.said is Common.SPLIT and self.common is not Common.DIVISOR:
            found[_OF_SPLIT] = window.weight(0, window.samples) if window.samples else 0.0
        for name, forms in self.forms.items():
            found[name, -1] = _expected(forms[0], window) if window.samples else 0.0
            for number, form in enumerate(forms):
                if form.form is Form.MEAN and form.counts and window.samples:
                    found[name, number] = _count(form, window)
        return found

    def factors(
        self, window: Window, sizes: Sequence[int], totals: Mapping[Slot, float] | None = None, *, is_part: bool = False
    ) -> list[Factors]:
        """Return the factors of each micro-batch's losses.

        Args:
            window: The samples.
            sizes: The micro-batch sizes.
            totals: `totals` of the window that these samples are a part of; None if they are the whole.
            is_part: Whether they are a part, which is put together with others by its weight.

        Raises:
            InvalidInputError: Nothing that a loss counts is in the window.
        """
        common = self.common
        if len(sizes) == 1 and not is_part and not (self._number is not None and carries_numbers(window)):
            return [Factors(alone=True)]
        self._added.clear()
        if common is Common.SUM:
            return [Factors() for _ in sizes]
        weights, whole = list(map(float, sizes)), OF_SAMPLES
        if self.said is Common.SPLIT and common is not Common.DIVISOR:
            stops, whole = list(accumulate(sizes)), _OF_SPLIT
            weights = [window.weight(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
            self._check_split(window, weights)
        total = sum(weights) if totals is None else totals[whole]
        if not total:
            raise nothing_counts("split.weight(batch) is 0", len(sizes))
        factors = [Factors(usual=weight / total) for weight in weights]
        if common is Common.DIVISOR:
            self.set_provisional(window, totals)
            for factor, weight in zip(factors, self._weights_beforehand(window, sizes), strict=True):
                factor.weight = weight
        if common is Common.NOTHING:
            self._weigh_each_term(factors, window, sizes, totals or self.totals(window))
        return factors

    def _check_split(self, window: Window, weights: Sequence[float]) -> None:
        """Reject, in the first window that is cut, a weight of the split that does not add up over micro-batches."""
        if self._adds_up or len(weights) == 1:
            return
        added, whole = sum(weights), window.weight(0, window.samples)
        if not math.isclose(whole, added, rel_tol=_ADDS_UP):
            raise InvalidInputError(
                f"split={self._split}: weight does not add up: {whole:g} for a window, and {added:g} for its "
                f"{len(weights)} micro-batches together, as a mean or a maximum would; return a sum, such as the tokens"
            )
        self._adds_up = True

    def _weights_beforehand(self, window: Window, sizes: Sequence[int]) -> Sequence[float | None]:
        """Return what a loss is divided by where its graph does not say it: a number, or a count, of the batch."""
        self.divided_by = None
        if (number := self._number) is not None:
            self.divided_by, is_counted = divisor.of_window(number, window)
            if not is_counted:
                self.warn(_share_text(number))
            return divisor.of_micro_batches(number, window, sizes)
        if unread := self._counted():
            count = min(unread[0].counts)
            return [one[count] for one in _counts(window, sizes, frozenset([count]))]
        return [None] * len(sizes)

    def _weigh_each_term(
        self, factors: Sequence[Factors], window: Window, sizes: Sequence[int], totals: Mapping[Slot, float]
    ) -> None:
        for name, forms in self.forms.items():
            if forms[0].form in (Form.PAIR, Form.VECTOR):
                continue
            for number, form in enumerate(forms):
                if form.form is Form.MEAN:
                    count = min(form.counts)
                    counted, total = _counts(window, sizes, frozenset(form.counts)), totals[name, number]
                    if not total:
                        raise nothing_counts(f"nothing counts ({in_words(count)})", len(sizes))
                    own = [one[count] / total for one in counted]
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

    def of_part(self, window: Window) -> float | None:
        """Return by what a part of a window is put together with others; None if parts are added."""
        if self.common is Common.SUM:
            return None
        return window.weight(0, window.samples) if self.common is Common.SPLIT else float(window.samples)

    def counts(self, name: str) -> bool:
        """Whether what a loss is divided by is a count of the batch."""
        return self.common is Common.DIVISOR and any(form.counts for form in self.forms.get(name, ()))

    def of_samples(
        self, name: str, window: Window, loss: Tensor | None = None
    ) -> tuple[float | Tensor, float | Tensor]:
        """Return what a loss of some samples is multiplied by for its sum, and the weight of that.

        Args:
            name: Its name.
            window: The samples.
            loss: The loss, if its graph may say it; otherwise their counts do, or their number.
        """
        if self.common is not Common.DIVISOR:
            total = self.of_part(window)
            return (1.0, float(window.samples)) if total is None else (total, total)
        if (number := self._number) is not None:
            return divisor.of_micro_batches(number, window, [window.samples])[0], divisor.of_window(number, window)[0]
        if loss is not None and loss.requires_grad:
            weight = self.weight_of(name, loss, window.samples, trains=False)
            return weight, weight
        form = self.forms[name][0] if name in self.forms else None
        if form is not None and form.counts:
            counted = _count(form, window)
            return counted, counted
        self.warn(
            f"loss {name!r} is evaluated by the model itself, and what it is divided by is no count of the batch: "
            "the evaluation's mean weighs micro-batches by their samples"
        )
        return float(window.samples), float(window.samples)

    def total(self, name: str, found: Sequence[float | Tensor], *, may_be_nothing: bool = False) -> float | Tensor:
        """Return the weight of a window from those of its micro-batches.

        Raises:
            InvalidInputError: Nothing counts, as far as can be seen without waiting for the device.
        """
        total: Any = sum(found[1:], start=found[0])
        if isinstance(total, Tensor) and total.device.type != "cpu":
            # It may be an integer, which would round a quotient to single precision.
            return in_full(total)
        on_host = float(total if self.divided_by is None else self.divided_by)
        if not may_be_nothing and not on_host:
            raise nothing_counts(f"what loss {name!r} is divided by is 0", len(found))
        return on_host

    # --- after a forward pass -----------------------------------------------------------------------------------------

    def weigh(self, term: Term, samples: int, factors: Factors) -> Tensor | None:
        """Return what a loss adds to that of the window; None if nothing in it counts.

        Its weight is noted in the term, if there is one to note.

        Args:
            term: The loss, with its graph.
            samples: Samples of the micro-batch.
            factors: Its factors.

        Raises:
            InvalidInputError: The loss has another form than in the windows before.
        """
        value = self._weighed(term, samples, factors) if factors.scale else None
        return value if value is None or factors.scale == 1.0 else value * factors.scale

    def _weighed(self, term: Term, samples: int, factors: Factors) -> Tensor | None:
        name, value = term.name, term.value
        if term.over is Form.PAIR:
            if name not in factors.pairs and self.common is Common.NOTHING and not factors.alone:
                raise NotCheckedError(_changed(name, None, ()).said, is_known=True)  # which was not known before
            factor = factors.pairs.get(name) or 1.0 / self.provisional_total(name)
            return value / term.weight if factors.alone else value * factor  # type: ignore[operator]
        if factors.alone and value.requires_grad:
            self.refuse_nothing(name, value)
        if factors.alone or not value.requires_grad:
            return value  # the caller says of a loss that it has no gradient
        if name in factors.terms:
            return self._weigh_terms(term, factors)
        if term.over is None and self.said is None and (name not in self.forms or self.is_vector(name)):
            raise _changed(name, None, read(value))
        if self.common is Common.SUM and term.over is None:
            self.see_sum(name, value)
        if term.over is Form.VECTOR or self.common is not Common.DIVISOR:
            return _times(value, factors.usual)
        if factors.weight is None:
            term.weight = self.weight_of(name, value, samples)
            self._compare_counts(name, term.weight, samples)
        else:
            term.weight = factors.weight
        self._compare_units(name, term.weight, factors)
        # The steady path divides first, too: the last bit is the same.
        is_there = isinstance(term.weight, Tensor) or term.weight
        return value * (term.weight / self.provisional_total(name)) if is_there else None

    def _compare_counts(self, name: str, weight: Any, samples: int) -> None:
        """Warn, in a window that was checked, of a divisor that is above the counts which it was in the check."""
        counts, window = self.forms[name][0].counts if name in self.forms else {}, self.window
        if self._is_new and not self.is_trusted and counts and window is not None and window.is_on(_HOST):
            counted = counts_of(window, self.start, self.start + samples, frozenset(counts))
            numbers = [counted[count] * each for count, each in counts.items()]
            if isinstance(weight, float) and all(weight > number * (1 + _SAME_WEIGHT) > 0 for number in numbers):
                self.warn(_above_text(name))

    def begin_steady(self) -> None:
        """Begin a window that is not checked."""
        self._is_new = False
        self._added.clear()

    def see_sum(self, name: str, loss: Tensor) -> None:
        """Compare a loss that is added up with what it was when it was checked, and in the window's micro-batches.

        Raises:
            NotCheckedError: It is put together otherwise.
        """
        if self.knows_all or not self.forms[name][0].is_read:
            return
        found = self._read(name, loss)
        self._see(name, found)
        weights = [term.weight for term in found]
        first = self._added.setdefault(name, weights)
        if first is not weights and not self.is_scaled and not all(map(_are_equal, first, weights)):
            self.warn(_unlike_text(name))

    def _see(self, name: str, found: Sequence[ReadTerm]) -> None:
        """Note how a loss is put together, if it was checked for this window; otherwise compare it.

        Raises:
            NotCheckedError: It was never put together so in a window that was checked.
        """
        if self.said is not None:
            return
        if any(isinstance(one.weight, float) and one.weight in (0.0, math.inf, -math.inf) for one in found):
            return  # nothing counts
        built = (name, *((one.is_counted, one.divisor is None, one.end and one.end.name()) for one in found))
        if built not in self._seen:
            if not self._is_new:
                raise _changed(name, self.forms.get(name), found)
            self._seen.add(built)

    def _compare_units(self, name: str, weight: Any, factors: Factors) -> None:
        """Compare what a loss is divided by with the first loss of the micro-batch."""
        each = self.forms[name][0].per_sample if len(self.forms) > 1 and name in self.forms else None
        if not each:
            return
        if factors.units is None:
            factors.units = weight / each
        else:
            self._compare_with(name, weight, factors.units * each)

    def _compare_with(self, name: str, weight: Any, expected: Any) -> None:
        """Compare what a term is divided by with what the first one says.

        Raises:
            NotCheckedError: They are not proportional, as they were when they were checked.
        """
        if isinstance(weight, Tensor) or isinstance(expected, Tensor):
            are_apart = torch.as_tensor(weight - expected).abs() > _SAME_WEIGHT * abs(expected)
            self._later.append((are_apart, _apart(name)))
        elif abs(weight - expected) > _SAME_WEIGHT * abs(expected):
            self._are_apart = True
            self._refuse_what_is_not_counted()
            raise NotCheckedError(_apart(name), is_known=True)

    def refuse_nothing(self, name: str, loss: Tensor) -> None:
        """Reject a window of one micro-batch in which nothing counts, if that can be seen without waiting.

        Raises:
            InvalidInputError: Nothing counts.
        """
        if self.said is not None or isinstance(loss, FakeTensor) or weight_at_once(loss):
            return
        if any(isinstance(one.weight, float) and not one.weight for one in read(loss)):
            raise nothing_counts(f"what loss {name!r} is divided by is 0", 1)

    def weight_of(self, name: str, loss: Tensor, samples: int, *, trains: bool = True) -> float | Tensor:
        """Return what a loss is divided by, as its graph says; on the device if it is known only there.

        Args:
            name: Its name.
            loss: A number.
            samples: Samples of the micro-batch.
            trains: Whether it is trained on, and not evaluated.

        Raises:
            NotCheckedError: It has another form than when it was checked.
            InvalidInputError: It is divided by no finite number.
        """
        forms = self.forms.get(name)
        if forms is not None and len(forms) == 1 and (weight := weight_at_once(loss)) is not None:
            return weight
        found = self._read(name, loss)
        first = found[0]
        if forms is None or first.weight is None or (len(forms) != len(found) and not self.is_trusted):
            raise _changed(name, forms, found)
        if trains and not self.is_trusted:
            self._see(name, found)
        if len(forms) > 1:
            own, unit = forms[0].per_sample or 1.0, first.weight
            for one, form in zip(found[1:], forms[1:], strict=True):
                self._compare_with(name, one.weight, unit * ((form.per_sample or 1.0) / own))
        if first.divisor is not None and forms[0].may_be_clamped:
            first.weight = self._unclamped(name, loss, first, samples)
        if isinstance(first.weight, Tensor):
            # The gradient of a division by 0 is NaN, even times 0. This waits for the device.
            divides = any(one.divisor is not None for one in found)
            return 0.0 if divides and not float(first.weight) else first.weight
        if math.isnan(first.weight):
            raise InvalidInputError(f"loss {name!r} divides by NaN; look for NaN among the weights")
        return 0.0 if math.isinf(first.weight) else first.weight  # what is multiplied by 0 is not there

    def _read(self, name: str, loss: Tensor) -> list[ReadTerm]:
        """Return the terms of a loss: along the trails to those of the last one, where its graph is the same."""
        terms = self._trails.get(name)
        again = [] if terms is None else [followed(loss, one.trail) for one in terms if one.trail is not None]
        if terms is None or len(again) < len(terms) or None in again:
            found = read(loss)
            if all(one.trail is not None and one.weight is not None for one in found):
                self._trails[name] = [replace(one, node=None) for one in found]
            return found
        for term, seen in zip(terms, again, strict=True):
            term.weight, term.divisor = seen  # type: ignore[misc]
        return terms

    def _unclamped(self, name: str, loss: Tensor, term: ReadTerm, samples: int) -> Any:
        """Return what a loss is divided by: what the batch says, if it is 1 and may be 1 for 0."""
        counts, window = self.forms[name][0].counts, self.window
        if isinstance(term.divisor, Tensor):
            self._later.append((term.divisor == 1.0, _clamp_text(name)))
        elif term.divisor == 1.0 and not _is_same(term.weight, samples * counts.get(SAMPLES, 0.0)):
            numbers = []
            if window is not None and window.is_on(_HOST):
                counted = counts_of(window, self.start, self.start + samples, frozenset(counts))
                numbers = [counted[count] * each for count, each in counts.items()]
            if numbers and not any(numbers) and not float(loss.detach()):
                return 0.0
            if not numbers or not all(_is_same(term.weight, number) for number in numbers):
                self.warn(_clamp_text(name))
        return term.weight

    def _weigh_terms(self, term: Term, factors: Factors) -> Tensor | None:
        """Return a loss whose terms have factors of their own, which its backward pass applies."""
        own, forms = factors.terms[term.name], self.forms[term.name]
        # What is logged: beside a sum, a mean counts once for each micro-batch, since values of terms are not known.
        share = 1.0 if any(form.form is Form.SUM for form in forms) else factors.usual
        found = read(term.value)
        if len(found) != len(own):
            raise _changed(term.name, forms, found)
        self._see(term.name, found)
        for number, (one, form) in enumerate(zip(found, forms, strict=True)):
            if form.form is Form.MEAN and form.is_read:
                self._compare((term.name, number), one, factors.expected[term.name, number])
        if len(own) == 1:
            return _times(term.value, own[0])
        for one, factor in zip(found, own, strict=True):
            if factor != share:
                one.node.register_prehook(_scaling(factor / share))
            if not factor and one.end is not None:  # a division by 0 makes NaN of 0
                term.has_nothing = True
                one.end.register_prehook(stopped)
        return term.value * share

    def _compare(self, slot: Slot, term: ReadTerm, expected: Mapping[Count, float]) -> None:
        """Compare what a term is divided by with what the batch counts.

        Raises:
            NotCheckedError: Another count than the one that was taken is meant.
            InvalidInputError: None is.
        """
        (name, number), taken = slot, min(expected)
        error = InvalidInputError(
            f"loss {name!r} has a mean beside other terms that was divided by something else than {expected[taken]:g}, "
            "which the batch counts and which it was divided by when the loss was checked; return its terms by name as "
            "(sum, weight) pairs"
        )
        if isinstance(term.weight, Tensor):
            is_other = (term.weight - expected[taken]).abs() > _SAME_WEIGHT * abs(expected[taken])
            self._later.append((is_other, error))
            return
        meant = [count for count, counted in expected.items() if _is_same(term.weight, counted)]
        if taken not in meant and term.divisor == 1.0 and self.forms[name][number].may_be_clamped:
            self.warn(_clamp_text(name))
            return
        if meant and len(meant) < len(expected):
            forms = list(self.forms[name])
            counts = {count: each for count, each in forms[number].counts.items() if count in meant}
            forms[number] = replace(forms[number], counts=counts)
            self.forms[name] = tuple(forms)
        if taken not in meant:
            raise NotCheckedError(error, is_known=True) if meant else error

    # --- a window later -----------------------------------------------------------------------------------------------

    @property
    def has_left(self) -> bool:
        """Whether something on the device is to be looked at."""
        return bool(self._later)

    def look_back(self) -> None:
        """Look at what was left on the device in the window before.

        Raises:
            InvalidInputError: What a loss was divided by is not what the batch counts.
        """
        self._trails.clear()  # careful windows read all of a graph
        self._is_new = False
        later, self._later = self._later, []
        are_wrong = torch.stack([is_wrong.reshape(()) for is_wrong, _ in later]).tolist() if later else []
        for said in [said for is_wrong, (_, said) in zip(are_wrong, later, strict=True) if is_wrong]:
            if isinstance(said, InvalidInputError):
                raise said
            self.warn(said)

    def forget_window(self) -> None:
        """Drop what was left on the device, since the window begins again."""
        self._later, self.window = [], None


# --- counting ---------------------------------------------------------------------------------------------------------


def _counts(window: Window, sizes: Sequence[int], wanted: frozenset[Count]) -> list[dict[Count, float]]:
    """Return some counts of each micro-batch."""
    stops = list(accumulate(sizes))
    return [counts_of(window, stop - size, stop, wanted) for size, stop in zip(sizes, stops, strict=True)]


def _count(form: TermForm, window: Window) -> float:
    """Return the count that a term is divided by in a window."""
    count = min(form.counts)
    return counts_of(window, 0, window.samples, frozenset([count]))[count]


def _expected(form: TermForm, window: Window, *, rounds: bool = False) -> float:
    """Return about what a loss is divided by in a window; exactly, where its batches are on the host and are counted.

    Gradients then need no multiplication at the end of the window. Otherwise it depends on the samples of the last
    check. A power of two makes the update independent of that to the last bit, as after a resume; but those of several
    losses have to keep their ratio.
    """
    batch = window.plain_batch() if form.counts else None
    for count, each in form.counts.items():
        found = counted_at_once(batch, count)
        if found is None and count != SAMPLES and (count[0] == ELEMENTS or window.is_on(_HOST)):
            found = counts_of(window, 0, window.samples, frozenset([count]))[count]
        if found and each > 0:
            return found * each
    if form.per_sample is None and (found := counted_at_once(batch, (ELEMENTS, TARGETS))):
        return found  # on the device
    each = form.per_sample or 1.0
    expected = window.samples * (each if math.isfinite(each) and each > 0 else 1.0)
    is_inexact = form.form is Form.MEAN and form.per_sample is not None and SAMPLES not in form.counts
    return 2.0 ** round(math.log2(expected)) if is_inexact and rounds and expected else expected


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two divisors are the same, as far as can be seen without waiting for a device."""
    are_here = isinstance(one, float) and isinstance(other, float)
    return not are_here or other in (0.0, math.inf, -math.inf) or _is_same(one, other)


def _is_same(weight: Any, expected: float) -> bool:
    return isinstance(weight, float) and abs(weight - expected) <= _SAME_WEIGHT * abs(expected)


def _both(mine: Sequence[TermForm], theirs: Sequence[TermForm]) -> tuple[TermForm, ...] | None:
    """Return terms with the counts that both found; None if they are of other kinds."""
    if [one.kind for one in mine] != [one.kind for one in theirs]:
        return None
    pairs = zip(mine, theirs, strict=True)
    return tuple(
        replace(one, counts={count: each for count, each in one.counts.items() if count in its.counts})
        for one, its in pairs
    )


# --- gradients --------------------------------------------------------------------------------------------------------


def _times(value: Tensor, factor: float) -> Tensor | None:
    if not factor:
        return None  # a mean over nothing is NaN
    return value if factor == 1.0 else value * factor


def _scaling(factor: float) -> Any:
    def scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else one * factor for one in gradients)

    return scaled


# --- what is said -----------------------------------------------------------------------------------------------------


def _in_words(forms: Sequence[TermForm]) -> str:
    return " + ".join(form.form.value for form in forms)


def nothing_counts(why: str, micro_batches: int) -> InvalidInputError:
    """Return the error for a window in which nothing counts."""
    return InvalidInputError(
        f"no target of this window counts ({why} in its {micro_batches} micro-batches), so the mean loss over it does "
        "not exist; leave such samples out"
    )


def _apart(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"loss {name!r} has terms whose divisors had one ratio when they were checked, and have another now; return "
        "them by name as (sum, weight) pairs"
    )


def _changed(name: str, forms: Sequence[TermForm] | None, found: Sequence[ReadTerm]) -> NotCheckedError:
    """Return the error for a loss that has another form than it had when it was checked."""
    before = "was not there" if forms is None else f"had {len(forms)} terms"
    unread = sum(one.weight is None for one in found)
    now = f"has {len(found)}" + (f", of which {unread} cannot be read" if unread else "")
    said = InvalidInputError(
        f"loss {name!r} {before} when it was checked, and now {now}; return the same form in every micro-batch (a term "
        "of 0 where nothing counts), a (sum, weight) pair, or pass loss_reduction="
    )
    return NotCheckedError(said)


def _share_text(number: Path) -> str:
    return (
        f"{spelled(number)} of a batch, which the loss is divided by, is no count of the batch, and a window holds a "
        "part of that batch: the part is given its share by samples; a target batch that is a multiple of the "
        "loader's batch size avoids it"
    )


def scale_text(number: Path) -> str:
    """Return the warning about a number of the batch that divides the loss and is no count."""
    return (
        f"{spelled(number)} differs between the loader's batches and divides the loss; it is taken for a scale and not "
        "for a count, since it counts nothing in its batch"
    )


def _unlike_text(name: str) -> str:
    return (
        f"loss {name!r} was a sum, divided by one number, when it was checked, and is divided by unlike numbers in the "
        "micro-batches of a window, which are added all the same: its gradient may differ from the whole batch's; "
        "return a (sum, weight) pair"
    )


def _above_text(name: str) -> str:
    return (
        f"loss {name!r} divides by more in a micro-batch than the batch counts there, as max(8, n) does where n is "
        "small: such micro-batches then count too much; return the (sum, weight) pair with n itself"
    )


def _clamp_text(name: str) -> str:
    return (
        f"loss {name!r} divides by exactly 1 in a micro-batch, as max(1, n) does where n is 0: such micro-batches then "
        "count too much; return the (sum, weight) pair with n itself"
    )
