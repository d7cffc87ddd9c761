"""How a window is shared out among ranks: equally, or by how fast each has been. Pure arithmetic, no torch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from autoaccum._arguments import check_bool, check_choice
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

SHARES = ("equal", "speed")

# Windows that are averaged, the newest counting most, before shares are set anew: machines that others use too are
# noisy, and every change of share is a change of cut.
_WINDOWS_BETWEEN = 5
_NEWEST_COUNTS = 0.3
# What the slowest rank has to take longer than all would take together: less is noise.
_WORTH_IT = 0.05


def check_shares(shares: object, *, shard: object) -> None:
    """Check the arguments of `fit`.

    Raises:
        InvalidInputError: One is unknown, or they contradict each other.
    """
    check_bool("shard", shard)
    check_choice("shares", shares, SHARES)
    if shares == "speed" and not shard:
        raise InvalidInputError(
            "shares='speed' needs shard=True: where every rank's loader gives that rank's own samples, their number is "
            "fixed by the loader"
        )


def cut(samples: int, weights: Sequence[float]) -> list[int]:
    """Return where each rank's share of some samples begins, and where the last one ends.

    Every rank gets at least one: without any it could not be seen to have become faster. Of fewer samples than ranks
    the first ranks get one each, so that rank 0, whose place in an epoch stands for all, never goes without.

    Args:
        samples: How many there are to share out.
        weights: What each rank gets, in proportion.

    Returns:
        `len(weights) + 1` whole numbers, from 0 to `samples`, none smaller than the one before.
    """
    ranks, total = len(weights), sum(weights)
    if samples < ranks:
        return [min(rank, samples) for rank in range(ranks + 1)]
    bounds = [0]
    for rank, along in enumerate(itertools.accumulate(weights[:-1]), 1):
        proportional = int(samples * along / total)
        bounds.append(max(bounds[-1] + 1, min(proportional, samples - (ranks - rank))))
    # Not from the weights: by rounding, all of them may come to a little less than their sum.
    return [*bounds, samples]


class Shares:
    """The weights by which windows are shared out, the same on every rank since all compute them from the same numbers.

    Args:
        ranks: How many ranks there are.
        by_speed: Whether they follow the ranks' speed.

    Attributes:
        weights: The weights in force.
        by_speed: Whether they follow the ranks' speed.
    """

    def __init__(self, ranks: int, *, by_speed: bool) -> None:
        self.weights = (1.0,) * ranks
        self.by_speed = by_speed and ranks > 1
        self._speeds: list[float] = []
        self._seen = 0

    def note(self, samples: Sequence[int], seconds: Sequence[float]) -> bool:
        """Note how long each rank has worked on its part of a window; return whether the weights have changed.

        Args:
            samples: Samples of each part.
            seconds: Seconds that each has taken, waiting for others not counted.
        """
        if not self.by_speed or not all(samples) or not all(one > 0.0 for one in seconds):
            return False
        self._seen += 1
        if self._seen == 1:
            return False  # the first window of a process takes what no other takes
        now = [count / second for count, second in zip(samples, seconds, strict=True)]
        pairs = zip(self._speeds or now, now, strict=True)
        self._speeds = [before + _NEWEST_COUNTS * (speed - before) for before, speed in pairs]
        if self._seen % _WINDOWS_BETWEEN:
            return False
        # Of parts like these, by the speeds of several windows: one window alone may be a slow moment of one machine.
        slowest = max(count / speed for count, speed in zip(samples, self._speeds, strict=True))
        if slowest < (1.0 + _WORTH_IT) * sum(samples) / sum(self._speeds):
            return False
        self.weights = tuple(self._speeds)
        return True
