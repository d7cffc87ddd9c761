"""Infers the reductions of an objective's losses by running it on a few samples, without side effects.

If the cut of a window makes the reduction of an unknown loss matter, a few samples of the window are run through model
and loss in evaluation mode and without gradients. `reduction_candidates` evaluates the results.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autoaccum import _oom
from autoaccum._loss import unknown_loss
from autoaccum._loss.batch_numbers import DifferingNumbers, divisor_of
from autoaccum._loss.counting import constants_of, tallies_of_each, target_tensors
from autoaccum._loss.linearity import Bends, slopes_of
from autoaccum._loss.nonlinear_terms import rest_of
from autoaccum._loss.observation import Attempt, Run, Way
from autoaccum._loss.reduction_candidates import Question, question_of, telling_split
from autoaccum._loss.unknown_loss import randomness
from autoaccum._loss.unusual_samples import choose_repeated, choose_unusual
from autoaccum._loss.weighting import Over, Weighting
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from autoaccum._data.batches import Window
    from autoaccum._loss.observation import Observed, Rows
    from autoaccum._loss.reduction_candidates import Evidence
    from autoaccum._system.notices import Notices

# Attempts per window and in total: an open question is postponed to a later window, when the model has changed, and
# finally given up.
_AT_ONCE = 8
_IN_ALL = 24
# Times in a row that memory may run out in an attempt, fewer than a window is tried again
# (`_TRIES_TO_WEIGH` in _engine/recovery.py).
_LACKS = 3
# Samples per attempt: enough to show many classes, few enough (half a micro-batch, but not below the minimum) to fit
# where a micro-batch fits with its gradients.
_LEAST = 3
_MOST = 16
_PAIR = 2
# Samples of each of two parts whose gradients are compared: of a reduction that is known beforehand, a fourth of those
# that fit at once, since the comparison may run in float64.
_COMPARED = 2
_OF_THOSE_THAT_FIT = 4
# Other samples that an unusual candidate is tried on.
_CONFIRMATIONS = 4
# Times that a loss is asked for its slopes, for which memory may be lacking.
_SLOPES_ASKED = 3
# The number of splits if each costs only the loss and no forward pass.
_SPLITS = 8
# The number of candidates for the first split, which decides most, and for each of the others.
_DRAWS = 32
_FURTHER_DRAWS = 4
# Elements of targets, and the fewest samples, to search for informative samples.
_LOOKED_AT = 2**20
_LOOKED_AT_SAMPLES = 32
# Whether a model runs under autocast, and with copies in float32 of what it has in half precision.
_HOWS = ((False, True), (False, False), (True, False))
# The most kinds of micro-batches with all targets equal that are tested for a NaN loss.
_VOIDS = 256

_EXACT = "a torch.nn loss, a (sum, weight) pair or loss_reduction="
_BY_SAMPLES = f"micro-batches are weighted by their samples. Use {_EXACT} for exact weights"


class Knowledge(NamedTuple):
    """What is known of the reduction of a loss.

    Attributes:
        how: Its weighting.
        ruled_out: The number of weightings that were ruled out.
        is_open: Whether others are still possible.
    """

    how: Weighting
    ruled_out: int
    is_open: bool


class Settler:
    """Infers and keeps the reductions of an objective's losses.

    Args:
        takes_outputs: Whether the loss is a function of outputs, so that it can be called on some of their rows alone.
        said: The reduction of every loss by `loss_reduction=`; None to infer it.
        notices: Reports inferred reductions.

    Attributes:
        known: The weighting of each loss, by name.
        is_settled: Whether `settle` has nothing left to infer in any window.
        windows: The windows so far.
        put_off: A notice that the losses could not be run, for `say_put_off`; None if there is none.
        doubts: What was said of losses whose gradient may differ from that of the whole batch.
    """

    def __init__(self, *, takes_outputs: bool, said: Weighting | None, notices: Notices) -> None:
        self.known: dict[str, Weighting] = {}
        self.is_settled = False
        self.put_off: str | None = None
        self._said = said
        self._notices = notices
        self._questions: dict[str, Question] = {}
        self._ruled_out: dict[str, int] = {}
        self._unchecked: set[str] = set()
        self._voids: dict[frozenset[tuple[str, float]], set[str]] = {}
        # The first way that works is used from then on. The loss of outputs in float64 is cheap, and exact whatever the
        # model's precision; a function with its own tensors may need single precision.
        types = (torch.float64, torch.float32, None) if takes_outputs else (None,)
        self._ways = [Way(outputs, *how) for how in _HOWS for outputs in types]
        self._lacks = 0  # times in a row that memory has run out
        self._most = _MOST  # samples that memory has not run out for
        self.doubts: list[str] = []
        self._bends = Bends(self._doubt)
        self._numbers = DifferingNumbers(notices)
        self.windows = self._compared_in = 0
        self._inferred: set[str] = set()  # losses whose reduction was inferred, and is compared again
        self._contradicted: set[str] = set()  # losses that a later window has contradicted, which is said once
        self._evidence: dict[str, Evidence] = {}  # by loss, before the present attempt

    @property
    def knowledge(self) -> dict[str, Knowledge]:
        """What is known of each loss."""
        return {
            name: Knowledge(how, self._ruled_out.get(name, 0), name in self._questions)
            for name, how in self.known.items()
        }

    @property
    def has_questions(self) -> bool:
        """Whether anything is still to be inferred."""
        return bool(self._questions or self._unchecked or not self.known)

    def adopt(self, known: Mapping[str, Knowledge]) -> None:
        """Adopt what another process of the same training has found; a question open there is open here too."""
        for name, (_, _, is_open) in known.items():
            if is_open and self._said is None:
                self._questions.setdefault(name, Question())
        self.known = {**self.known, **{name: how for name, (how, *_) in known.items()}}
        self.is_settled = False

    def open_shares(self, window: Window) -> bytes | None:
        """Return how much a part of a window would weigh, for each weighting of a loss that is still possible.

        If these are the same on all ranks, the ranks' shares of the window are the same for every weighting.

        Returns:
            A digest; b"" if it matters whatever the other parts weigh, and None if nothing is open.
        """
        if self._said is not None or not self._ways or not (self.has_questions and window.samples):
            return None
        if not self.known:
            return b""
        pieces = [target_tensors(part) for part in window]
        found: list[tuple[str, Any]] = []
        for name, question in sorted(self._questions.items()):
            question.watch(pieces)
            if len(question.candidates) > 1:
                found.append((name, question.ratios(window)))
        if any(ratios is None for _, ratios in found):
            return b""
        return hashlib.blake2b(repr(found).encode(), digest_size=8).digest() if found else None

    def forget(self, name: str) -> None:
        """Forget a loss that turned out to be a metric."""
        self.is_settled = False
        self.known = {known: how for known, how in self.known.items() if known != name}
        self._questions.pop(name, None)
        self._unchecked.discard(name)

    def settle(self, window: Window, sizes: Sequence[int], run: Run) -> None:
        """Infer the reductions of losses that are unknown and matter for this cut.

        Args:
            window: Samples to try the losses on.
            sizes: The micro-batch sizes that the window will be cut into.
            run: Runs the objective.

        Raises:
            InvalidInputError: The loss returned a pair that is not (sum, weight).
            torch.OutOfMemoryError: Memory ran out, and had not in the previous attempt.
        """
        if not run.may_widen:
            self._ways = [way for way in self._ways if not way.widens]
        if self.compares_again and max(window.groups()) > 1 and len(sizes) > 1 and self._ways:
            self._compare_again(window, run)
        asked = self._ask_all(window, sizes, run) if self.has_questions else None
        self._look_whether_it_bends(asked, window, sizes, run)
        if Over.OPAQUE in [how.over for how in self.known.values()]:
            self._look_for_voids(window, sizes, run)
        self._numbers.look(window, {how.divisor for how in self.known.values()})
        is_known = Over.OPAQUE not in [how.over for how in self.known.values()]
        self.is_settled = is_known and not self.has_questions and not self._numbers.may_differ

    @property
    def compares_again(self) -> bool:
        """Whether inferred reductions are to be compared with the present window: after 1, 3, 7, 15, ... others."""
        number = self.windows
        return bool(self._inferred) and number > max(self._compared_in, 1) and not number & (number - 1)

    def _compare_again(self, window: Window, run: Run) -> None:
        """Ask again what a loss runs over if the present window contradicts what earlier ones have shown.

        Losses may come to run over something else: with targets that did not occur before, or as they fall.
        """
        self._compared_in = self.windows
        chance = random.Random(self.windows)  # noqa: S311 - no secret, and the same in every run
        sample, splits = choose_unusual(window, _MOST, chance)
        attempt = Attempt(sample, splits, [], window, run, run.in_effect(self._ways[0], sample))
        attempt = attempt._replace(observed=attempt.more(splits))
        for name in sorted(self._inferred):
            how = self.known.get(name)
            if how is None or how.over is Over.OPAQUE or how.divisor is not None:
                self._inferred.discard(name)
                continue
            splits_of = attempt.splits_of(name)
            if all(split.misfit(how) < math.inf for split in splits_of) or randomness(name, attempt) is not None:
                continue
            question = question_of(window)
            question.learn(splits_of)
            self._doubt(
                f"loss {name!r}: earlier windows showed {how.description}, which window {self.windows} contradicts (a "
                "count that changes with the targets, or samples chosen by their loss), so gradients may have differed "
                "from those of whole batches, and it is inferred again. loss_scope='window' is exact for any "
                "deterministic function of per-sample outputs, as are (sum, weight) pairs"
            )
            self._contradicted.add(name)
            self._inferred.discard(name)
            self.forget(name)
            self._questions[name] = question

    def say_put_off(self) -> None:
        """Say why the losses could not be run, now that they have run in training: before, it could be the error."""
        if self.put_off is not None:
            self._notices.say(self.put_off)
            self.put_off = None

    def _ask_all(self, window: Window, sizes: Sequence[int], run: Run) -> Attempt | None:
        """Ask as long as it tells something; return the last attempt, if there was one."""
        chance, in_vain, last = None, 0, None
        while self._ways and in_vain < _AT_ONCE and (question := self._next_question(window, sizes, run)) is not None:
            chance = chance or random.Random(window.samples)  # noqa: S311 - no secret, and the same in every run
            before = len(question.candidates)
            last = self._ask(question, window, window.fits_any(sizes), run, chance)
            in_vain += len(question.candidates) == before
        if max(window.groups()) == 1 < window.samples:
            self._say_what_cannot_be_joined(window, sizes)
        elif chance is not None:
            # Pieces of other lengths cannot be joined with these, and later windows may have no others.
            is_stuck = in_vain >= _AT_ONCE and len(window.groups()) > 1
            self._say_what_cannot_be_told(window if is_stuck else None, sizes)
        return last

    @property
    def has_compared(self) -> bool:
        """Whether gradients of a few samples and of their parts were compared, or cannot be."""
        return self._bends.is_done

    def _look_whether_it_bends(self, asked: Attempt | None, window: Window, sizes: Sequence[int], run: Run) -> None:
        """Compare the gradient of a few samples with that of their parts, once, in a window that is cut."""
        if self._bends.is_done or len(sizes) == 1:
            return
        rows = _COMPARED
        if asked is None:
            # A reduction that is known beforehand was not tried, nor was the memory for it; and a collator that is
            # called once for each micro-batch may keep a state of its own.
            rows = min(rows, window.fits_any(sizes) // _OF_THOSE_THAT_FIT)
            if not rows or not window.is_nested or self.has_questions or max(window.groups()) == 1:
                return
            sample, split = _some(window, 2 * rows, random.Random(window.samples))  # noqa: S311 - no secret
            way = run.in_effect(self._ways[0] if self._ways else Way(None, casts=False), sample)
            asked = Attempt(sample, [split], [], window, run, way)
        if asked.can_be_split:
            self._bends.look(asked, {name: self._checked(name) for name in self.known}, rows)

    def _checked(self, name: str) -> Weighting:
        """Return the weighting that a loss is checked for."""
        how = self.known[name]
        return Weighting(Over.SAMPLES) if how is self._said and how.over is Over.OPAQUE else how

    def _next_question(self, window: Window, sizes: Sequence[int], run: Run) -> Question | None:
        if not self.known:
            return self._first_question(window, sizes, run)
        if max(window.groups()) == 1:
            return None  # a single sample cannot be split
        if self._unchecked:
            return question_of(window)
        pieces = [target_tensors(part) for part in window]
        for question in self._questions.values():
            question.watch(pieces)
        return next((question for question in self._questions.values() if question.matters(window, sizes)), None)

    def _first_question(self, window: Window, sizes: Sequence[int], run: Run) -> Question | None:
        # Uncut, every loss is that of its window. Then it matters only whether anything counts, whether pairs seen so
        # far are (sum, weight), and whether the loss depends on a count that is not that of the window.
        doubtful = (run.objective.returns_pairs and window.samples > 1) or window.carries_counts()
        if len(sizes) > 1 or doubtful or not all(_all_count(target_tensors(part)) for part in window):
            return question_of(window)
        return None

    def _ask(self, question: Question, window: Window, largest: int, run: Run, chance: random.Random) -> Attempt | None:
        most = min(max(largest // 2, _LEAST), self._most)
        sample, splits = _telling(question, window, most, chance)
        observed, way = self._observe(sample, splits, run)
        if not observed:
            return None
        attempt = Attempt(sample, splits, observed, window, run, run.in_effect(way, sample))
        with self._all_or_nothing():
            known = dict(self.known)
            for name in observed[0].whole:
                if name not in known or name in self._questions or name in self._unchecked:
                    known[name] = self._concluded(name, attempt)
            self.known = known
        return attempt

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Conclude nothing of any loss in a block that fails, such as for lack of memory.

        What was tried already stays noted, since memory may lack for it each time.
        """
        questions = dict(self._questions)
        self._evidence = {name: question.evidence() for name, question in questions.items()}
        others = dict(self._ruled_out), set(self._unchecked), set(self._inferred)
        try:
            yield
        except BaseException:
            self._questions = {**self._questions, **questions}
            self._ruled_out, self._unchecked, self._inferred = others
            for name, evidence in self._evidence.items():
                if name in self._questions:
                    self._questions[name].put_back(evidence)
            raise
        finally:
            self._evidence = {}

    def _observe(self, sample: Window, splits: Sequence[Rows], run: Run) -> tuple[list[Observed], Way]:
        """Run the objective in the first way that works, and return it; if none does, put off a notice."""
        why, way = None, Way(None, casts=False)
        for way in tuple(self._ways):
            try:
                observed = run.observe(sample, splits, way)
            except Exception as error:
                lacks = _oom.is_oom(error) or _oom.is_too_large(error)
                if lacks and way.widens:
                    _oom.let_go(error)
                    continue  # it may fit another time
                # At first, the caller has to free memory. If it still runs out, only one or two samples fit, which is
                # no reason to stop, and the next window is asked again; nor is a model without a loss in evaluation
                # mode a reason (torchvision's detectors).
                if _oom.is_device_lost(error) or (lacks and self._lacks < _LACKS):
                    self._lacks += lacks
                    if lacks:
                        self._ask_for_less(sample.samples, way)
                    raise
                why = why or _oom.first_line(error)
                _oom.let_go(error)
                if lacks:
                    self._notices.say(
                        "memory ran out while the loss reduction was inferred, which is tried again; until it is "
                        "known, micro-batches are weighted by their samples",
                        key="lack while inferring",
                    )
                    return [], way
                self._ways.remove(way)
            else:
                self._lacks = 0
                return observed, way
        if why is not None:
            self.put_off = (
                f"the loss reduction could not be inferred in evaluation mode ({why}); micro-batches are weighted by "
                "their samples. Return a (sum, weight) pair or pass loss_reduction= for exact weights"
            )
        return [], way

    def _ask_for_less(self, samples: int, way: Way) -> None:
        """Ask with fewer samples from now on, and of two without their outputs in float64."""
        self._most = max(samples // 2, _PAIR)
        if samples <= _PAIR and way.outputs is torch.float64:
            self._ways.remove(way)

    def _concluded(self, name: str, attempt: Attempt) -> Weighting:
        observed = attempt.observed
        over, chosen = observed[0].whole[name].over, attempt.run.objective.weighting_by_default
        complete = all(one.holds(name) for one in observed)
        if chosen is not None:
            return chosen
        if over is not None:
            if over is Over.PAIR:
                self._check_pairs(name, observed if complete else (), attempt)
            return Weighting(over)
        if not complete:
            return self._said or self._unknown(name, attempt)
        question = self._questions.setdefault(name, question_of(attempt.window))
        self._evidence.setdefault(name, question.evidence())
        question.learn(attempt.splits_of(name))
        if self._said is not None and self._said.over is Over.WEIGHED:
            del self._questions[name]
            return self._said
        if self._said is not None:
            self._check_said(name, question, self._said, attempt)
            return self._said
        return self._compared(name, question, attempt)

    def _check_pairs(self, name: str, observed: Sequence[Observed], attempt: Attempt) -> None:
        try:
            seen = [one.check_pair(name) for one in observed]
        except InvalidInputError:
            if unknown_loss.randomness(name, attempt) is None:
                raise
            seen = [True]  # a collator that draws what counts: no two calls agree, so nothing can be checked
        if any(seen):
            self._unchecked.discard(name)
        else:
            self._unchecked.add(name)

    def _compared(self, name: str, question: Question, attempt: Attempt) -> Weighting:
        self._look_closer(name, question, attempt)
        self._ruled_out[name] = question.ruled_out
        if not question.candidates:
            return self._without_bent(name, attempt) or self._unknown(name, attempt)
        how = Weighting(Over.OPAQUE) if question.is_untouched else question.best
        if how.over in (Over.OPAQUE, Over.SUM):
            path = divisor_of(name, attempt, self._notices, is_sum=how.over is Over.SUM)
            if path is not None:
                self._ruled_out[name] += 1
                how = Weighting(Over.DIVIDED, divisor=path)
        if how.over is not Over.OPAQUE and (len(question.candidates) == 1 or how.divisor is not None):
            self._notices.say(f"loss {name!r} is {how.description} (inferred from a few samples)")
        if question.is_closed:
            del self._questions[name]
        if name not in self._contradicted:
            self._inferred.add(name)
        return how

    def _look_closer(self, name: str, question: Question, attempt: Attempt) -> None:
        """Compare gradients where losses are equal, and try an unusual candidate on other samples."""
        # A gradient that no candidate has is told of by `Bends`, which knows more about it.
        slopes = None
        if question.is_undecided and question.slopes_asked < _SLOPES_ASKED:
            question.slopes_asked += 1
            slopes = slopes_of(name, attempt)
        if slopes is not None and question.fits(slopes):
            question.learn([slopes])
        if not question.has_seen_repeated:
            question.has_seen_repeated = True
            self._show(question, name, attempt, choose_repeated(attempt.window))
        for number in range(_CONFIRMATIONS if question.is_doubtful else 0):  # small counts agree by chance
            chance = random.Random(number)  # noqa: S311 - no secret, and the same in every run
            self._show(
                question,
                name,
                attempt,
                choose_unusual(attempt.window, max(_LEAST, attempt.sample.samples), chance),
            )

    def _show(self, question: Question, name: str, attempt: Attempt, chosen: tuple[Window, list[Rows]] | None) -> None:
        """Compare the candidates with a loss of other samples."""
        if question.candidates and chosen is not None:
            other = attempt._replace(sample=chosen[0], splits=chosen[1])
            question.learn(other._replace(observed=other.more(other.splits)).splits_of(name))

    def _check_said(self, name: str, question: Question, said: Weighting, attempt: Attempt) -> None:
        """Say if a loss is not what `loss_reduction` says."""
        wanted = Over.SUM if said.over is Over.SUM else Over.SAMPLES
        found, then = None, "leave loss_reduction out to have it weighted by that"
        if not question.candidates:
            if unknown_loss.randomness(name, attempt) is None:
                found, then = "no mean or sum over its samples", unknown_loss.window_scope(attempt)
        elif question.is_untouched or wanted in [how.over for how in question.candidates]:
            path = divisor_of(name, attempt, self._notices, is_sum=True) if wanted is Over.SUM else None
            found = None if path is None else Weighting(Over.DIVIDED, divisor=path).description
        else:
            found = question.best.description
        if found is not None:
            self._bends.give_up()
            self._doubt(
                f"loss {name!r}: loss_reduction={'sum' if wanted is Over.SUM else 'mean'!r} is taken at its word, but "
                f"a few samples and parts of them show {found}, so the gradient may differ from that of the whole "
                f"batch; {then}"
            )
        if found is not None or question.is_closed or not question.candidates:
            self._questions.pop(name, None)

    def _without_bent(self, name: str, attempt: Attempt) -> Weighting | None:
        """Return the weighting of a loss but for a term that bends it, of which `Bends` says how far."""
        rest = rest_of(name, attempt)
        if rest is None:
            return None
        how = rest.how
        if how.over is Over.SUM:
            path = divisor_of(name, attempt, self._notices, is_sum=True, less=rest.term)
            how = how if path is None else Weighting(Over.DIVIDED, divisor=path)
        self._questions.pop(name, None)
        self._notices.say(f"loss {name!r} is {how.description}, but for a term (inferred from a few samples)")
        return how

    def _unknown(self, name: str, attempt: Attempt) -> Weighting:
        self._questions.pop(name, None)
        self._doubt(
            f"loss {name!r}: its reduction could not be inferred, so micro-batches are weighted by their samples, and "
            f"the gradient may differ from that of the whole batch. {unknown_loss.advice(name, attempt)}"
        )
        return Weighting(Over.OPAQUE)

    def _doubt(self, text: str) -> None:
        self.doubts.append(text)
        self._notices.say(text)

    def _say_what_cannot_be_joined(self, window: Window, sizes: Sequence[int]) -> None:
        pieces = [target_tensors(part) for part in window]
        for name, question in self._questions.items():
            question.watch(pieces)
            if self._said is None and question.matters(window, sizes):
                what = (
                    _BY_SAMPLES
                    if question.is_untouched
                    else f"assumed to be {self.known[name].description}. Use {_EXACT} for exact weights"
                )
                self._notices.say(
                    f"loss {name!r}: no two samples of a window can be batched together, so its reduction is not known "
                    f"yet; {what}"
                )

    def _say_what_cannot_be_told(self, stuck: Window | None, sizes: Sequence[int]) -> None:
        for name, question in list(self._questions.items()):
            is_given_up = question.in_vain >= _IN_ALL
            if is_given_up:
                del self._questions[name]
            is_stuck = stuck is not None and question.matters(stuck, sizes)
            if self._said is not None:
                continue
            if question.is_untouched and question.in_vain >= _AT_ONCE:
                self._notices.say(
                    f"loss {name!r} is not finite for any few samples of a window, so its reduction is not known; "
                    f"{_BY_SAMPLES}"
                )
            elif is_given_up or is_stuck:
                self._notices.say(
                    f"loss {name!r}: the samples seen so far do not determine its reduction; assumed to be "
                    f"{self.known[name].description}. Use {_EXACT} for exact weights"
                )

    def _look_for_voids(self, window: Window, sizes: Sequence[int], run: Run) -> None:
        """Find the micro-batches for which an unknown loss is NaN because its mean is over nothing.

        In them all targets are equal, since none counts. One sample of each kind is tried.
        """
        start = 0
        for size in sizes:
            alike = constants_of(window, start, start + size)
            if alike and alike not in self._voids and len(self._voids) < _VOIDS:
                observed, _ = self._observe(window.part(start, start + 1), [[[0]]], run)
                terms = observed[0].whole.items() if observed else ()
                self._voids[alike] = {name for name, term in terms if not math.isfinite(float(term.value))}
            start += size
        for name in sorted(set().union(*self._voids.values())):  # also where the loss was asked again since
            self._leave_out(name)

    def _leave_out(self, name: str) -> None:
        if name not in self.known or self.known[name].over is not Over.OPAQUE:
            return
        void = frozenset(alike for alike, names in self._voids.items() if name in names)
        self.known[name] = Weighting(Over.OPAQUE, void=void)
        self._notices.say(
            f"loss {name!r} is NaN when all targets are ignored; micro-batches of only such samples are left out",
            key=f"void {name}",
        )


def _telling(question: Question, window: Window, size: int, chance: random.Random) -> tuple[Any, list[Rows]]:
    """Choose at most `size` samples of one batch that distinguish the candidates, and ways to split them."""
    best = question.candidates.index(question.best)
    looks = (_look(question, window, start, samples, chance) for start, samples in _groups_of(window) if samples > 1)
    first = look = next(looks, None)
    if first is None:
        start, _ = _groups_of(window)[0]
        return window.part(start, start + 1), [[[0]]]
    # Where nothing counts, a loss is a mean over nothing, and tells nothing; other samples may.
    while look is not None and int((look[1][best] > 0).sum()) < _PAIR:
        look = next(looks, None)
    start, weights = look or first
    sums = [how.over is Over.SUM for how in question.candidates]
    split = telling_split(weights, best, size, chance, draws=_DRAWS, sums=sums)
    rows = [row for part in split for row in part]
    sample = window.chosen(start + row for row in rows)
    of_those = weights[:, rows]
    further = [telling_split(of_those, best, size, chance, draws=_FURTHER_DRAWS, sums=sums) for _ in range(_SPLITS - 1)]
    return sample, [[list(range(len(split[0]))), list(range(len(split[0]), len(rows)))], *further]


def _groups_of(window: Window) -> list[tuple[int, int]]:
    """Return where groups of samples that can be joined begin, and how many these are, the largest first."""
    groups = window.groups()
    starts = itertools.accumulate(groups, initial=0)
    return sorted(zip(starts, groups, strict=False), key=lambda group: -group[1])


def _look(question: Question, window: Window, start: int, samples: int, chance: random.Random) -> tuple[int, Tensor]:
    """Look at samples of a group; return the first, and what each weighs for every candidate."""
    elements = max(
        (t.numel() // max(len(t), 1) for t in target_tensors(window.cut(start, start + 1)).values()), default=1
    )
    looked_at = min(samples, max(_LOOKED_AT_SAMPLES, _LOOKED_AT // max(elements, 1)))
    start += chance.randrange(samples - looked_at + 1)
    return start, tallies_of_each(question.candidates, window, start, start + looked_at)


def _some(window: Window, most: int, chance: random.Random) -> tuple[Window, Rows]:
    """Choose some samples that can be joined, and split them into halves."""
    groups = window.groups()
    largest = max(range(len(groups)), key=groups.__getitem__)
    start, samples = sum(groups[:largest]), groups[largest]
    rows = chance.sample(range(samples), min(samples, most))
    split = [list(range(len(rows) // 2)), list(range(len(rows) // 2, len(rows)))]
    return window.chosen(start + row for row in rows), split


def _all_count(named_targets: dict[str, Tensor]) -> bool:
    return all(Weighting(Over.COUNTED).counts_all({name: targets}) for name, targets in named_targets.items())
