"""Divides a window among ranks, equally or in proportion to their speed. Pure arithmetic, without torch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from autoaccum._arguments import check_bool, check_choice
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARES = ("equal", "speed")

# Windows averaged before shares change again, with most weight on the newest: machines shared with others are noisy,
# and every change of shares changes the cut.
_WINDOWS_BETWEEN = 5
_NEWEST_COUNTS = 0.3
# By how much the slowest rank must exceed the time that balanced shares would take: less is noise.
_WORTH_IT = 0.05


def check_shares(shares: object, *, shard: object) -> None:
    """Check the arguments `shares` and `shard`.

    Raises:
        InvalidInputError: One is unknown, or they contradict each other.
    """
    check_bool("shard", shard)
    check_choice("shares", shares, SHARES)
    if shares == "speed" and not shard:
        raise InvalidInputError(
            "shares='speed' needs shard=True: otherwise every rank's loader yields that rank's own samples, and "
            "fixes their number"
        )


def cut(samples: int, weights: Sequence[float]) -> list[int]:
    """Return where each rank's share of some samples begins, and where the last one ends.

    Every rank gets at least one sample: without any, it could not be seen to become faster. With fewer samples than
    ranks, the first ranks get one each, so that rank 0, whose position in an epoch represents all, always has one.

    Args:
        samples: Number of samples to divide.
        weights: Each rank's weight; shares are proportional to it.

    Returns:
        `len(weights) + 1` nondecreasing integers from 0 to `samples`.
    """
    ranks, total = len(weights), sum(weights)
    if samples < ranks:
        return [min(rank, samples) for rank in range(ranks + 1)]
    bounds = [0]
    for rank, along in enumerate(itertools.accumulate(weights[:-1]), 1):
        proportional = int(samples * along / total)
        bounds.append(max(bounds[-1] + 1, min(proportional, samples - (ranks - rank))))
    # Not computed from the weights: rounding may make all of them together a little less than their sum.
    return [*bounds, samples]


def cut_by(costs: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return where each rank's share of some samples begins, and where the last one ends, by what samples cost.

    Every rank gets at least one sample, as from `cut`.

    Args:
        costs: What each sample costs, such as its tokens.
        weights: Each rank's weight; shares of the cost are as near to proportional as whole samples allow.
    """
    ranks, samples = len(weights), len(costs)
    if samples < ranks or not any(costs):
        return cut(samples, weights)
    before = [0, *itertools.accumulate(costs)]
    bounds, at = [0], 0
    for rank, along in enumerate(itertools.accumulate(weights[:-1]), 1):
        wanted = before[-1] * along / sum(weights)
        while at < samples and abs(before[at + 1] - wanted) <= abs(before[at] - wanted):
            at += 1
        bounds.append(max(bounds[-1] + 1, min(at, samples - (ranks - rank))))
        at = bounds[-1]
    return [*bounds, samples]


class Shares:
    """The weights by which windows are divided, equal on every rank since all compute them from the same numbers.

    Args:
        ranks: Number of ranks.
        by_speed: Whether weights follow the ranks' speed.

    Attributes:
        weights: The current weights.
        by_speed: Whether weights follow the ranks' speed.
    """

    def __init__(self, ranks: int, *, by_speed: bool) -> None:
        self.weights = (1.0,) * ranks
        self.by_speed = by_speed and ranks > 1
        self._speeds: list[float] = []
        self._seen = 0

    def note(self, samples: Sequence[int], seconds: Sequence[float]) -> bool:
        """Record how long each rank has worked on its part of a window; return whether the weights have changed.

        Args:
            samples: Samples of each part.
            seconds: Seconds that each rank has worked, without waiting for others.
        """
        if not self.by_speed or not all(samples) or not all(one > 0.0 for one in seconds):
            return False
        self._seen += 1
        if self._seen == 1:
            return False  # the first window of a process has one-time costs
        now = [count / second for count, second in zip(samples, seconds, strict=True)]
        pairs = zip(self._speeds or now, now, strict=True)
        self._speeds = [before + _NEWEST_COUNTS * (speed - before) for before, speed in pairs]
        if self._seen % _WINDOWS_BETWEEN:
            return False
        # For parts like these, by the average speeds: a single window may be a slow moment of one machine.
        slowest = max(count / speed for count, speed in zip(samples, self._speeds, strict=True))
        if slowest < (1.0 + _WORTH_IT) * sum(samples) / sum(self._speeds):
            return False
        self.weights = tuple(self._speeds)
        return True
