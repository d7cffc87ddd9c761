"""Infers the reduction of an unknown loss from its values for a few samples. Calls no model.

A weighting remains a candidate while it reproduces the loss of some samples from the losses of two parts of them. If
the samples do not distinguish two candidates, both remain until a window in which they differ; target values are
watched for that. Nothing is guessed from a function's name or code.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autoaccum._loss.counting import other_tensors, tallies_of, target_tensors
from autoaccum._loss.weighting import IGNORE_INDEX, Over, Tally, Weighting, shares, spread
from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from autoaccum._data.batches import Window

# Among candidates within rounding, one this much less likely than the best is excluded, in natural logarithms.
_RULED_OUT = 12.0
# Prior penalties: without padding, a mean over targets fits a mean over samples too; tensors that nothing marks as
# targets (tokens) are the length of samples more often than what a mean runs over; and any value might be ignored, but
# of so many values some fit by chance.
_UNUSUAL = 3.0
_NO_TARGET = 6.0
_ANY_VALUE = 9.0
# How many times a fruitless attempt in half precision counts, since the next one is unlikely to tell more.
_IN_HALF = 3
# The most targets of a split that are kept, for testing candidates that only later windows bring up. Label images are
# larger.
_KEPT = 2**17
# With fewer classes than this, each is considered as possibly ignored or weighted differently.
_FEW_CLASSES = 128
# Conventional void value in a label image; -1 and -100 are recognised by being negative.
_VOID = 255
# A value is possibly padding if at least one row in this many begins or ends with it; 0 if a single row does.
_PADDED_SHARE = 4
_ROWS = 2
# From so many samples on, integers that all differ, in a tensor that nothing marks as a target, are taken for
# identifiers.
_IDENTIFIERS = 8
# Possible padding matters only from this difference on: a rounded loss cannot distinguish a single value among a
# thousand targets, which may as well be a class.
_MATTERS, _DIGITS = 1e-3, 3
# The fewest samples in a split, and the difference in a part's share beyond which a larger one is no better.
_LEAST = 3
_FAR_APART = 0.1

_LIKELIER_FIRST = (Over.COUNTED, Over.SHIFTED, Over.ELEMENTS, Over.SAMPLES, Over.SUM, Over.SUMMED)


class Rounding(NamedTuple):
    """The relative rounding error between a loss and its reconstruction from parts.

    Attributes:
        least: Smaller errors are not significant.
        most: Larger errors are not due to rounding.
    """

    least: float
    most: float


# Rounding of the mean itself, and of kernels that depend on the batch size. The last two types have 8 and 11 bits,
# which hide most differences between candidates, so only many splits together show them.
_ROUNDING = {
    torch.float64: Rounding(1e-13, 1e-9),
    torch.float32: Rounding(1e-7, 3e-5),
    torch.bfloat16: Rounding(4e-3, 2e-2),
    torch.float16: Rounding(1e-3, 1e-2),
}
# A loss in float64 that was rounded to single precision in between, as Transformers' LabelSmoother does.
VIA_SINGLE = Rounding(1e-13, 1e-6)
# A loss in single precision of a model in half precision.
_FROM_HALF = Rounding(5e-4, 2e-2)


def rounding_of(dtype: torch.dtype, *, in_half: bool) -> Rounding:
    """Return the rounding error of a loss.

    Args:
        dtype: The type of the loss.
        in_half: Whether half precision was used in its computation.
    """
    return _FROM_HALF if in_half and dtype is torch.float32 else _ROUNDING.get(dtype, _ROUNDING[torch.bfloat16])


@dataclass(frozen=True, slots=True)
class Split:
    """The loss of a few samples, and the losses of two parts of them; or the slopes of these in one direction.

    Attributes:
        whole: The loss of all samples.
        parts: The losses of the parts; NaN if nothing counts.
        named: Target tensors of the parts; empty if they were too large to keep.
        samples: Sizes of the parts.
        rounding: The rounding error to expect.
    """

    whole: float
    parts: tuple[float, ...]
    named: tuple[Mapping[str, Tensor], ...]
    samples: tuple[int, ...]
    rounding: Rounding

    @property
    def elements(self) -> int:
        """The number of targets."""
        return sum(targets.numel() for named in self.named for targets in named.values())

    @property
    def is_level(self) -> bool:
        """Whether the losses are equal but for rounding."""
        values = (self.whole, *self.parts)
        return max(values) - min(values) <= self.rounding.most * max(map(abs, values))

    def misfit(self, how: Weighting) -> float:
        """Return how far the whole is from its reconstruction by this weighting, in units of rounding.

        Between 1 (within rounding) and infinity (not explainable by rounding).
        """
        tallies = [how.tally(samples, named) for samples, named in zip(self.samples, self.named, strict=True)]
        off = misfit(how, self.whole, self.parts, tallies)
        return math.inf if off > self.rounding.most else max(1.0, off / self.rounding.least)


def misfit(how: Weighting, whole: float, parts: Sequence[float], tallies: Sequence[Tally]) -> float:
    """Return the relative difference between the loss of a batch and its reconstruction from the losses of its parts.

    Args:
        how: A weighting without class weights.
        whole: Loss of the batch.
        parts: Losses of its parts; may be NaN for a part in which nothing counts.
        tallies: The tallies of the parts.
    """
    if not any(tallies):
        return math.inf
    factors = shares(how, tallies, 0)
    rebuilt = sum(factor * part for factor, part in zip(factors, parts, strict=True) if factor != 0.0)
    scale = max(abs(whole), abs(rebuilt))
    off = abs(rebuilt - whole)
    return off / scale if off > 0.0 else 0.0 if off == 0.0 else math.inf


class Evidence(NamedTuple):
    """What a question knows at a moment; of `Question` alone."""

    candidates: list[Weighting]
    in_vain: int
    splits: list[Split]
    off: dict[Weighting, list[float]]
    watched: dict[str, _Values]


class Question:
    """The reduction of one loss, as far as known.

    Args:
        others: The names of tensors that nothing marks as targets.

    Attributes:
        candidates: The weightings consistent with all splits so far, the likelier first; empty if none fits.
        in_vain: The number of attempts without progress; those in half precision count several times.
        slopes_asked: The number of times that slopes were asked for.
        has_seen_repeated: Whether samples with the same target were tried.
    """

    def __init__(self, others: frozenset[str] = frozenset()) -> None:
        self.candidates = [Weighting(Over.SAMPLES), Weighting(Over.SUM)]
        self.in_vain = self.slopes_asked = 0
        self.has_seen_repeated = False
        self._others = others
        self._splits: list[Split] = []
        self._off: dict[Weighting, list[float]] = {how: [] for how in self.candidates}
        self._watched: dict[str, _Values] = {}

    @property
    def best(self) -> Weighting:
        """The candidate that fits best; of equally good ones, the likeliest."""
        unlikelihood = self._unlikelihood()
        return min(self.candidates, key=lambda how: unlikelihood[how])

    @property
    def ruled_out(self) -> int:
        """The number of weightings that do not fit the splits so far."""
        return len(self._off) - len(self.candidates)

    @property
    def is_untouched(self) -> bool:
        """Whether there has been no split yet."""
        return not self._splits

    @property
    def is_undecided(self) -> bool:
        """Whether the last losses were equal, so that they tell no mean from another, and several candidates remain."""
        return len(self.candidates) > 1 and (not self._splits or self._splits[-1].is_level)

    @property
    def is_doubtful(self) -> bool:
        """Whether the best candidate is an unusual one that a single split supports, as small counts may by chance."""
        return len(self._splits) == 1 and bool(self.candidates) and _is_special(self.best)

    @property
    def is_closed(self) -> bool:
        """Whether no later window can reopen the question."""
        if len(self.candidates) != 1:
            return not self.candidates
        target = self.candidates[0].target
        return target is None or self.candidates[0].over is Over.SUMMED or not self._watched[target].are_few

    def evidence(self) -> Evidence:
        """Return all that is known."""
        return Evidence(
            list(self.candidates),
            self.in_vain,
            list(self._splits),
            {how: list(off) for how, off in self._off.items()},
            {name: values.copied() for name, values in self._watched.items()},
        )

    def put_back(self, evidence: Evidence) -> None:
        """Know again what was known then."""
        self.candidates, self.in_vain, self._splits, self._off, self._watched = evidence

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Forget what was learned in a block that fails, such as for lack of memory: half of it would be wrong."""
        before = self.evidence()
        try:
            yield
        except BaseException:
            self.put_back(before)
            raise

    def watch(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Add the candidates that the targets of a window, given piece by piece, make possible."""
        with self._all_or_nothing():
            self._watch(pieces)

    def _watch(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        names = pieces[0] if len(pieces) == 1 else dict.fromkeys(name for piece in pieces for name in piece)
        for name in names:
            targets = [piece[name] for piece in pieces if name in piece and piece[name].numel()]
            if not targets or targets[0].is_complex():
                continue
            values = self._watched.get(name)
            if values is None:
                values = self._watched[name] = _Values(is_other=name in self._others)
                self._take_up(_whatever_the_values(name, targets[0]))
            overs = (Over.COUNTED, Over.SHIFTED) if targets[0].dim() > 1 else (Over.COUNTED,)
            self._take_up([Weighting(over, value, target=name) for value in values.see(targets) for over in overs])

    def matters(self, window: Window, sizes: Sequence[int]) -> bool:
        """Whether the candidates differ for this cut of a window, which must have been watched."""
        if len(self.candidates) <= 1:
            return False
        apart = [how for how in self.candidates if how.over is not Over.SUM]
        if len(apart) < len(self.candidates) and len(sizes) > 1:
            return True
        if len(window.groups()) == 1:
            # The usual case, and far cheaper: ignoring a value that does not occur leaves all samples the same weight.
            unlike = [how for how in apart if self._may_hold(how)]
            apart = unlike + [how for how in apart if how not in unlike][:1]
        return len(apart) > 1 and _differ(apart, window, sizes)

    def ratios(self, window: Window) -> list[tuple[Any, ...]] | None:
        """Return what a window, which must have been watched, weighs for each candidate, beside the first of them.

        If these are the same for several windows, these have the same shares of their sum for every candidate.

        Returns:
            The candidates of another weight, with its ratio; None if one is a sum, which gives other shares than means.
        """
        if Over.SUM in [how.over for how in self.candidates]:
            return None
        first, *others = self._weights_of(window)
        found = [(how, weight / first[1] if first[1] else math.inf) for how, weight in others]
        # Of values that are hardly ever ignored, differences that a rounded loss hides do not matter.
        found = [(how, round(ratio, _DIGITS) if _is_special(how) else ratio) for how, ratio in found]
        return [(how.over.name, how.target, how.ignore_index, how.nor, ratio) for how, ratio in found if ratio != 1.0]

    def _weights_of(self, window: Window) -> list[tuple[Weighting, float]]:
        """Return what a window weighs for each candidate but those that ignore a value which does not occur."""
        weights = []
        for how in self.candidates:
            if how.over is Over.SUMMED or not (_is_special(how) and not self._may_hold(how)):
                (tally,) = tallies_of(how, window, (window.samples,), in_full=True)
                weights.append((how, float(tally)))
        return weights

    def _may_hold(self, how: Weighting) -> bool:
        return how.target is not None and self._watched[how.target].may_hold(how)

    def fits(self, split: Split) -> bool:
        """Whether a candidate reproduces these losses."""
        return any(split.misfit(how) < math.inf for how in self.candidates)

    def learn(self, splits: Sequence[Split]) -> None:
        """Exclude the candidates that do not reproduce these losses."""
        with self._all_or_nothing():
            self._learn(splits)

    def _learn(self, splits: Sequence[Split]) -> None:
        before = len(self.candidates)
        for how in self.candidates:
            self._off[how] += [split.misfit(how) for split in splits]
        self._splits += splits
        self._leave_out()
        if not self.candidates:
            self._allow_single()
        self._splits = [split if split.elements <= _KEPT else replace(split, named=()) for split in self._splits]
        if len(self.candidates) == before:
            self.in_vain += _IN_HALF if any(split.rounding.least >= _FROM_HALF.least for split in splits) else 1

    def _allow_single(self) -> None:
        """If nothing fits float64, compare as if the loss had been rounded to single precision in between."""
        narrow = _ROUNDING[torch.float64]
        if all(split.rounding is not narrow for split in self._splits) or not all(
            split.named for split in self._splits
        ):
            return
        self._splits = [
            replace(split, rounding=VIA_SINGLE) if split.rounding is narrow else split for split in self._splits
        ]
        self._off = {how: [split.misfit(how) for split in self._splits] for how in self._off}
        self.candidates = sorted(self._off, key=lambda how: _LIKELIER_FIRST.index(how.over))
        self._leave_out()

    def _take_up(self, hows: Sequence[Weighting]) -> None:
        if not hows:
            return
        # If the targets were not kept, the candidate is assumed to fit as well as the best.
        least = [min((self._off[how][at] for how in self.candidates), default=1.0) for at in range(len(self._splits))]
        for how in hows:
            self._off[how] = [
                split.misfit(how) if split.named else off for split, off in zip(self._splits, least, strict=True)
            ]
        # Candidates without a tensor come last; among equal ones the first tensor, the likeliest target, stays first.
        self.candidates = sorted([*self.candidates, *hows], key=lambda how: _LIKELIER_FIRST.index(how.over))
        self._leave_out()

    def _leave_out(self) -> None:
        self.candidates = [how for how in self.candidates if math.inf not in self._off[how]]
        unlikelihood = self._unlikelihood()
        self.candidates = [how for how in self.candidates if unlikelihood[how] <= _RULED_OUT]
        if len(self.candidates) == 1:
            self._doubt(self.candidates[0])

    def _doubt(self, how: Weighting) -> None:
        """Test whether every class has the same weight, after padding has ruled out all other candidates."""
        values = None if how.target is None else self._watched[how.target].not_compared_with(how)
        self._take_up([replace(how, nor=value) for value in values or ()])

    def _unlikelihood(self) -> dict[Weighting, float]:
        """Return how much less likely each candidate is than the best, as a logarithm.

        Rounding is assumed to be normally distributed, with the spread of the best candidate's misfits.
        """
        splits = len(self._splits)
        unlikelihood = {how: self._beforehand(how) + splits * _log_width(self._off[how]) for how in self.candidates}
        least = min(unlikelihood.values(), default=0.0)
        return {how: value - least for how, value in unlikelihood.items()}

    def _beforehand(self, how: Weighting) -> float:
        if _is_special(how):
            return _ANY_VALUE
        usual = how.over in (Over.COUNTED, Over.SHIFTED, Over.ELEMENTS)
        return _UNUSUAL if not usual else _NO_TARGET if how.target in self._others else 0.0


def question_of(window: Window) -> Question:
    """Return the question of a loss, with the candidates that the targets of a window make possible."""
    pieces = list(window)
    question = Question(frozenset().union(*map(other_tensors, pieces)))
    question.watch([target_tensors(piece) for piece in pieces])
    return question


class _Values:
    """The values of one target tensor that may be ignored, among those seen.

    Args:
        is_other: Whether nothing marks the tensor as a target.

    Attributes:
        are_few: Whether it holds few enough classes to test each of them.
    """

    def __init__(self, *, is_other: bool) -> None:
        self.are_few = True
        self._is_other = is_other
        self._known = {IGNORE_INDEX}
        self._compared: set[int] = set()
        self._seen = (math.inf, -math.inf)
        self._now = (math.inf, -math.inf)
        self._is_mask: bool | None = None
        self._are_identifiers = False

    def copied(self) -> _Values:
        """Return the same, which changes by itself."""
        other = copy.copy(self)
        other._known, other._compared = set(self._known), set(self._compared)
        return other

    def see(self, pieces: Sequence[Tensor]) -> list[int]:
        """Return new values that may be ignored, given the targets of a window."""
        if self._is_mask is False:
            return []
        ranges = [spread(targets) for targets in pieces]
        self._now = min(low for low, _ in ranges), max(high for _, high in ranges)
        found = []
        is_wider = self._now[0] < self._seen[0] or self._now[1] > self._seen[1]
        if self._is_other:
            # Too few to tell, as in the last window of an epoch: they are what they were before.
            enough = self._are_identifiers or sum(map(len, pieces)) >= _IDENTIFIERS
            self._are_identifiers = enough and _are_all_different(pieces)
        if is_wider and not self._are_identifiers:
            self._seen = min(self._now[0], self._seen[0]), max(self._now[1], self._seen[1])
            found = self._of_mask(pieces) if pieces[0].is_floating_point() else self._of_classes(pieces)
        if not self.are_few:
            found += [value for targets in pieces for value in _paddings(targets)]
        new = [value for value in dict.fromkeys(found) if value not in self._known]
        self._known.update(new)
        return new

    def may_hold(self, how: Weighting) -> bool:
        """Whether an ignored value may be among the targets seen last."""
        low, high = self._now
        if how.over is Over.ELEMENTS:
            return False
        if how.over is Over.SUMMED:
            return low != high
        return low <= how.ignore_index <= high or (how.nor is not None and low <= how.nor <= high)

    def not_compared_with(self, how: Weighting) -> list[int]:
        """Return the classes not yet returned here, which a weighting may treat differently without our knowing."""
        if not self.are_few or self._is_mask is not None or how.over is Over.SUMMED:
            return []
        new = [value for value in self._known - self._compared if value not in (how.ignore_index, IGNORE_INDEX)]
        self._compared.update(new)
        return sorted(new)

    def _of_mask(self, pieces: Sequence[Tensor]) -> list[int]:
        self._is_mask = all(bool(((part == 0) | (part == 1)).all()) for part in pieces)
        return [0, 1] if self._is_mask else []

    def _of_classes(self, pieces: Sequence[Tensor]) -> list[int]:
        low, high = int(self._seen[0]), int(self._seen[1])
        classes = high
        if high == _VOID:
            classes = max((int(part[part != _VOID].max()) for part in pieces if (part != _VOID).any()), default=0)
        self.are_few = self.are_few and classes < _FEW_CLASSES
        negative = [value for value in (low, -1) if value < 0 and any(bool((part == value).any()) for part in pieces)]
        void = [_VOID] if high == _VOID else []
        return [*negative, *void, *(range(classes + 1) if self.are_few else ())]


def _whatever_the_values(name: str, targets: Tensor) -> list[Weighting]:
    """Return the candidates that a target tensor adds whatever its values."""
    if targets.dtype is torch.bool:
        return []
    has_rows, is_number = targets.dim() > 1, targets.numel() == len(targets)
    if targets.is_floating_point():
        overs = [Over.ELEMENTS] if has_rows else []
        # Weights, or lengths that were converted.
        is_number = is_number and ("weight" in name or bool((targets == targets.round()).all()))
    else:
        overs = [Over.COUNTED, Over.SHIFTED] if has_rows else [Over.COUNTED]
    return [Weighting(over, target=name) for over in (*overs, *([Over.SUMMED] if is_number else []))]


def _are_all_different(pieces: Sequence[Tensor]) -> bool:
    """Whether the targets of a window may be numbers of its samples, of which no value would be ignored."""
    if any(part.dim() != 1 or part.is_floating_point() for part in pieces):
        return False
    values = torch.cat([part.long() for part in pieces]).sort().values
    return int(values[0]) >= 0 and bool((values.diff() > 0).all())


def _paddings(targets: Tensor) -> list[int]:
    """Return the values at the ends of enough rows of targets of shape (N, T) to be padding."""
    if targets.dim() != _ROWS or len(targets) < _ROWS:
        return []
    edges = targets[:, :: max(targets.shape[1] - 1, 1)]
    values = edges.mode(0).values
    often = (edges == values).sum(0).tolist()
    least = max(_ROWS, len(targets) // _PADDED_SHARE)
    found = [value for value, count in zip(values.tolist(), often, strict=True) if count >= least]
    return found if edges.all() else [*found, 0]


def _log_width(misfits: Sequence[float]) -> float:
    return math.log(math.hypot(*misfits)) if misfits else 0.0


def _is_special(how: Weighting) -> bool:
    return how.ignore_index != IGNORE_INDEX or how.nor is not None or how.over is Over.SUMMED


def _differ(hows: Sequence[Weighting], window: Window, sizes: Sequence[int]) -> bool:
    """Whether these weightings give the micro-batches different shares."""
    first, *others = ([int(tally) for tally in tallies_of(how, window, sizes)] for how in hows)
    return any(
        _are_unlike(first, other, _MATTERS if _is_special(how) else 0.0)
        for how, other in zip(hows[1:], others, strict=True)
    )


def _are_unlike(mine: Sequence[int], theirs: Sequence[int], tolerance: float) -> bool:
    # In integers, so that equal shares compare equal: a / A == b / B.
    total, other = sum(mine), sum(theirs)
    return (
        not total
        or not other
        or any(abs(a * other - b * total) > tolerance * b * total for a, b in zip(mine, theirs, strict=True))
    )


# --- choosing samples that tell --------------------------------------------------------------------------------------


def telling_split(
    weights: Tensor, best: int, size: int, chance: random.Random, *, draws: int, sums: Sequence[bool] = ()
) -> list[list[int]]:
    """Choose a few samples, and two parts of them, for which the candidates differ most.

    Args:
        weights: The weight of each sample, shape (candidates, samples), of at least two samples.
        best: The candidate to distinguish from the others.
        size: The most samples to choose, at least two.
        chance: The random generator for drawing splits.
        draws: The number of splits to choose from.
        sums: Whether each candidate is a sum, which differs from a mean only where both parts have a weight.
    """
    tallies = weights.numpy()  # dozens of tiny sums: torch takes several times as long, on a watched device even more
    share = tallies / np.maximum(tallies.mean(1, keepdims=True), 1e-9)
    far = np.abs(share - share[best])
    # For each candidate, the samples for which it differs most from the best; they are put on one side.
    farthest = [np.flatnonzero(row).tolist() for row in far >= far.max(1, keepdims=True)]
    # Of each candidate and the best, the one that is a mean, where the other is a sum.
    means = [(row if sums[best] else best) if sums and sums[row] != sums[best] else None for row in range(len(tallies))]
    weighing = sorted({int(at) for row in means if row is not None for at in np.flatnonzero(tallies[row])})
    splits = [_draw(farthest, weighing, tallies.shape[1], size, chance) for _ in range(draws)]
    return splits[int(_distances(tallies, best, splits, means).argmax())]


def _draw(
    farthest: Sequence[Sequence[int]], weighing: Sequence[int], samples: int, size: int, chance: random.Random
) -> list[list[int]]:
    """Draw two parts; the second has a sample that weighs something, if there are such."""
    # With three samples their losses differ most; many samples cover most values.
    size = min(samples, chance.choice((_LEAST, size)), size)
    on_one_side = chance.randint(1, max(1, size // 2))
    first = list({chance.choice(chance.choice(farthest)) for _ in range(on_one_side)})
    second = [chance.choice(weighing)] if weighing else []
    drawn = dict.fromkeys([*second, *chance.sample(range(samples), min(samples, size + len(first)))])
    others = [index for index in drawn if index not in first]
    return [first, others[: size - len(first)]]


def _distances(
    tallies: npt.NDArray[np.floating],
    best: int,
    splits: Sequence[Sequence[Sequence[int]]],
    means: Sequence[int | None],
) -> npt.NDArray[np.floating]:
    """Return for each split how far the candidates' shares of its first part are from those of the best.

    A sum is far from a mean, named in `means`, where the mean has a share of both parts.
    """
    parts = [part for split in splits for part in split]  # none is empty
    starts = np.cumsum([0, *map(len, parts[:-1])])
    of_parts = np.add.reduceat(tallies[:, list(chain.from_iterable(parts))], starts, axis=1)
    ones, all_of_them = of_parts[:, ::2], of_parts[:, ::2] + of_parts[:, 1::2]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares_of_first = ones / all_of_them
    apart = np.nan_to_num(np.abs(shares_of_first - shares_of_first[best]), nan=_FAR_APART)
    for row, mean in enumerate(means):
        if mean is not None:
            share = shares_of_first[mean]
            apart[row] = np.where((share > 0.0) & (share < 1.0), _FAR_APART, 0.0)
    # Where nothing counts, the loss is probably NaN, which tells nothing.
    return np.where(all_of_them[best] == 0, 0.0, np.minimum(apart, _FAR_APART).sum(0))
