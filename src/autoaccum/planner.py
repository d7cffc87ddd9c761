"""How many samples go through the device at once: target and limit in, a cut out. Pure arithmetic, no torch.

A cut is a tuple of micro-batch sizes in the order in which they run. Every cut gives the same gradient, so a planner
chooses by memory and time alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum.errors import InvalidInputError
from autoaccum.records import Plan, check_positive_int

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autoaccum.records import Trial

STRATEGIES = ("balanced",)

# After a failure the number of micro-steps grows by at least this factor, so that even a device that is suddenly
# almost full is reached in a logarithmic number of attempts. At small counts the next cut is simply one step longer:
# 100 goes 2 x 50, 3 x 34, 4 x 25, and so loses less than halving does.
GROWTH_AFTER_FAILURE = 1.25


def plan(
    target_batch: int,
    max_micro_batch: int,
    *,
    strategy: str = "balanced",
    trials: Iterable[Trial] = (),
) -> Plan:
    """Cut a window of `target_batch` samples into micro-batches of at most `max_micro_batch`.

    Args:
        target_batch: Samples an optimizer update is made from.
        max_micro_batch: The most samples that the device bears at once.
        strategy: "balanced": as few micro-batches as possible, their sizes differing by at most one, the larger ones
            first; 100 with at most 37 is (34, 33, 33).
        trials: What the probe saw; no size from the smallest failed trial on is planned.

    Raises:
        InvalidInputError: A number is not a positive int, the strategy is unknown, or a trial of one sample failed.
    """
    check_positive_int("target_batch", target_batch)
    check_positive_int("max_micro_batch", max_micro_batch)
    if strategy not in STRATEGIES:
        raise InvalidInputError(f"strategy={strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    smallest_failed = min((trial.size for trial in trials if not trial.fits), default=max_micro_batch + 1)
    if smallest_failed == 1:
        raise InvalidInputError("a trial with one sample did not fit, so there is nothing to plan; see DoesNotFitError")
    return Plan(target_batch, balanced(target_batch, min(max_micro_batch, smallest_failed - 1)))


def balanced(samples: int, max_micro_batch: int) -> tuple[int, ...]:
    """Fewest micro-batches of at most `max_micro_batch`, sizes differing by at most one, the larger ones first.

    The first is never smaller than a later one, so that memory that is enough for it is enough for the window.
    """
    return _split(samples, -(-samples // max_micro_batch))


def shrink(samples: int, failed_size: int) -> int | None:
    """Return the largest micro-batch to try next where `failed_size` ran out of memory.

    Args:
        samples: Samples in the window; sizes are chosen so that they cut it evenly.
        failed_size: The size that failed, at least 1.

    Returns:
        A size below `failed_size`, or None where `failed_size` is 1.
    """
    if failed_size == 1:
        return None
    steps = -(-samples // failed_size)
    steps = max(steps + 1, int(steps * GROWTH_AFTER_FAILURE))
    # The failed size may have been smaller than an even cut gives: the next one has to be smaller than itself.
    return max(1, min(-(-samples // steps), failed_size - 1))


def _split(samples: int, parts: int) -> tuple[int, ...]:
    small, larger_ones = divmod(samples, parts)
    return (small + 1,) * larger_ones + (small,) * (parts - larger_ones)
