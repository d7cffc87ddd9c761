"""What is known of every loss: by the arguments, by the type of a loss, by what it states, and by checks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autoaccum._loss.loss_warnings import LossWarnings
from autoaccum._loss.summands import ADDED, STATED, Known, Reduction, Source, in_words, merged, narrowed
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.summands import SummandKey

# After this many inconclusive checks in a row, check only when due.
_MOST_INCOMPLETE = 4
# So often evaluations ask for another check.
_MOST_ASKED = 8
# So often a window begins again with a check: of another function, and of samples whose divisors are unlike.
_MOST_ASKED_IN_ONE = 2
# After this many windows in a row whose weights were predicted wrong, windows run forward first, to learn them.
_MOST_FAILURES = 3


class RecheckWindow(Exception):  # noqa: N818 - it is no error of the user's
    """A loss is not what is known of it: the window begins again with a check of the loss.

    Args:
        error: For the user, if the check has been made already.
    """

    def __init__(self, error: InvalidInputError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class Current:
    """What is known of the current window or evaluation alone.

    Attributes:
        is_tried: Whether losses were tried for the window, whatever that confirmed.
        asked: How often a check was asked for in it.
        contrasting: Samples for the two parts of that check, whose divisors are unlike parts of what is counted.
        counted_in_sums: What the evaluation has counted of what sums may be divided by.
        each_sample: The w of a sample, by summand, as the evaluation began with it.
    """

    is_tried: bool = False
    asked: int = 0
    contrasting: tuple[Sequence[int], Sequence[int]] = ((), ())
    counted_in_sums: dict[Count, float] = field(default_factory=dict)
    each_sample: dict[SummandKey, float] = field(default_factory=dict)


class LossKnowledge:
    """What is known of losses.

    Args:
        default: How every loss that is a number is put together, if the arguments say it.

    Attributes:
        default: As the argument.
        summands: The summands of each loss, by its name.
        is_torch_loss: Whether the loss is one of torch, so that only the model needs a check.
        is_models_own: Whether the model, or a framework's trainer, computes the loss.
        is_checked: Whether losses were tried on several samples, or on one where no two can be.
        is_checked_now: Whether they were checked for the current window, each confirmed or met for the first time.
        now: What is known of the current window or evaluation alone.
        failures: Windows in a row whose weights were predicted wrong.
        counted: What all ranks count in the window for which losses are tried; None in one process.
        owes_warning: Whether it is to be warned of what is known of a single sample alone.
        said: Warnings of gradients that may be wrong.
    """

    def __init__(self, default: Known | None = None) -> None:
        self.default = self._asked = default
        self.summands: dict[str, tuple[Known, ...]] = {}
        self.is_torch_loss = self.is_models_own = self.is_checked = self.is_checked_now = False
        self.now = Current()
        self.counted: Mapping[Count, float] | None = None
        self.failures = 0
        self.said = LossWarnings()
        self.owes_warning = False
        self._asked_of: list[list[Known]] = []
        self._incomplete = 0  # checks in a row that have not confirmed every loss
        self._graphs: set[tuple[Any, ...]] = set()  # the forms of graphs in windows that were checked

    @property
    def is_stated(self) -> bool:
        """Whether the arguments or the loss's type say how every loss is put together."""
        return self.default is not None or self.is_torch_loss

    @property
    def may_ask(self) -> bool:
        """Whether another check may be asked for in the window."""
        return self.now.asked < _MOST_ASKED_IN_ONE

    @property
    def is_confirmed_again(self) -> bool:
        """Whether a check of other samples, which was asked for in the window, has confirmed what is known.

        Several ranks try the same samples again.
        """
        return self.counted is None and self.is_checked_now and 0 < self.now.asked <= _MOST_ASKED_IN_ONE

    @property
    def needs_no_check(self) -> bool:
        """Whether the arguments say it, whatever a check would show."""
        return self.default is not None or (self.is_torch_loss and self._asked is not None)

    @property
    def runs_forward_first(self) -> bool:
        """Whether windows run forward first, since the weights of several summands cannot be predicted."""
        weighed = [known for _, known in self.items() if known.is_weighed]
        if not weighed or len(self.items()) == 1:
            return False
        return self.failures >= _MOST_FAILURES or not all(known.hints for known in weighed)

    @property
    def adds_all(self) -> bool:
        """Whether every loss is a sum, so that micro-batches are added."""
        return not any(known.is_weighed for _, known in self.items())

    @property
    def has_sum(self) -> bool:
        """Whether some summand is added, and not weighed."""
        return any(not known.is_weighed for _, known in self.items())

    @property
    def counts_again(self) -> bool:
        """Whether a summand that compares samples is beside a sum, so that each micro-batch reports it anew."""
        kinds = [{one.reduction for one in known} for known in self.summands.values()]
        return any({Reduction.UNCONFIRMED, Reduction.SUM} <= found for found in kinds)

    def of_unlike_divisors(self) -> list[str]:
        """Return the losses that are one number of terms with divisors of their own, as far as is known."""
        return [
            name
            for name, terms in self.summands.items()
            if len({one.is_weighed for one in terms}) > 1
            or (len(terms) > 1 and terms[0].is_weighed and not set.intersection(*(set(one.hints) for one in terms)))
        ]

    def refuse_number(self, window: Window, *, is_part: bool) -> None:
        """Reject a window that is not the batch of which a sum is divided by a number.

        Raises:
            InvalidInputError: It is not.
        """
        number = next((known.number for _, known in self.items() if known.number is not None), None)
        if number is not None and (is_part or window.carries_numbers()):
            called = repr(number[-1]) if isinstance(number[-1], str) else f"item {number[-1]}"
            raise InvalidInputError(
                f"the loss is a sum divided by {called}, a number of a batch of the loader, and the window is "
                "no such batch; return a (sum, weight) pair whose weight counts what the micro-batch holds, or, if the "
                "number is that of the whole window or a scale, pass loss_reduction='sum'"
            )

    def is_confirmed(self, name: str) -> bool:
        """Whether a check has compared parts in which something of a loss counts."""
        return name in self.summands and not any(known.is_guess for known in self.summands[name])

    def asks_again(self, hinted: list[Known]) -> bool:
        """Whether an evaluation asks for another check, which may tell which of the hints are meant: a few times."""
        self._asked_of = [*(one for one in self._asked_of if one == hinted), hinted]
        return len(self._asked_of) <= _MOST_ASKED

    def items(self) -> list[tuple[SummandKey, Known]]:
        """Return all summands, with what is known of them."""
        return [((name, n), one) for name, known in self.summands.items() for n, one in enumerate(known)]

    def begin_asking(self, *, may: bool) -> None:
        """Begin a micro-batch of an evaluation, for which checks may be asked for, or may not."""
        # More than any window has asked for: no check was, so none has confirmed anything.
        self.now.asked = 0 if may else _MOST_ASKED_IN_ONE + 1

    def ask_for_check(self) -> None:
        """Have losses tried before the next window that is cut, whatever is known of them."""
        self.is_checked, self.now.asked = False, self.now.asked + 1

    def do_without_check(self) -> None:
        """Go on with what is known, since a check does not fit; it is tried again when the next is due."""
        self.is_checked = True

    # --- what becomes known -------------------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Begin a window, for which losses have not been checked yet."""
        self.is_checked_now = self.now.is_tried = False
        self.now.asked = 0

    def begin_evaluation(self) -> None:
        """Begin an evaluation, which has counted nothing yet."""
        self.now.counted_in_sums, self.now.each_sample = {}, {}

    def each_sample(self, key: SummandKey) -> float:
        """Return the w of a sample in the last check before an evaluation: later ones may find another scale."""
        return self.now.each_sample.setdefault(key, self.summands[key[0]][key[1]].per_sample)

    def note(self, losses: Iterable[LossValue]) -> None:
        """Note which losses state their weight, and which are as the arguments say."""
        for loss in losses:
            if loss.is_reported or (loss.weight is None and self.default is None):
                continue
            before = self.summands.get(loss.name)
            if loss.weight is None:
                self.summands[loss.name] = (self.default,)  # type: ignore[assignment]
            elif before is None or before[0].source is not Source.STATED:
                if loss.is_sum and before is not None:
                    raise InvalidInputError(
                        f"loss {loss.name!r} is a (sum, weight) pair, and was a number in earlier windows; return the "
                        "same form in all of them"
                    )
                self.summands[loss.name] = (STATED,)

    def state(self, name: str, known: Known | None) -> None:
        """Take how a loss of torch is put together; None if it is none of torch's."""
        self.summands.pop(name, None)
        self.is_torch_loss = known is not None
        self.default = self._asked if known is None else None
        if known is not None:
            self.summands[name] = (known,)

    def learn(
        self,
        found: Mapping[str, Sequence[Known]],
        tried: Mapping[str, str],
        *,
        is_checked: bool = True,
        is_complete: bool = True,
    ) -> None:
        """Take what a check has shown.

        Args:
            found: The summands of each loss, by name.
            tried: The values that the check has compared, by the name of the loss, to be shown.
            is_checked: Whether they were tried on several samples.
            is_complete: Whether every loss was confirmed.

        Raises:
            InvalidInputError: A loss compares samples with each other.
        """
        for name, known in found.items():
            self._refuse(name, known, tried.get(name, ""))
        self.now.is_tried = True
        self._incomplete = 0 if is_complete else self._incomplete + 1
        self.is_checked = is_complete or self._incomplete >= _MOST_INCOMPLETE
        self.is_checked_now = is_complete or not self.summands.keys() >= found.keys()
        self.owes_warning = not is_checked and not self.summands.keys() >= found.keys()
        for name, known in found.items():
            before = self.summands.get(name)
            both = merged(known, before) if before and len(before) == len(known) else None
            if is_checked or before is None:
                self.summands[name] = tuple(known) if both is None else both
            elif both is not None:
                self.summands[name] = narrowed(before, known)
            self._warn_of(name, known)

    def _refuse(self, name: str, known: Sequence[Known], tried: str) -> None:
        """Reject a loss whose sums or weights do not add up: not in a model's own, nor beside sums alone."""
        term, others = _unconfirmed(name, known)
        if not term or (others and (Reduction.MEAN not in others or self.is_models_own)):
            return
        doubtful = next(one for one in known if one.reduction is Reduction.UNCONFIRMED)
        if doubtful.is_guess:
            raise InvalidInputError(
                f"{term} cannot be read from its graph, and no samples could be tried together that tell how "
                "micro-batches make up the whole batch's; return it by its name, as a (sum, weight) pair, or pass "
                "loss_reduction='mean' or 'sum'"
            )
        last = (
            "or return it by its name, as (term * n, n), which counts by samples"
            if others
            else "or pass loss_reduction='mean' to average micro-batches all the same, as for BatchNorm without "
            "running statistics"
        )
        if doubtful.sums_add:
            raise InvalidInputError(
                f"{term} is neither a mean nor a sum over samples: its sums over parts of a batch add up, and what "
                f"they are divided by does not{tried}, as max(k, n) does not. Return the (sum, weight) pair, with n "
                "itself as the weight"
            )
        raise InvalidInputError(
            f"{term} is neither a mean nor a sum over samples: its sums over parts of a batch do not add up"
            f"{tried}. Pass loss_scope='window' to fit, Runner or Accumulator (a loss and a forward, in place of a "
            f"closure) if it compares samples; normalise before the loss what it normalises; {last}"
        )

    def _warn_of(self, name: str, known: Sequence[Known]) -> None:
        """Warn of a summand whose sums do not add up."""
        term, others = _unconfirmed(name, known)
        if not term:
            return
        doubtful = [number for number, one in enumerate(known) if one.reduction is Reduction.UNCONFIRMED]
        adds = Reduction.SUM in others and all(known[number].adds for number in doubtful)
        self.said.warn(
            f"{term} is neither a mean nor a sum over samples, as a router's balancing loss is not: it "
            f"{'is added' if adds else 'counts by samples'} in each micro-batch, and its gradient may differ from the "
            "whole batch's"
        )
        if adds:
            self.summands[name] = tuple(ADDED if number in doubtful else one for number, one in enumerate(known))

    def replace(self, key: SummandKey, **changes: Any) -> None:
        """Change what is known of a summand."""
        name, number = key
        known = list(self.summands[name])
        known[number] = replace(known[number], **changes)
        self.summands[name] = tuple(known)

    def note_graph(self, name: str, form: tuple[Any, ...]) -> bool:
        """Note the form of a loss's graph in a window that was checked; return whether it is a known one.

        So is the first in which something counts.
        """
        built = (name, *form)
        if built not in self._graphs:
            if not self.is_checked_now and any(name == known[0] for known in self._graphs):
                return False
            self._graphs.add(built)
        return True

    def warn_if_unchecked(self, *, is_said: bool = True) -> None:
        """Warn of what is known of a single sample alone, or forget it; not before that sample has fitted."""
        owes, self.owes_warning = self.owes_warning, False
        if owes and is_said:
            self.said.warn(
                "two samples that can be joined do not fit at once, so what the loss is divided by is read from its "
                "graph and not checked; a (sum, weight) pair or loss_reduction= says it"
            )

    # --- several ranks ------------------------------------------------------------------------------------------------

    def in_short(self) -> Any:
        """Return what must be the same on all ranks, to be compared."""
        return self.failures, {
            name: [(one.reduction.name, one.source.name, min(one.hints, default=None)) for one in known]
            for name, known in sorted(self.summands.items())
        }

    def shared(self) -> tuple[Any, ...]:
        """Return everything that other ranks have to know."""
        return self.summands, self.is_checked, self.failures

    def adopt(self, of_ranks: Sequence[tuple[Any, ...]]) -> None:
        """Take what all ranks know together.

        Raises:
            InvalidInputError: They know different things of one loss.
        """
        self.is_checked_now = True
        if not self.is_torch_loss:
            self.summands = {}
        for summands, is_checked, failures in of_ranks:
            self.is_checked |= is_checked
            self.failures = max(self.failures, failures)
            for name, theirs in summands.items():
                mine = self.summands.get(name, theirs)
                both = merged(mine, theirs)
                if both is None:
                    raise InvalidInputError(
                        f"loss {name!r} is put together otherwise on some ranks: {in_words(mine)}, and "
                        f"{in_words(theirs)}; return the same form on all, a (sum, weight) pair, or pass "
                        "loss_reduction="
                    )
                self.summands[name] = both


def changed(name: str, how: str) -> InvalidInputError:
    """Return the error for a loss that is not what it was when it was checked."""
    return InvalidInputError(
        f"loss {name!r} {how}; return the same form in every micro-batch (a term of 0 where nothing counts), a (sum, "
        "weight) pair, or pass loss_reduction="
    )


def _unconfirmed(name: str, known: Sequence[Known]) -> tuple[str, set[Reduction]]:
    """Return the first summand whose sums do not add up, in words, "" if all do; and what the others are."""
    doubtful = [number for number, one in enumerate(known) if one.reduction is Reduction.UNCONFIRMED]
    if not doubtful:
        return "", set()
    term = f"term {doubtful[0] + 1} of {len(known)} of loss {name!r}" if len(known) > 1 else f"loss {name!r}"
    return term, {one.reduction for one in known} - {Reduction.UNCONFIRMED, Reduction.CONSTANT}
