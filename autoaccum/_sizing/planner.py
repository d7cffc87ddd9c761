"""Cuts a window into micro-batches of at most a given size. Pure arithmetic, no torch.

A cut is a tuple of micro-batch sizes in execution order. Every cut gives the same gradient, so a planner chooses by
memory and time alone. It measures nothing itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autoaccum._arguments import check_positive_int, shown
from autoaccum._records import Plan, Trial
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence


# After a failure the number of micro-batches grows by at least this factor, so even on a device that is suddenly almost
# full a fitting size is found in a logarithmic number of attempts. At small counts the next cut is simply one step
# longer (100 becomes 2 x 50, 3 x 34, 4 x 25), which loses less than halving.
GROWTH_AFTER_FAILURE = 1.25
# Equal sizes may take at most this many times the fewest micro-batches; 101 with at most 50 would be 101 x 1.
MOST_STEPS_FOR_EQUAL_SIZES = 2
# A longer cut is a mistake, and its tuple would take gigabytes.
MOST_STEPS = 100_000_000
# Longer cuts are run-length encoded for display: "4x256".
_CUT_SPELLED_OUT = 4


def plan(
    target_batch: int,
    max_micro_batch: int,
    *,
    trials: Iterable[Trial] = (),
) -> Plan:
    """Cut a window of `target_batch` samples into micro-batches of at most `max_micro_batch`.

    There are as few as possible, their sizes differ by at most one, and the larger ones come first: 100 with at most 37
    is (34, 33, 33).

    Args:
        target_batch: Samples per optimizer step.
        max_micro_batch: The most samples that fit on the device at once.
        trials: Trials of the probe; all planned sizes are below the smallest failed trial.

    Raises:
        InvalidInputError: A number is not a positive int, or a trial of one sample failed.
    """
    check_positive_int("target_batch", target_batch)
    check_positive_int("max_micro_batch", max_micro_batch)
    trials = tuple(trials) if isinstance(trials, Iterable) else trials
    if not isinstance(trials, tuple) or not all(isinstance(trial, Trial) for trial in trials):
        raise InvalidInputError(f"trials={shown(trials)} must be records.Trial, as find_micro_batch returns")
    for trial in trials:
        check_positive_int("the size of each of trials", trial.size)
    smallest_failed = min((trial.size for trial in trials if not trial.fits), default=max_micro_batch + 1)
    if smallest_failed == 1:
        raise InvalidInputError("a trial with one sample did not fit, so there is nothing to plan; see DoesNotFitError")
    most = min(max_micro_batch, smallest_failed - 1)
    return planned(target_batch, most)


def planned(target_batch: int, most: int, *, is_uniform: bool = False) -> Plan:
    """Return the plan of `cut`.

    Raises:
        InvalidInputError: It has too many micro-batches.
    """
    if target_batch // most > MOST_STEPS:
        raise InvalidInputError(
            f"target_batch={target_batch} in micro-batches of at most {most} takes more than {MOST_STEPS} of them per "
            "optimizer step; pass a smaller target or larger micro-batches"
        )
    return Plan(target_batch, cut(target_batch, most, is_uniform=is_uniform))


def cut(samples: int, max_micro_batch: int, *, is_uniform: bool = False) -> tuple[int, ...]:
    """Cut consecutive samples as `plan` does.

    Args:
        samples: The number of samples.
        max_micro_batch: The most in a micro-batch.
        is_uniform: Whether to cut into equal sizes, for compiled models, if that takes at most twice the fewest
            micro-batches: 100 with at most 37 is (25, 25, 25, 25). Otherwise the fewest, equal except for a smaller
            last one: 101 with at most 50 is (34, 34, 33).
    """
    return (_uniform if is_uniform else balanced)(samples, max_micro_batch)


def balanced(samples: int, max_micro_batch: int) -> tuple[int, ...]:
    """Return the fewest micro-batches of at most `max_micro_batch`, sizes differing by at most one, larger ones first.

    The first is never smaller than a later one, so if it fits in memory, all do.
    """
    parts = -(-samples // max_micro_batch)
    small, larger_ones = divmod(samples, parts)
    return (small + 1,) * larger_ones + (small,) * (parts - larger_ones)


def shrink(samples: int, failed_size: int, growth: float = GROWTH_AFTER_FAILURE) -> int | None:
    """Return the largest micro-batch to try after `failed_size` ran out of memory; None after a single sample.

    The number of micro-batches grows by at least one, and by the factor `growth`.
    """
    if failed_size == 1:
        return None
    steps = -(-samples // failed_size)
    steps = max(steps + 1, int(steps * growth))
    # The failed size may have been smaller than in an even cut: the next one has to be smaller still.
    return max(1, min(-(-samples // steps), failed_size - 1))


def _uniform(samples: int, most: int) -> tuple[int, ...]:
    fewest = -(-samples // most)
    for parts in range(fewest, min(samples, MOST_STEPS_FOR_EQUAL_SIZES * fewest) + 1):
        if samples % parts == 0:
            return (samples // parts,) * parts
    # The smallest size that takes no additional step, so that the last part is closest to the others.
    size = -(-samples // fewest)
    return (*(size,) * (fewest - 1), samples - size * (fewest - 1))


def format_cut(micro_batches: Sequence[int]) -> str:
    """Return a cut in readable form: "34+33+33", or "4 x 256 + 1 x 10" if it is long."""
    if len(micro_batches) <= _CUT_SPELLED_OUT:
        return "+".join(str(size) for size in micro_batches)
    runs = ((len(list(run)), size) for size, run in itertools.groupby(micro_batches))
    return " + ".join(f"{count} x {size}" for count, size in runs)
