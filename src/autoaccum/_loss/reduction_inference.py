"""Infers the reductions of an objective's losses by running it on a few samples, without side effects.

If the cut of a window makes the reduction of an unknown loss matter, a few samples of the window are run through model
and loss in evaluation mode and without gradients. `reduction_candidates` evaluates the results.
"""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from autoaccum import _oom
from autoaccum._data.batches import chosen
from autoaccum._data.nesting import copied, map_tensors
from autoaccum._data.splits import FIRST
from autoaccum._loss.counting import constants_of, tallies_of_each, target_tensors
from autoaccum._loss.reduction_candidates import Question, Rounding, Split, rounding_of, telling_split
from autoaccum._loss.weighting import Over, Weighting, check_pair
from autoaccum._snapshot import evaluation_mode
from autoaccum._system import signals
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._data.batches import Window
    from autoaccum._loss.terms import Term
    from autoaccum._snapshot import Mark
    from autoaccum._system.notices import Notices

# The rows of the parts that a few samples are split into; a single part if there is only one sample.
Rows = list[list[int]]

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
# The number of splits if each costs only the loss and no forward pass, and the most elements of outputs in all splits.
_SPLITS = 8
_ELEMENTS = 2**25
# The number of candidates for the first split, which decides most, and for each of the others.
_DRAWS = 32
_FURTHER_DRAWS = 4
# Elements of targets, and the fewest samples, to search for informative samples.
_LOOKED_AT = 2**20
_LOOKED_AT_SAMPLES = 32
# The most kinds of micro-batches with all targets equal that are tested for a NaN loss.
_VOIDS = 256
_HALF = (torch.float16, torch.bfloat16)


class _Way(NamedTuple):
    """How the objective is run.

    Attributes:
        outputs: The type in which the loss is computed on rows of one forward pass; None runs the model on each part.
        casts: Whether the model runs under autocast.
    """

    outputs: torch.dtype | None
    casts: bool


class _Observed(NamedTuple):
    """The losses of a few samples and of the parts that they are split into, by name."""

    whole: dict[str, Term]
    parts: list[dict[str, Term]]
    batches: list[Any]
    samples: tuple[int, ...]
    in_half: bool
    widened: bool

    def holds(self, name: str) -> bool:
        """Whether the loss exists for all samples and for each part."""
        return all(name in terms for terms in (self.whole, *self.parts))

    def split(self, name: str) -> Split:
        """Return the values of one loss."""
        return Split(
            whole=float(self.whole[name].value),
            parts=tuple(float(terms[name].value) for terms in self.parts),
            named=tuple(target_tensors(batch) for batch in self.batches),
            samples=self.samples,
            rounding=self._rounding(name),
        )

    def check_pair(self, name: str) -> bool:
        """Reject a pair that cannot be (sum, weight); return whether the samples allowed a check.

        Raises:
            InvalidInputError: The pair is not (sum, weight).
        """
        whole, *parts = ((float(t[name].value), float(t[name].weight or 0.0)) for t in (self.whole, *self.parts))
        check_pair(name, whole, parts, self._rounding(name).most)
        return whole[1] != 0.0 and len(parts) > 1

    def _rounding(self, name: str) -> Rounding:
        return rounding_of(self.whole[name].value.dtype, in_half=self.in_half, widened=self.widened)


