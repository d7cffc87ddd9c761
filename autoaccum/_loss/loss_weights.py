"""Weights micro-batches within the loss of their window, by what a check has shown and the graph of each loss says.

What a mean is divided by is known after its forward pass. A micro-batch therefore runs backward with its weight over a
provisional total, and gradients and losses are multiplied by the quotient once at the end of the window. Only where
several divisors meet in one gradient are they counted before, in the entries of the batch that a check has matched.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._loss.batch_counts import counts_of, in_words
from autoaccum._loss.graph_reader import read
from autoaccum._loss.loss_check import Form, TermForm, share_a_divisor
from autoaccum._loss.weighting import Over
from autoaccum.errors import InvalidInputError, LossWarning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.graph_reader import ReadTerm
    from autoaccum._loss.terms import Term

# The most divisors of their own that may meet in one gradient.
_MOST_DIVISORS = 3
# Relative differences of counts in double precision, and of what is read in single precision.
_SAME_COUNT, _SAME_WEIGHT = 1e-9, 1e-5
# Differences from 1 that are rounding in double precision: gradients are not multiplied by them.
_ROUNDING = 1e-14
# The total of a window's samples, among the totals of its divisors.
SAMPLES = ("", 0)
# A term of a loss: the name of the loss, and the term's number.
Slot = tuple[str, int]


class Common(Enum):
    """What all losses of a window have in common."""

    SUM = "micro-batches are added"
    SAMPLES = "micro-batches count by their samples"
    SPLIT = "micro-batches count by split.weight"
    DIVISOR = "one divisor, known after the forward pass"
    NOTHING = "divisors of their own"


@dataclass(slots=True)
class Factors:
    """The factors of the losses of one micro-batch, with which those of a window add up to its loss.

    Attributes:
        alone: Whether the micro-batch is the whole window, so that every loss is as it is.
        usual: For a loss that counts by samples.
        provisional: For what is summed in a loss that is divided by its weight: one over the provisional total.
        weight: What a loss is divided by if its graph does not say so; None if it does.
        pairs: For the sums of (sum, weight) pairs whose total is known, by name.
        terms: For each term of a loss that has divisors of its own, by name.
    """

    alone: bool = False
    usual: float = 1.0
    provisional: float = 1.0
    weight: float | None = None
    pairs: dict[str, float] = field(default_factory=dict)
    terms: dict[str, list[float]] = field(default_factory=dict)

    def times(self, number: float) -> Factors:
        """Return these factors multiplied by a number."""
        pairs = {name: factor * number for name, factor in self.pairs.items()}
        terms = {name: [factor * number for factor in factors] for name, factors in self.terms.items()}
        return Factors(
            self.alone, self.usual * number, self.provisional * number, self.weight, pairs, terms
        )


class LossWeights:
    """What is known of how the losses of micro-batches make the loss of a window.

    Args:
        said: What the arguments say of every loss that is a number; None to find it out.

    Attributes:
        forms: The terms of each loss that is a number, by name.
        is_checked: Whether losses were tried on a few samples.
        warnings: What was said of gradients that may be wrong.
    """

    def __init__(self, said: Common | None) -> None:
        self.said = said
        self.forms: dict[str, tuple[TermForm, ...]] = {}
        self.pairs: dict[str, float] = {}  # names of (sum, weight) pairs, and their weight a sample
        self.others: set[str] = set()  # names of losses for each sample
        self.is_checked = False
        self.warnings: list[str] = []
        self._clamped: list[tuple[str, Tensor]] = []
        self._compared: list[tuple[str, float, Tensor]] = []

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def common(self) -> Common:
        """What all losses have in common."""
        forms = [] if self.said is not None else [form for of_name in self.forms.values() for form in of_name]
        kinds: set[Common] = set()
        if self.forms and self.said is not None:
            kinds.add(self.said)
        if self.others:
            kinds.add(Common.SUM if self.said is Common.SUM else Common.SAMPLES)
        if self.pairs:
            kinds.add(Common.DIVISOR if len(self.pairs) == 1 else Common.NOTHING)
        means = [form for form in forms if form.form is Form.MEAN]
        if means:
            kinds.add(Common.DIVISOR if share_a_divisor(means) and not self.pairs else Common.NOTHING)
        if any(form.form is Form.SUM for form in forms):
            kinds.add(Common.SUM)
        if any(form.is_weighted_by_samples for form in forms):
            kinds.add(Common.SAMPLES)
        if not kinds:
            return self.said or Common.SAMPLES
        return kinds.pop() if len(kinds) == 1 else Common.NOTHING

    def note(self, terms: Sequence[Term]) -> None:
        """Note which losses are pairs and which are losses of each sample."""
        for term in terms:
            if term.is_reported:
                continue
            if term.over is Over.VECTOR:
                self.others.add(term.name)
            elif term.over is Over.PAIR:
                if term.name in self.forms:
                    raise InvalidInputError(
                        f"loss {term.name!r} is a (sum, weight) pair, and was a number in earlier windows; return the "
                        "same form in all of them"
                    )
                self.pairs.setdefault(term.name, 1.0)

    def learn(self, found: Mapping[str, Sequence[TermForm]]) -> None:
        """Take what a check has shown.

        Raises:
            InvalidInputError: Losses cannot be put together from micro-batches.
        """
        for name, forms in found.items():
            self.forms[name] = tuple(forms)
        self.is_checked = True
        self._refuse_what_is_not_counted()

    def _refuse_what_is_not_counted(self) -> None:
        if self.common is not Common.NOTHING:
            return
        means = [(name, form) for name, forms in self.forms.items() for form in forms if form.form is Form.MEAN]
        divisors: list[TermForm] = []
        for name, form in means:
            if not any(share_a_divisor([form, other]) for other in divisors):
                divisors.append(form)
            if not form.counts:
                raise InvalidInputError(
                    f"loss {name!r} has a mean beside terms that are divided otherwise, and what it is divided by is "
                    "no count of the batch, so its total over a window is not known before the backward pass; return "
                    "its terms by name, {'a': (sum, weight), 'b': (sum, weight)}, or pass loss_reduction='mean'"
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

    # --- before a window ----------------------------------------------------------------------------------------------

    def is_ambiguous(self, window: Window, sizes: Sequence[int]) -> frozenset[Count]:
        """Return counts which fitted all samples so far, of which only some can be right in this window."""
        for form in self._counted():
            if len(form.counts) > 1 and len(sizes) > 1:
                shares = [_shares(count, self._counts(window, sizes, frozenset(form.counts))) for count in form.counts]
                if any(not _alike(one, shares[0]) for one in shares):
                    return frozenset(form.counts)
        return frozenset()

    def _counted(self) -> list[TermForm]:
        """Return the means whose weights are counted in the batch."""
        is_mixed = self.common is Common.NOTHING
        forms = [form for of_name in self.forms.values() for form in of_name if form.form is Form.MEAN]
        return [form for form in forms if is_mixed or not form.is_read] if self.said is None else []

    @staticmethod
    def _counts(window: Window, sizes: Sequence[int], wanted: frozenset[Count]) -> list[dict[Count, float]]:
        stops = list(accumulate(sizes))
        return [counts_of(window, stop - size, stop, wanted) for size, stop in zip(sizes, stops, strict=True)]

    def totals(self, window: Window) -> dict[Slot, float]:
        """Return what each term with a divisor of its own is divided by in a window, as the batch counts it."""
        found: dict[Slot, float] = {SAMPLES: float(window.samples)}
        for name, forms in self.forms.items():
            for number, form in enumerate(forms):
                if form.form is Form.MEAN and window.samples:
                    count = min(form.counts)
                    found[name, number] = counts_of(window, 0, window.samples, frozenset([count]))[count]
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
        if len(sizes) == 1 and not is_part:
            return [Factors(alone=True)]
        common = self.common
        samples = window.samples if totals is None else totals[SAMPLES]
        if common is Common.SUM:
            return [Factors() for _ in sizes]
        factors = [Factors(usual=size / samples) for size in sizes]
        if common is Common.SPLIT:
            stops = list(accumulate(sizes))
            weights = [window.weight(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
            total = sum(weights)
            if not total:
                raise nothing_counts("split.weight(batch) is 0", len(sizes))
            return [Factors(usual=weight / total) for weight in weights]
        if common is Common.DIVISOR:
            provisional = 1.0 / self.provisional_total(window.samples)
            for one in factors:
                one.provisional = provisional
            if unread := [form for form in self._counted() if not form.is_read]:
                count = min(unread[0].counts)
                for one, counted in zip(factors, self._counts(window, sizes, frozenset([count])), strict=True):
                    one.weight = counted[count]
        if common is Common.NOTHING:
            self._weigh_each_term(factors, window, sizes, totals or self.totals(window))
        return factors

    def provisional_total(self, samples: int) -> float:
        """Return about what losses with one divisor are divided by, for a number of samples; never 0."""
        forms = [form for of_name in self.forms.values() for form in of_name if form.form is Form.MEAN]
        each = forms[0].per_sample if forms else next(iter(self.pairs.values()), 1.0)
        return samples * each if math.isfinite(each) and each > 0 else float(samples)

    def _weigh_each_term(
        self, factors: Sequence[Factors], window: Window, sizes: Sequence[int], totals: Mapping[Slot, float]
    ) -> None:
        for name, forms in self.forms.items():
            for number, form in enumerate(forms):
                if form.form is Form.MEAN:
                    count = min(form.counts)
                    counted = [one[count] for one in self._counts(window, sizes, frozenset([count]))]
                    total = totals[name, number]
                    if not total:
                        raise nothing_counts(f"nothing counts ({in_words(count)})", len(sizes))
                    own = [one / total for one in counted]
                else:
                    own = [1.0 if form.form is Form.SUM else one.usual for one in factors]
                for one, factor in zip(factors, own, strict=True):
                    one.terms.setdefault(name, []).append(factor)

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
        name, value = term.name, term.value
        if term.over is Over.PAIR:
            if name in factors.pairs:
                return value * factors.pairs[name]
            assert term.weight is not None
            return value / term.weight if factors.alone else value * factors.provisional
        if factors.alone:
            return value
        if name in factors.terms:
            return self._weigh_terms(term, factors)
        if term.over is Over.VECTOR or self.common is not Common.DIVISOR:
            return value if factors.usual == 1.0 else value * factors.usual
        term.weight = self._weight_of(term, samples) if factors.weight is None else factors.weight
        if not isinstance(term.weight, Tensor) and not term.weight:
            return None
        return value * (term.weight * factors.provisional)

    def _weight_of(self, term: Term, samples: int) -> float | Tensor:
        """Return what a loss is divided by, as its graph says."""
        read_terms = read(term.value)
        first = read_terms[0]
        forms = self.forms.get(term.name)
        if forms is None or len(forms) != len(read_terms) or first.weight is None:
            raise changed(term.name, forms, read_terms)
        weight = first.weight
        if first.divides:
            self._watch_clamps(term.name, first, samples)
            if isinstance(weight, Tensor) and not float(weight):  # its gradient would be NaN; this waits for the device
                return 0.0
        if isinstance(weight, Tensor):
            return weight if weight.dtype is not torch.float64 else weight.detach()
        if not math.isfinite(weight):
            raise InvalidInputError(
                f"loss {term.name!r} divides by {weight}; look for a division by 0, or NaN among the weights"
            )
        return weight

    def _watch_clamps(self, name: str, term: ReadTerm, samples: int) -> None:
        if term.divisor_of_one and samples > 1:
            self.warn(_clamp_text(name))

    def _weigh_terms(self, term: Term, factors: Factors) -> Tensor:
        """Return a loss whose terms have factors of their own, which its backward pass applies."""
        own, share = factors.terms[term.name], factors.usual
        if len(own) == 1:
            return term.value * own[0]
        found = read(term.value)
        if len(found) != len(own):
            raise changed(term.name, self.forms.get(term.name), found)
        for one, factor, form in zip(found, own, self.forms[term.name], strict=True):
            if form.form is Form.MEAN and form.is_read and isinstance(one.weight, float):
                self._compare(term.name, one.weight, form)
            if factor != share:
                one.node.register_prehook(_scaling(factor / share))
        return term.value * share

    def _compare(self, name: str, weight: float, form: TermForm) -> None:
        """Compare what a term was divided by with what the batch counts. (Counts are noted by `factors`.)"""


def _scaling(factor: float) -> Any:
    def scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if one is None else one * factor for one in gradients)

    return scaled


def _shares(count: Count, counted: Sequence[Mapping[Count, float]]) -> list[float]:
    total = sum(one[count] for one in counted)
    return [one[count] / total if total else 0.0 for one in counted]


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(mine - its) <= _SAME_COUNT for mine, its in zip(one, other, strict=True))


def quotient(provisional: float, total: float | Tensor) -> float | Tensor:
    """Return what gradients and losses are multiplied by at the end of a window; 1.0 if that makes no difference."""
    if isinstance(total, Tensor):
        return provisional / total
    found = provisional / total
    return 1.0 if abs(found - 1.0) <= _ROUNDING else found


def nothing_counts(why: str, micro_batches: int) -> InvalidInputError:
    """Return the error for a window in which nothing counts."""
    return InvalidInputError(
        f"{why} in this window of {micro_batches} micro-batches, so the mean loss over it does not exist; leave such "
        "samples out"
    )


def changed(name: str, forms: Sequence[TermForm] | None, found: Sequence[ReadTerm]) -> InvalidInputError:
    """Return the error for a loss that has another form than it had when it was checked."""
    before = "was not there" if forms is None else f"had {len(forms)} terms"
    return InvalidInputError(
        f"loss {name!r} {before} when it was checked, and now has {len(found)}, of which "
        f"{sum(one.weight is None for one in found)} cannot be read; return the same form in every micro-batch (a term "
        "of 0 where nothing counts), a (sum, weight) pair, or pass loss_reduction="
    )


def _clamp_text(name: str) -> str:
    return (
        f"loss {name!r} divides by exactly 1 in a micro-batch of several samples, as max(1, n) does where n is 0: such "
        "micro-batches then count too much; return the (sum, weight) pair with n itself"
    )
