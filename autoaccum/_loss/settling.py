"""Settles a window: what its processes multiply their gradients by, once the weights of all micro-batches are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from autoaccum._loss.batch_counts import OF_WINDOWS
from autoaccum._loss.summands import is_same
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.knowledge import LossKnowledge
    from autoaccum._loss.summands import SummandKey

# The relative difference up to which quotients of predicted and true weights are one number.
ONE_NUMBER = 1e-6
# That of a window's weights, in two passes through it, from which a warning tells of it.
_MOVES = 1e-3
_ROUNDING = 1e-14  # of double precision
# The relative difference from which numbers that multiply a mean are unlike: counts in half precision differ by less.
_UNLIKE = 2e-2
_NONE = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Totals:
    """What is known of the weights of a window before it is computed, or computed again.

    Attributes:
        weights: What predicts the weight of each summand; or the weights themselves, as a pass has shown them.
        samples: The samples of the window, over all processes.
        is_exact: Whether they are the weights themselves.
    """

    weights: Mapping[SummandKey, float]
    samples: int
    is_exact: bool = False


class NotSettled(Exception):  # noqa: N818 - it is no error of the user's
    """The weights of a window were predicted wrong: it is made again.

    Args:
        weights: The true ones.
    """

    def __init__(self, weights: Mapping[SummandKey, float]) -> None:
        super().__init__("the weights of its losses were predicted wrong")
        self.weights = weights


class PartWeights(NamedTuple):
    """What a process tells of the weights of its part of a window.

    Attributes:
        weights: By summand: its weight, what predicted that, and the least in magnitude that the window's can be.
        exists: By name, whether a loss is finite wherever nothing counts in it.
        sums: By sums that may be divided by max(k, n): their divisor, and each count of the part with the most in a
            micro-batch.
        units: By summand, where a batch holds numbers: its weight over what its part counts.
    """

    weights: Mapping[SummandKey, tuple[float, float, float]] = {}
    exists: Mapping[str, bool] = {}
    sums: Mapping[SummandKey, tuple[float, Mapping[Count, tuple[float, float]]]] = {}
    units: Mapping[SummandKey, float] = {}


def settle(
    knowledge: LossKnowledge, parts: Sequence[PartWeights], *, is_exact: bool, is_common: bool = False
) -> list[float]:
    """Return what the gradients and losses of each part are multiplied by; all processes find the same.

    Args:
        knowledge: What is known of the losses; that of sums is narrowed down.
        parts: What the processes tell.
        is_exact: Whether weights were predicted by those of an earlier pass.
        is_common: Whether all parts have one gradient, of which each process holds a shard.

    Raises:
        NotSettled: The predictions of some part are not off by one number.
        InvalidInputError: Nothing counts in the window, and its loss does not exist; or parts are multiplied by unlike
            numbers.
    """
    for key in {key: None for part in parts for key in part.units}:
        units = [unit for part in parts if (unit := part.units.get(key))]
        if are_unlike(units):
            raise has_unlike_factors(key[0])
    totals: dict[SummandKey, float] = {}
    for key in {key: None for part in parts for key in part.weights}:
        found = [part.weights[key] for part in parts if key in part.weights]
        total, least = sum(weight for weight, *_ in found), max((one for *_, one in found), key=abs)
        totals[key] = least if abs(total) < abs(least) else total
        exists = [part.exists[key[0]] for part in parts if key[0] in part.exists]
        if not totals[key] and not (exists and all(exists)):
            raise nothing_counts(key[0])
    _look_for_clamps(knowledge, parts)
    ratios = [
        [
            *(
                predicted / totals[key]
                for key, (weight, predicted, least) in part.weights.items()
                if totals[key] and (weight or least)  # what has a gradient
            ),
            *([1.0] if knowledge.has_sum else []),
        ]
        for part in parts
    ]
    if is_common:
        ratios = [[ratio for own in ratios for ratio in own]] * len(parts)
    ratios = [own or [1.0] for own in ratios]  # of nothing
    off = max((max(own) - min(own)) / max(map(abs, own)) for own in ratios)
    if not is_exact:
        knowledge.failures = knowledge.failures + 1 if off > ONE_NUMBER else 0
        if off > ONE_NUMBER:
            raise NotSettled(totals)
    elif off > _MOVES:
        knowledge.said.warn(
            "what the loss is divided by is not the same in two passes over a window, so its gradient may differ from "
            "the whole batch's; return (sum, weight) pairs"
        )
    return [1.0 if knowledge.has_sum or is_same(own[0], 1.0, _ROUNDING) else own[0] for own in ratios]


def _look_for_clamps(knowledge: LossKnowledge, parts: Sequence[PartWeights]) -> None:
    """Warn of a sum that may be divided by max(k, n), where n is at most k in all micro-batches, and more in all."""
    for key in {key: None for part in parts for key in part.sums}:
        known = knowledge.summands[key[0]][key[1]]
        own = [part.sums[key] for part in parts if key in part.sums]
        totals = {count: sum((counts.get(count, _NONE)[0] for _, counts in own), start=0.0) for count in own[0][1]}
        more = {count for count in known.hints if totals.get(count, 0.0) > known.least and totals[count].is_integer()}
        if any(divisor != known.least for divisor, _ in own):
            more = set(known.hints)  # what changes from window to window is no k
        elif any(count[0] in OF_WINDOWS and is_same(total, known.least) for count, total in totals.items()):
            more = set()  # it counts the window
        elif any(all(counts.get(count, _NONE)[1] <= known.least for _, counts in own) for count in more):
            knowledge.said.of_divisor(key[0], known.least, is_only=len(knowledge.items()) == 1)
        if more:
            knowledge.replace(key, hints={count: each for count, each in known.hints.items() if count not in more})


def are_unlike(numbers: Sequence[float]) -> bool:
    """Whether numbers differ by more than counts are rounded."""
    return bool(numbers) and max(numbers) - min(numbers) > _UNLIKE * max(map(abs, numbers))


def has_unlike_factors(name: str) -> InvalidInputError:
    """Return the error for a mean whose factor differs between parts of a window."""
    return InvalidInputError(
        f"loss {name!r} is a mean times a number that differs between micro-batches (a drawn one, as of mixup, or a "
        "number of a batch of the loader), and its graph does not tell such a factor from a weight; return one value "
        "per sample (reduction='none') or the (sum, weight) pair, or pass loss_reduction='mean' to average over samples"
    )


def nothing_counts(name: str) -> InvalidInputError:
    """Return the error for a window in which nothing counts, which every rank raises."""
    return InvalidInputError(
        f"no target of this window counts (what loss {name!r} is divided by is 0), so the mean loss over it, a "
        "division by 0, does not exist; leave such samples out"
    )