class Settler:
    """Infers and keeps the reductions of an objective's losses.

    Args:
        takes_outputs: Whether the loss is a function of outputs, so that it can be called on some of their rows alone.
        said: The reduction of every loss by `loss_reduction=`; None to infer it.
        notices: Reports inferred reductions.

    Attributes:
        known: The weighting of each loss, by name.
        is_settled: Whether `settle` has nothing left to infer in any window.
    """

    def __init__(self, *, takes_outputs: bool, said: Weighting | None, notices: Notices) -> None:
        self.known: dict[str, Weighting] = {}
        self.is_settled = False
        self._said = said
        self._notices = notices
        self._questions: dict[str, Question] = {}
        self._ruled_out: dict[str, int] = {}
        self._unchecked: set[str] = set()
        self._voids: dict[frozenset[tuple[str, float]], set[str]] = {}
        # The first way that works is used from then on. The loss of outputs in float64 is cheap, and exact whatever the
        # model's precision; a function with its own tensors may need single precision.
        types = (torch.float64, torch.float32, None) if takes_outputs else (None,)
        self._ways = [_Way(outputs, casts) for casts in (False, True) for outputs in types]
        self._lacks = 0  # times in a row that memory has run out

    @property
    def knowledge(self) -> dict[str, tuple[Weighting, int]]:
        """The weighting of each loss as far as known, with the number of weightings ruled out for it."""
        return {name: (how, self._ruled_out.get(name, 0)) for name, how in self.known.items()}

    @property
    def has_questions(self) -> bool:
        """Whether anything is still to be inferred."""
        return bool(self._questions or self._unchecked or not self.known)

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
        if self.has_questions:
            self._ask_all(window, sizes, run)
        if Over.OPAQUE in [how.over for how in self.known.values()]:
            self._look_for_voids(window, sizes, run)
        else:
            self.is_settled = not self.has_questions

    def _ask_all(self, window: Window, sizes: Sequence[int], run: Run) -> None:
        chance, in_vain = None, 0
        while self._ways and in_vain < _AT_ONCE and (question := self._next_question(window, sizes, run)) is not None:
            chance = chance or random.Random(window.samples)  # noqa: S311 - no secret, and the same in every run
            before = len(question.candidates)
            self._ask(question, window, max(sizes), run, chance)
            in_vain += len(question.candidates) == before
        if chance is not None:
            self._say_what_cannot_be_told()

    def _next_question(self, window: Window, sizes: Sequence[int], run: Run) -> Question | None:
        if not self.known:
            return self._first_question(window, sizes, run)
        if max(window.groups()) == 1:
            return None  # a single sample cannot be split
        if self._unchecked:
            return _question_of(window)
        pieces = [target_tensors(part) for part in window]
        for question in self._questions.values():
            question.watch(pieces)
        return next((question for question in self._questions.values() if question.matters(window, sizes)), None)

    def _first_question(self, window: Window, sizes: Sequence[int], run: Run) -> Question | None:
        # Uncut, every loss is that of its window. Then it matters only whether anything counts, and whether pairs seen
        # so far are (sum, weight).
        doubtful = run.objective.returns_pairs and window.samples > 1
        if len(sizes) > 1 or doubtful or not all(_all_count(target_tensors(part)) for part in window):
            return _question_of(window)
        return None

    def _ask(self, question: Question, window: Window, largest: int, run: Run, chance: random.Random) -> None:
        sample, splits = _telling(question, window, min(max(largest // 2, _LEAST), _MOST), chance)
        observed = self._observe(sample, splits, run)
        known = dict(self.known)
        for name in observed[0].whole if observed else ():
            if name not in known or name in self._questions or name in self._unchecked:
                known[name] = self._concluded(name, observed, window, run)
        self.known = known  # for all losses or none: memory may run out in between

    def _observe(self, sample: Window, splits: Sequence[Rows], run: Run) -> list[_Observed]:
        """Run the objective in the first way that works; if none does, report it and return nothing."""
        why = None
        while self._ways:
            try:
                observed = run.observe(sample, splits, self._ways[0])
            except Exception as error:
                lacks = _oom.is_oom(error) or _oom.is_too_large(error)
                # At first, the caller has to free memory. If it still runs out, only one or two samples fit, which is
                # no reason to stop, and the next window is asked again; nor is a model without a loss in evaluation
                # mode a reason (torchvision's detectors).
                if _oom.is_device_lost(error) or (lacks and self._lacks < _LACKS):
                    self._lacks += lacks
                    raise
                why = why or _oom.first_line(error)
                _oom.let_go(error)
                if lacks:
                    self._notices.say(
                        "memory ran out while the loss reduction was inferred, which is tried again; until it is "
                        "known, micro-batches are weighted by their samples",
                        key="lack while inferring",
                    )
                    return []
                self._ways = self._ways[1:]
            else:
                self._lacks = 0
                return observed
        self._notices.say(
            f"the loss reduction could not be inferred in evaluation mode ({why}); micro-batches are weighted by their "
            "samples. Return a (sum, weight) pair or pass loss_reduction= for exact weights"
        )
        return []

    def _concluded(self, name: str, observed: Sequence[_Observed], window: Window, run: Run) -> Weighting:
        over, chosen = observed[0].whole[name].over, run.objective.weighting_by_default
        complete = all(one.holds(name) for one in observed)
        if chosen is not None:
            return chosen
        if over is not None:
            if over is Over.PAIR:
                self._check_pairs(name, observed if complete else ())
            return Weighting(over)
        if self._said is not None:
            return self._said
        if not complete:
            return self._unknown(name, run)
        return self._compared(name, [one.split(name) for one in observed], window, run)

    def _check_pairs(self, name: str, observed: Sequence[_Observed]) -> None:
        seen = [one.check_pair(name) for one in observed]
        if any(seen):
            self._unchecked.discard(name)
        else:
            self._unchecked.add(name)

    def _compared(self, name: str, splits: Sequence[Split], window: Window, run: Run) -> Weighting:
        question = self._questions.setdefault(name, _question_of(window))
        question.learn([split for split in splits if len(split.parts) > 1 and math.isfinite(split.whole)])
        self._ruled_out[name] = question.ruled_out
        if not question.candidates:
            return self._unknown(name, run)
        if question.is_untouched:
            self._notices.say(
                f"loss {name!r}: no two samples of a window can be batched together, so its reduction is not known "
                "yet; micro-batches are weighted by their samples. Use a torch.nn loss, a (sum, weight) pair or "
                "loss_reduction= for exact weights"
            )
            return Weighting(Over.OPAQUE)
        if len(question.candidates) == 1:
            self._notices.say(f"loss {name!r} is {question.best.description} (inferred from a few samples)")
        if question.is_closed:
            del self._questions[name]
        return question.best

    def _unknown(self, name: str, run: Run) -> Weighting:
        self._questions.pop(name, None)
        advice = (
            "The loss or the model draws random numbers even in evaluation mode, so no two runs agree: pass "
            "loss_reduction='mean' or 'sum', or return a (sum, weight) pair"
            if run.draws
            else "If it compares samples with each other (a contrastive loss), pass loss_scope='window'. If it has "
            "class weights, or adds means of different kinds, use a torch.nn loss, a (sum, weight) pair, or a mapping "
            "of several losses"
        )
        self._notices.say(
            f"loss {name!r}: its reduction could not be inferred, so micro-batches are weighted by their samples, and "
            f"the gradient may differ from that of the whole batch. {advice}"
        )
        return Weighting(Over.OPAQUE)

    def _say_what_cannot_be_told(self) -> None:
        for name in [name for name, question in self._questions.items() if question.in_vain >= _IN_ALL]:
            del self._questions[name]
            self._notices.say(
                f"loss {name!r}: the samples seen so far do not determine its reduction; assumed to be "
                f"{self.known[name].description}. Use a torch.nn loss, a (sum, weight) pair or loss_reduction= "
                "for exact weights"
            )

    def _look_for_voids(self, window: Window, sizes: Sequence[int], run: Run) -> None:
        """Find the micro-batches for which an unknown loss is NaN because its mean is over nothing.

        In them all targets are equal, since none counts. One sample of each kind is tried.
        """
        start = 0
        for size in sizes:
            alike = constants_of(window, start, start + size)
            if alike and alike not in self._voids and len(self._voids) < _VOIDS:
                observed = self._observe(window.part(start, start + 1), [[[0]]], run)
                terms = observed[0].whole.items() if observed else ()
                self._voids[alike] = {name for name, term in terms if not math.isfinite(float(term.value))}
                for name in self._voids[alike]:
                    self._leave_out(name)
            start += size

    def _leave_out(self, name: str) -> None:
        if self.known[name].over is not Over.OPAQUE:
            return
        void = frozenset(alike for alike, names in self._voids.items() if name in names)
        self.known[name] = Weighting(Over.OPAQUE, void=void)
        self._notices.say(
            f"loss {name!r} is NaN when all targets are ignored; micro-batches of only such samples are left out",
            key=f"void {name}",
        )


class Observable(Protocol):
    """The interface of an objective whose reductions can be inferred; `Objective` implements it."""

    returns_pairs: bool

    @property
    def sources(self) -> Sequence[Any]: ...

    @property
    def modules(self) -> Sequence[nn.Module]: ...

    @property
    def weighting_by_default(self) -> Weighting | None: ...

    def outputs(self, batch: Any) -> Any: ...

    def terms(self, source: Any, batch: Any, samples: int) -> tuple[list[Term], Any]: ...

    def terms_of(self, outputs: Any, batch: Any, samples: int) -> list[Term]: ...


class Run:
    """Runs an objective on a few samples without side effects.

    Args:
        objective: The objective to run.
        place: Moves a batch to the device.
        mark: Taken before and restored afterwards.
        autocast: Returns a context to run the model in if it fails without.

    Attributes:
        objective: As the argument.
        draws: Whether a run drew random numbers despite evaluation mode, so that no two runs agree.
    """

    def __init__(
        self,
        objective: Observable,
        place: Callable[[Any], Any],
        mark: Mark,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.objective = objective
        self.draws = False
        self._place = place
        self._mark = mark
        self._autocast = autocast

    def observe(self, sample: Window, splits: Sequence[Rows], way: _Way) -> list[_Observed]:
        """Return the losses for splits of a sample; if each needs forward passes, for the first split only."""
        self._mark.take()
        try:
            with evaluation_mode(self.objective.modules), torch.no_grad(), self._as_written():
                # Outputs can be cut only if they run along the samples, which a split does not say.
                if way.outputs is None or not sample.is_first:
                    return [self._anew(sample, splits[0], way)]
                return self._on_outputs(sample, splits, way.outputs, way)
        finally:
            self.draws = self.draws or self._mark.random.has_moved()
            with signals.held():
                self._mark.put_back()

    def _as_written(self) -> AbstractContextManager[object]:
        is_compiled = any(module._compiled_call_impl is not None for module in self.objective.modules)
        return uncompiled() if is_compiled else nullcontext()

    def _on_outputs(self, sample: Window, splits: Sequence[Rows], dtype: torch.dtype, way: _Way) -> list[_Observed]:
        batch = self._place(copied(sample.joined()))
        with self._autocast() if way.casts else nullcontext():
            outputs = self.objective.outputs(batch)
        rows = FIRST.piece(outputs)
        if rows.samples != sample.samples:
            raise InvalidInputError(f"outputs with {rows.samples} rows for {sample.samples} samples")
        floating = [tensor for tensor in rows.tensors() if tensor.is_floating_point()]
        elements = sum(tensor.numel() for tensor in floating)
        widened = any(torch.finfo(tensor.dtype).bits < torch.finfo(dtype).bits for tensor in floating)

        def terms(rows: list[int]) -> dict[str, Term]:
            # The loss may write to both, so it gets copies.
            of_rows, of_batch = copied(chosen(outputs, rows, FIRST)), copied(chosen(batch, rows, sample.split))
            of_rows = map_tensors(lambda tensor: _widened(tensor, dtype), of_rows)
            return _losses(self.objective.terms_of(of_rows, of_batch, len(rows)))

        affordable = splits[: max(1, _ELEMENTS // max(elements, 1))]
        return [_observed(terms, sample, split, in_half=False, widened=widened) for split in affordable]

    def _anew(self, sample: Window, split: Rows, way: _Way) -> _Observed:
        objective = self.objective

        def terms(rows: list[int]) -> dict[str, Term]:
            batch = self._place(copied(sample.chosen(rows).cut(0, len(rows))))
            with self._autocast() if way.casts else nullcontext():
                found = [objective.terms(source, batch, len(rows))[0] for source in objective.sources]
            return _losses(term for terms in found for term in terms)

        half = any(parameter.dtype in _HALF for module in objective.modules for parameter in module.parameters())
        return _observed(terms, sample, split, in_half=way.casts or half, widened=False)


def _losses(terms: Iterable[Term]) -> dict[str, Term]:
    """Return the terms that are trained on, by name; the reductions of others do not matter."""
    return {term.name: term for term in terms if not term.is_reported}


def _observed(
    terms: Callable[[list[int]], dict[str, Term]], sample: Window, split: Rows, *, in_half: bool, widened: bool
) -> _Observed:
    whole = terms([row for part in split for row in part])
    parts = [sample.chosen(part).cut(0, len(part)) for part in split]
    samples = tuple(map(len, split))
    return _Observed(whole, [terms(part) for part in split], parts, samples, in_half, widened)


def _question_of(window: Window) -> Question:
    question = Question()
    question.watch([target_tensors(part) for part in window])
    return question


def _telling(question: Question, window: Window, size: int, chance: random.Random) -> tuple[Any, list[Rows]]:
    """Choose at most `size` samples of one batch that distinguish the candidates, and ways to split them."""
    groups = window.groups()
    largest = max(range(len(groups)), key=groups.__getitem__)
    start, samples = sum(groups[:largest]), groups[largest]
    if samples == 1:
        return window.part(start, start + 1), [[[0]]]
    elements = max((t.numel() // len(t) for t in target_tensors(window.cut(start, start + 1)).values()), default=1)
    looked_at = min(samples, max(_LOOKED_AT_SAMPLES, _LOOKED_AT // max(elements, 1)))
    start += chance.randrange(samples - looked_at + 1)
    weights = tallies_of_each(question.candidates, window, start, start + looked_at)
    best = question.candidates.index(question.best)
    split = telling_split(weights, best, size, chance, draws=_DRAWS)
    rows = [row for part in split for row in part]
    sample = window.chosen(start + row for row in rows)
    further = [telling_split(weights[:, rows], best, size, chance, draws=_FURTHER_DRAWS) for _ in range(_SPLITS - 1)]
    return sample, [[list(range(len(split[0]))), list(range(len(split[0]), len(rows)))], *further]


def _all_count(named_targets: dict[str, Tensor]) -> bool:
    return all(Weighting(Over.COUNTED).counts_all({name: targets}) for name, targets in named_targets.items())


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, dtype)) if tensor.is_floating_point() else tensor


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled modules eagerly: a size that occurs once is not worth a graph."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
