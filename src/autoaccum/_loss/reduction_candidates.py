"""Concludes what an unknown loss runs over from its values for a few samples. Calls no model.

A way of weighing remains a candidate while it rebuilds the loss of some samples from the losses of two parts of them.
Two that the samples do not distinguish both remain until a window comes in which they differ, which is why the values
of targets are watched. Nothing is guessed from a function's name or its code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from autoaccum._loss.counting import tallies_of
from autoaccum._loss.weighting import IGNORE_INDEX, Over, Tally, Weighting, shares, spread

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from autoaccum._data.batches import Window

# Of candidates that rounding allows one is left out that is so much less likely than the best, in natural logarithms.
_RULED_OUT = 12.0
# How much less likely beforehand: a target without padding runs over samples too, and any value might not count, but
# there are so many values that some fit by chance.
_UNUSUAL = 3.0
_ANY_VALUE = 9.0
# How many times an asking counts that told nothing in half precision, where the next is hardly going to tell more.
_IN_HALF = 3
# Targets of a split that are kept, to compare with them what only later windows bring up. Label images are larger.
_KEPT = 2**17
# Where there are fewer classes than this, each may be the one that does not count or that weighs otherwise.
_FEW_CLASSES = 128
# Void in a label image, by custom; -1 and -100 are found by being negative, which classes are not.
_VOID = 255
# Padding is what at least one row of so many begins or ends with; 0 is padding where a single row does.
_PADDED_SHARE = 4
_ROWS = 2
# A value that may be padding matters only from this difference on: a single one among a thousand targets, which could
# as well be a class, is not told from the others by any loss that is rounded.
_MATTERS = 1e-3
# The fewest samples in a split, and the difference in a part's share beyond which more is no better.
_LEAST = 3
_FAR_APART = 0.1

_LIKELIER_FIRST = (Over.COUNTED, Over.SHIFTED, Over.ELEMENTS, Over.SAMPLES, Over.SUM)


class Rounding(NamedTuple):
    """How far rounding takes a loss from what its parts give, relative to its size.

    Attributes:
        least: Less than this says nothing: it is met by chance as well.
        most: More than this is no rounding.
    """

    least: float
    most: float


# Of the mean itself, and of kernels that differ by batch size. The last two types have 8 and 11 bits: most that tells
# candidates apart is lost in them, and only many splits together show it.
_ROUNDING = {
    torch.float64: Rounding(1e-13, 1e-9),
    torch.float32: Rounding(1e-7, 3e-5),
    torch.bfloat16: Rounding(4e-3, 2e-2),
    torch.float16: Rounding(1e-3, 1e-2),
}
# What was computed in float64 from single precision may have been rounded to that on the way.
_WIDENED = Rounding(1e-13, 1e-6)
# A loss in single precision of a model in half.
_FROM_HALF = Rounding(5e-4, 2e-2)


def rounding_of(dtype: torch.dtype, *, in_half: bool, widened: bool) -> Rounding:
    """Return how far rounding takes a loss.

    Args:
        dtype: Of the loss.
        in_half: Whether half precision was used on the way.
        widened: Whether it was computed from outputs that had been in single or half precision.
    """
    if dtype is torch.float64 and widened:
        return _WIDENED
    return _FROM_HALF if in_half and dtype is torch.float32 else _ROUNDING.get(dtype, _ROUNDING[torch.bfloat16])


@dataclass(frozen=True, slots=True)
class Split:
    """The loss of a few samples, and the losses of two parts of them.

    Attributes:
        whole: The loss of all.
        parts: Those of the parts; NaN where nothing counts.
        named: Target tensors of the parts; none where they were too large to keep.
        samples: Sizes of the parts.
        rounding: How far rounding may have taken them apart.
    """

    whole: float
    parts: tuple[float, ...]
    named: tuple[Mapping[str, Tensor], ...]
    samples: tuple[int, ...]
    rounding: Rounding

    @property
    def elements(self) -> int:
        """How many targets there are."""
        return sum(targets.numel() for named in self.named for targets in named.values())

    def misfit(self, how: Weighting) -> float:
        """Return how far the whole is from what its parts give in this way of weighing, in units of rounding.

        Between 1, where it is no further than rounding takes it anyhow, and infinity, where it cannot be rounding.
        """
        tallies = [how.tally(samples, named) for samples, named in zip(self.samples, self.named, strict=True)]
        off = misfit(how, self.whole, self.parts, tallies)
        return math.inf if off > self.rounding.most else max(1.0, off / self.rounding.least)


def misfit(how: Weighting, whole: float, parts: Sequence[float], tallies: Sequence[Tally]) -> float:
    """Return how far the loss of a batch is from what its parts' losses give, relative to its size.

    Args:
        how: A way of weighing, without class weights.
        whole: Loss of the batch.
        parts: Losses of its parts; that of a part in which nothing counts may be NaN.
        tallies: What counts in the parts.
    """
    if not any(tallies):
        return math.inf
    factors = shares(how, tallies, 0)
    rebuilt = sum(factor * part for factor, part in zip(factors, parts, strict=True) if factor != 0.0)
    scale = max(abs(whole), abs(rebuilt))
    off = abs(rebuilt - whole)
    return off / scale if off > 0.0 else 0.0 if off == 0.0 else math.inf


class Question:
    """What one loss runs over, as far as it is known.

    Attributes:
        candidates: What it may run over by all that was seen, the likelier first; empty where nothing fits.
        in_vain: How often it was asked and nothing learned; in half precision, where little can be, it counts more.
    """

    def __init__(self) -> None:
        self.candidates = [Weighting(Over.SAMPLES), Weighting(Over.SUM)]
        self.in_vain = 0
        self._splits: list[Split] = []
        self._off: dict[Weighting, list[float]] = {how: [] for how in self.candidates}
        self._watched: dict[str, _Values] = {}

    @property
    def best(self) -> Weighting:
        """The candidate that fits best, and of those that fit alike the likeliest."""
        unlikelihood = self._unlikelihood()
        return min(self.candidates, key=lambda how: unlikelihood[how])

    @property
    def ruled_out(self) -> int:
        """How many ways of weighing do not fit what was seen."""
        return len(self._off) - len(self.candidates)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was seen yet that it could be concluded from."""
        return not self._splits

    @property
    def is_closed(self) -> bool:
        """Whether no later window can open it again."""
        if len(self.candidates) != 1:
            return not self.candidates
        target = self.candidates[0].target
        return target is None or not self._watched[target].are_few

    def watch(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Take up as candidates what the targets of a window, piece by piece, make possible."""
        names = pieces[0] if len(pieces) == 1 else dict.fromkeys(name for piece in pieces for name in piece)
        for name in names:
            targets = [piece[name] for piece in pieces if name in piece and piece[name].numel()]
            if not targets or targets[0].is_complex():
                continue
            values = self._watched.get(name)
            if values is None:
                values = self._watched[name] = _Values()
                self._take_up(_whatever_the_values(name, targets[0]))
            overs = (Over.COUNTED, Over.SHIFTED) if targets[0].dim() > 1 else (Over.COUNTED,)
            self._take_up([Weighting(over, value, target=name) for value in values.see(targets) for over in overs])

    def matters(self, window: Window, sizes: Sequence[int]) -> bool:
        """Whether it matters for this cut of a window, which was watched, which of the candidates is the right one."""
        if len(self.candidates) <= 1:
            return False
        apart = [how for how in self.candidates if how.over is not Over.SUM]
        if len(apart) < len(self.candidates) and len(sizes) > 1:
            return True
        if len(window.groups()) == 1:
            # The usual case, and far cheaper: a value that does not occur leaves every sample the same weight.
            unlike = [how for how in apart if how.target is not None and self._watched[how.target].may_hold(how)]
            apart = unlike + [how for how in apart if how not in unlike][:1]
        return len(apart) > 1 and _differ(apart, window, sizes)

    def learn(self, splits: Sequence[Split]) -> None:
        """Leave out the candidates that do not rebuild these losses."""
        before = len(self.candidates)
        for how in self.candidates:
            self._off[how] += [split.misfit(how) for split in splits]
        self._splits += [split if split.elements <= _KEPT else replace(split, named=()) for split in splits]
        self._leave_out()
        if len(self.candidates) == before:
            self.in_vain += _IN_HALF if any(split.rounding.least >= _FROM_HALF.least for split in splits) else 1

    def _take_up(self, hows: Sequence[Weighting]) -> None:
        if not hows:
            return
        # Where the targets are gone there is nothing against it: it is taken to fit as the best does.
        least = [min((self._off[how][at] for how in self.candidates), default=1.0) for at in range(len(self._splits))]
        for how in hows:
            self._off[how] = [
                split.misfit(how) if split.named else off for split, off in zip(self._splits, least, strict=True)
            ]
        # Those without a tensor last; of others alike the first tensor, the likeliest to be a target, stays first.
        self.candidates = sorted([*self.candidates, *hows], key=lambda how: _LIKELIER_FIRST.index(how.over))
        self._leave_out()

    def _leave_out(self) -> None:
        self.candidates = [how for how in self.candidates if math.inf not in self._off[how]]
        unlikelihood = self._unlikelihood()
        self.candidates = [how for how in self.candidates if unlikelihood[how] <= _RULED_OUT]
        if len(self.candidates) == 1:
            self._doubt(self.candidates[0])

    def _doubt(self, how: Weighting) -> None:
        """Ask of the only candidate left whether every class weighs the same: padding has told it from all others."""
        values = None if how.target is None else self._watched[how.target].not_compared_with(how)
        self._take_up([replace(how, nor=value) for value in values or ()])

    def _unlikelihood(self) -> dict[Weighting, float]:
        """Return how much less likely than the best each candidate is, as a logarithm.

        Rounding is taken for normally distributed, as wide as the best candidate's misfits are.
        """
        splits = len(self._splits)
        unlikelihood = {how: _beforehand(how) + splits * _log_width(self._off[how]) for how in self.candidates}
        least = min(unlikelihood.values(), default=0.0)
        return {how: value - least for how, value in unlikelihood.items()}


class _Values:
    """The values of one target tensor that may stand for nothing, as far as they were seen.

    Attributes:
        are_few: Whether it holds so few classes that each of them is looked at.
    """

    def __init__(self) -> None:
        self.are_few = True
        self._known = {IGNORE_INDEX}
        self._compared: set[int] = set()
        self._seen = (math.inf, -math.inf)
        self._now = (math.inf, -math.inf)
        self._is_mask: bool | None = None

    def see(self, pieces: Sequence[Tensor]) -> list[int]:
        """Return what has newly to be reckoned with, given the targets of a window."""
        if self._is_mask is False:
            return []
        ranges = [spread(targets) for targets in pieces]
        self._now = min(low for low, _ in ranges), max(high for _, high in ranges)
        found = []
        if self._now[0] < self._seen[0] or self._now[1] > self._seen[1]:
            self._seen = min(self._now[0], self._seen[0]), max(self._now[1], self._seen[1])
            found = self._of_mask(pieces) if pieces[0].is_floating_point() else self._of_classes(pieces)
        if not self.are_few:
            found += [value for targets in pieces for value in _paddings(targets)]
        new = [value for value in dict.fromkeys(found) if value not in self._known]
        self._known.update(new)
        return new

    def may_hold(self, how: Weighting) -> bool:
        """Whether a value that does not count may be among the targets seen last."""
        low, high = self._now
        if how.over is Over.ELEMENTS:
            return False
        return low <= how.ignore_index <= high or (how.nor is not None and low <= how.nor <= high)

    def not_compared_with(self, how: Weighting) -> list[int]:
        """Return the classes that this was not yet asked for, in which a way of weighing may be incomplete."""
        if not self.are_few or self._is_mask is not None:
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
    """Return the candidates that a target tensor brings whatever is in it."""
    has_rows = targets.dim() > 1
    if targets.is_floating_point():
        return [Weighting(Over.ELEMENTS, target=name)] if has_rows else []
    if targets.dtype is torch.bool:
        return []
    return [Weighting(over, target=name) for over in ((Over.COUNTED, Over.SHIFTED) if has_rows else (Over.COUNTED,))]


def _paddings(targets: Tensor) -> list[int]:
    """Return the values with which so many rows of targets of shape (N, T) end or begin that they may be padding."""
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
    return how.ignore_index != IGNORE_INDEX or how.nor is not None


def _beforehand(how: Weighting) -> float:
    usual = how.over in (Over.COUNTED, Over.SHIFTED, Over.ELEMENTS)
    return _ANY_VALUE if _is_special(how) else 0.0 if usual else _UNUSUAL


def _differ(hows: Sequence[Weighting], window: Window, sizes: Sequence[int]) -> bool:
    """Whether these ways of weighing give the micro-batches different shares."""
    first, *others = ([int(tally) for tally in tallies_of(how, window, sizes)] for how in hows)
    return any(
        _are_unlike(first, other, _MATTERS if _is_special(how) else 0.0)
        for how, other in zip(hows[1:], others, strict=True)
    )


def _are_unlike(mine: Sequence[int], theirs: Sequence[int], tolerance: float) -> bool:
    # In whole numbers, so that equal shares are found equal: a / A == b / B.
    total, other = sum(mine), sum(theirs)
    return (
        not total
        or not other
        or any(abs(a * other - b * total) > tolerance * b * total for a, b in zip(mine, theirs, strict=True))
    )


# --- choosing samples that tell --------------------------------------------------------------------------------------


def telling_split(weights: Tensor, best: int, size: int, chance: random.Random, *, draws: int) -> list[list[int]]:
    """Choose a few samples, and two parts of them, for which the candidates give answers that lie far apart.

    Args:
        weights: What each sample weighs, shape (candidates, samples), of at least two samples.
        best: The candidate that the others are to be told apart from.
        size: How many samples at most, at least two.
        chance: Where splits are drawn from.
        draws: How many of them to choose from.
    """
    share = weights / weights.mean(1, keepdim=True).clamp(min=1e-9)
    far = (share - share[best]).abs()
    # For each candidate the samples of which it says most unlike the best: they come to stand on one side.
    farthest = [row.nonzero().flatten().tolist() for row in far >= far.amax(1, keepdim=True)]
    splits = [_draw(farthest, weights.shape[1], size, chance) for _ in range(draws)]
    return max(splits, key=lambda split: _distance(weights, best, *split))


def _draw(farthest: Sequence[Sequence[int]], samples: int, size: int, chance: random.Random) -> list[list[int]]:
    # Three samples differ most in their loss, many cover most values.
    size = min(samples, chance.choice((_LEAST, size)), size)
    on_one_side = chance.randint(1, max(1, size // 2))
    first = list({chance.choice(chance.choice(farthest)) for _ in range(on_one_side)})
    others = [index for index in chance.sample(range(samples), min(samples, size + len(first))) if index not in first]
    return [first, others[: size - len(first)]]


def _distance(weights: Tensor, best: int, first: Sequence[int], second: Sequence[int]) -> float:
    ones, all_of_them = weights[:, first].sum(1), weights[:, [*first, *second]].sum(1)
    apart = (ones / all_of_them - ones[best] / all_of_them[best]).abs().nan_to_num(_FAR_APART)
    return float(apart.clamp(max=_FAR_APART).sum())
