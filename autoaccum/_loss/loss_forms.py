"""What is known of how the losses of micro-batches make the loss of a window: the form of each term of each loss.

The arguments say it, or the types of losses, or what a loss returns; otherwise a check on a few samples shows it.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import listed
from autoaccum._loss.terms import Form, TermForm
from autoaccum.errors import InvalidInputError, LossWarning

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autoaccum._data.nesting import Path
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.terms import Term

# The most divisors of their own that may meet in one gradient.
_MOST_DIVISORS = 3
# The relative difference of shares that single precision may cause.
_SAME_SHARE = 1e-5
# So many windows in a row are checked where a check does not confirm every loss; then those that are due.
_MOST_INCOMPLETE = 4


class Weighting(Enum):
    """How the micro-batches of a window are weighted."""

    SUM = "micro-batches are added"
    SAMPLES = "micro-batches count by their samples"
    SPLIT = "micro-batches count by split.weight"
    DIVISOR = "one divisor, known after the forward pass"
    OWN_DIVISORS = "divisors of their own"


_WEIGHTINGS = {
    Form.MEAN: Weighting.DIVISOR,
    Form.PAIR: Weighting.DIVISOR,
    Form.SUM: Weighting.SUM,
    Form.CONSTANT: Weighting.SAMPLES,
    Form.UNCONFIRMED: Weighting.SAMPLES,
}


class LossForms:
    """The forms of losses.

    Attributes:
        stated: What the arguments say of every loss; None where they say nothing, or a loss of torch says it better.
        forms: The terms of each loss, by name; of those that are numbers only if it is not said.
        is_checked: Whether losses were tried on several samples, or on one where no two can be.
        is_trusted: Whether the loss is one of torch, so that only the model needs a check.
        is_checked_now: Whether losses were checked for this window, so that what is read in it is known.
        have_diverged: Whether divisors that were proportional turned out not to be.
        counted: What all ranks count in the window for which losses are tried; None in one process.
        warnings: Warnings of gradients that may be wrong.
        tried: The values that a check has compared, by name of the loss, to be shown.
    """

    def __init__(self, asked: Weighting | None) -> None:
        self.stated = self._asked = asked
        self.forms: dict[str, tuple[TermForm, ...]] = {}
        self.is_checked = self.is_trusted = self.is_checked_now = self.have_diverged = False
        self.counted: Mapping[Count, float] | None = None
        self.warnings: list[str] = []
        self.tried: dict[str, str] = {}
        self._moving: set[str] = set()  # state that was warned of
        self._owes_warning = False
        self._incomplete = 0  # checks in a row that have not confirmed every loss

    @property
    def weighting(self) -> Weighting:
        """How micro-batches are weighted."""
        forms = self._all_forms()
        kinds = {self._weighting_of(form) for form in forms}
        means = [form for form in forms if form.form is Form.MEAN]
        have_one = not means[1:] or (share_a_divisor(means) and not self.have_diverged)
        pairs = sum(form.form is Form.PAIR for form in forms)
        if pairs + bool(means) > 1 or not have_one or len(kinds) > 1:
            return Weighting.OWN_DIVISORS
        return kinds.pop() if kinds else self.stated or Weighting.SAMPLES

    def _weighting_of(self, form: TermForm) -> Weighting:
        if form.form is Form.VECTOR:
            return Weighting.SUM if self.stated is Weighting.SUM else Weighting.SAMPLES
        if self.stated is not None and form.form is not Form.PAIR:
            return self.stated
        return _WEIGHTINGS[form.form]

    def _all_forms(self) -> list[TermForm]:
        return [form for forms in self.forms.values() for form in forms]

    @property
    def knows_all(self) -> bool:
        """Whether it is known how every loss weighs micro-batches."""
        return self.stated is not None or self.is_trusted

    @property
    def are_weighed_unread(self) -> bool:
        """Whether micro-batches are weighed without the divisors of losses, which may get other forms than checked."""
        return not self.knows_all and self.weighting in (Weighting.SUM, Weighting.SAMPLES)

    @property
    def needs_no_check(self) -> bool:
        """Whether the arguments say how micro-batches are put together, whatever a check would show."""
        return self.stated is not None or (self.is_trusted and self._asked in (Weighting.SUM, Weighting.SAMPLES))

    def is_vector(self, name: str) -> bool:
        """Whether a loss is one for each sample."""
        return name in self.forms and self.forms[name][0].form is Form.VECTOR

    @property
    def mixes_pairs(self) -> bool:
        """Whether one of several losses with divisors of their own is a (sum, weight) pair."""
        return any(form.form is Form.PAIR for form in self._all_forms()) and self.weighting is Weighting.OWN_DIVISORS

    @property
    def are_read(self) -> bool:
        """Whether factors depend on nothing that is counted in the batch."""
        return (
            self.weighting not in (Weighting.OWN_DIVISORS, Weighting.SPLIT)
            and not self._unread()
            and self._number is None
        )

    @property
    def _number(self) -> Path | None:
        """Where each batch carries the number that a sum is divided by; None if there is none."""
        return next((form.number for form in self._all_forms() if form.number is not None), None)

    def _unread(self) -> list[TermForm]:
        """Return the means whose weights are counted in the batch, since no graph says them."""
        return [form for form in self._all_forms() if form.form is Form.MEAN and not form.is_read]

    # --- what becomes known -------------------------------------------------------------------------------------------

    def note(self, terms: Sequence[Term]) -> None:
        """Note which losses are pairs, which are losses of each sample, and which are what the arguments say."""
        for term in terms:
            if term.is_reported or (term.over is None and self.stated is None):
                continue
            if term.over is None:
                self.forms[term.name] = (TermForm(Form.SUM if self.stated is Weighting.SUM else Form.UNCONFIRMED),)
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
        """Take the form of a loss of torch; None if it is no such loss."""
        self.forms.pop(name, None)
        self.is_trusted = form is not None
        self.stated = self._asked if form is None else None
        if form is not None:
            self.forms[name] = (form,)

    def is_as_stated(self, name: str, found: TermForm) -> bool:
        """Whether a loss of torch is put together as it says, which it is unless the model compares samples."""
        meant = self.forms[name][0].form
        return found.form in (meant, Form.CONSTANT if meant is Form.MEAN else meant)

    def warn_of_compared_samples(self, *, by_state: bool) -> None:
        """Warn of a model that compares samples, or moves `by_state` that it reads, under a loss of torch."""
        if by_state:
            self.warn(
                "the model's outputs depend on state that forward() carries from call to call (a running mean, a "
                "hidden state, a queue), which moves once for each micro-batch, so the gradient is not that of the "
                "whole batch; move it once an optimizer step, from a callback's on_step (docs/losses.md)"
            )
            return
        self.warn(
            "the model's outputs for a sample depend on the others of its micro-batch, as x - x.mean(0) in forward() "
            "makes them, so the gradient is not that of the whole batch (torch's BatchNorm modules are left out of "
            "this check)"
        )

    def warn_of_state(self, names: Iterable[str]) -> None:
        """Warn of state that forward passes move; once of each name."""
        new = sorted(set(names) - self._moving)
        self._moving |= set(new)
        if new:
            self.warn(
                f"forward() moves {listed(new, 5)}: once for each micro-batch, not once an optimizer step, and later "
                "micro-batches meet other values than the first. For the whole batch's gradient, collect in a buffer "
                "in forward() what moves them, and move them once an optimizer step, from a callback's on_step "
                "(docs/losses.md)"
            )

    def warn_of_hidden_state(self) -> None:
        """Warn of a loss that is another in a second pass over the same samples."""
        self.warn(
            "the loss of the same samples differs from pass to pass, though the attributes of modules were put back, "
            "random generators among them. If it draws from another generator, make that an attribute of the module. "
            "If it depends on state that is kept elsewhere (an object, a closure, a class, an array), that moves once "
            "for each micro-batch: keep it in a buffer, and move it once an optimizer step, from a callback's on_step"
        )

    def learn(
        self, found: Mapping[str, Sequence[TermForm]], *, is_checked: bool = True, is_complete: bool = True
    ) -> None:
        """Take what a check has shown.

        Args:
            found: The terms of each loss, by name.
            is_checked: Whether they were tried on several samples.
            is_complete: Whether every loss was confirmed.
        """
        self._incomplete = 0 if is_complete else self._incomplete + 1
        self.is_checked = is_complete or self._incomplete >= _MOST_INCOMPLETE
        self.is_checked_now = is_complete or not self.forms.keys() >= found.keys()
        known = {name: all(form.is_guess for form in forms) for name, forms in self.forms.items()}
        self._owes_warning = not is_checked and any(known.get(name, True) for name in found)
        if not is_checked:  # what is known is narrowed down
            for name in found.keys() & known.keys():
                both = _both(self.forms[name], found[name])
                if both is not None and all(form.counts for form in both):
                    self.forms[name] = both
            found = {name: own for name, own in found.items() if name not in known}
        for name, forms in found.items():
            self.forms[name] = _both(forms, self.forms.get(name, ())) or tuple(forms)
        for name, forms in found.items():
            self._refuse_or_warn(name, forms)
        self._refuse_what_is_not_counted()

    def warn_if_unchecked(self, *, is_said: bool = True) -> None:
        """Warn of what is known of a single sample alone, or forget it; not before that sample has fitted."""
        owes, self._owes_warning = self._owes_warning, False
        if owes and is_said:
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
                f"loss {name!r} {what} neither a mean nor a sum over samples{self.tried.get(name, '')}: micro-batches "
                "do not give the gradient of the whole batch. Pass loss_scope='window' to fit, Runner or Accumulator "
                "if the loss compares samples; return a (sum, weight) pair otherwise; or pass loss_reduction='mean' to "
                "average micro-batches all the same"
            )
        for number in doubtful:
            self.warn(
                f"loss {name!r}: term {number + 1} of {len(forms)} is neither a mean nor a sum over samples, as a "
                "router's balancing loss is not: it counts by samples in each micro-batch, and its gradient may differ "
                "from the whole batch's"
            )
        if any(form.is_clamped and not form.counts for form in forms):
            self.warn_of_clamp(name)

    def _refuse_what_is_not_counted(self) -> None:
        """Reject means with divisors of their own that no count of the batch gives before the backward pass."""
        if self.weighting is not Weighting.OWN_DIVISORS:
            return
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

    def warn_of_clamp(self, name: str) -> None:
        """Warn of a divisor that is larger in a micro-batch than what is counted there."""
        self.warn(
            f"loss {name!r} divides by more in a micro-batch than is counted there, as max(1, n) does where n is 0: "
            "such micro-batches then count too much; return the (sum, weight) pair with n itself"
        )

    def warn_of_divisor_1(self, name: str) -> None:
        """Warn of what looks like a sum, and may be a mean."""
        self.warn(
            f"loss {name!r} is divided by 1 in all samples that were tried, as by max(1, n) where n is at most 1, and "
            "is taken for a sum: micro-batches are added; return the (sum, weight) pair with n itself, or pass "
            "loss_reduction='sum'"
        )

    # --- several ranks ------------------------------------------------------------------------------------------------

    @property
    def knowledge(self) -> tuple[Any, ...]:
        """Everything that is known of losses."""
        return self.forms, self.is_checked, self.have_diverged

    def in_short(self) -> Any:
        """Return what must be the same on all ranks, to be compared."""
        forms = {
            name: [(form.form.name, form.is_read, min(form.counts, default=None)) for form in of_name]
            for name, of_name in sorted(self.forms.items())
        }
        return self.weighting.name, forms

    def adopt(self, known: Sequence[tuple[Any, ...]]) -> None:
        """Take what all ranks know together.

        Raises:
            InvalidInputError: They know different things of one loss.
        """
        self.is_checked_now = True
        if not self.is_trusted:
            self.forms = {}
        for forms, is_checked, have_diverged in known:
            self.is_checked |= is_checked
            self.have_diverged |= have_diverged
            for name, theirs in forms.items():
                mine = self.forms.get(name, theirs)
                both = _both(mine, theirs) or _surer(mine, theirs)
                if both is None:
                    raise InvalidInputError(
                        f"loss {name!r} is put together otherwise on some ranks: {_in_words(mine)}, and "
                        f"{_in_words(theirs)}; return the same form on all, a (sum, weight) pair, or pass "
                        "loss_reduction="
                    )
                self.forms[name] = both
        self._refuse_what_is_not_counted()


def share_a_divisor(forms: Sequence[TermForm]) -> bool:
    """Whether means are divided by numbers that are proportional to each other."""
    return all(len(form.shares) == len(forms[0].shares) for form in forms) and all(
        abs(one - first) <= _SAME_SHARE  # False for NaN
        for form in forms
        for one, first in zip(form.shares, forms[0].shares, strict=True)
    )


def _both(mine: Sequence[TermForm], theirs: Sequence[TermForm]) -> tuple[TermForm, ...] | None:
    """Return terms with the counts that both found; None if they are of other kinds."""
    if [one.kind for one in mine] != [one.kind for one in theirs]:
        return None
    pairs = zip(max(mine, theirs, key=_sureness), mine, theirs, strict=True)
    return tuple(replace(form, counts=_of_both(one, its), varying=_varying(one, its)) for form, one, its in pairs)


def _surer(mine: Sequence[TermForm], theirs: Sequence[TermForm]) -> tuple[TermForm, ...] | None:
    """Return those forms of a loss that are better known; None if both are known as well."""
    sure, its = _sureness(mine), _sureness(theirs)
    return None if sure == its else tuple(mine if sure > its else theirs)


def _sureness(forms: Iterable[TermForm]) -> int:
    """Return 2 for forms that a check has confirmed, 1 for guesses, 0 for those by samples in which nothing counts."""
    return min((0 if form.is_of_nothing else 1 if form.is_guess else 2 for form in forms), default=0)


def _of_both(mine: TermForm, theirs: TermForm) -> Mapping[Count, float]:
    if mine.is_of_nothing != theirs.is_of_nothing:
        return theirs.counts if mine.is_of_nothing else mine.counts
    return {count: each for count, each in mine.counts.items() if count in theirs.counts}


def _varying(mine: TermForm, theirs: TermForm) -> frozenset[Count]:
    """Return the counts that are not the same part of the divisor in both."""
    pairs = {count: (each, theirs.counts[count]) for count, each in mine.counts.items() if count in theirs.counts}
    found = {count for count, (each, its) in pairs.items() if abs(each - its) > _SAME_SHARE * each}
    return mine.varying | theirs.varying | found


def _in_words(forms: Sequence[TermForm]) -> str:
    return " + ".join(form.form.value for form in forms)
