"""Cuts for scripts that accumulate gradients themselves: equal micro-batches whose sum is exactly the target batch.

Such a script uses one size and a number of steps, so sizes are divisors of a rank's share. Nothing is rounded; if a
target batch has few divisors, a remark suggests a better one nearby.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from autoaccum._arguments import check_positive_int
from autoaccum._sizing.planner import MOST_STEPS_FOR_EQUAL_SIZES, shrink
from autoaccum.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of one update of a script: `micro_batch * accum_steps * world_size == target_batch`.

    Attributes:
        target_batch: Samples per update, over all ranks.
        micro_batch: Samples at once, on one rank.
        accum_steps: Micro-batches per update, on one rank.
        world_size: Ranks.
    """

    target_batch: int
    micro_batch: int
    accum_steps: int
    world_size: int

    @property
    def share(self) -> int:
        """Samples per update, on one rank."""
        return self.micro_batch * self.accum_steps

    def __str__(self) -> str:
        ranks = "" if self.world_size == 1 else f" on each of {self.world_size} ranks"
        samples = "1 sample" if self.micro_batch == 1 else f"{self.micro_batch} samples"
        steps = f"micro-batches of {samples}, {self.accum_steps} per update{ranks}"
        return f"target batch {self.target_batch}: {steps}"


def cut_within(target_batch: int, world_size: int, most: int | None = None) -> Cut:
    """Return the cut into the largest equal micro-batches.

    Args:
        target_batch: Samples per update, over all ranks.
        world_size: Ranks.
        most: The largest micro-batch on one rank; None for its whole share.

    Raises:
        InvalidInputError: A number is not a positive int, or the ranks cannot have equal shares.
    """
    check_positive_int("target_batch", target_batch)
    check_positive_int("world_size", world_size)
    share, rest = divmod(target_batch, world_size)
    if rest:
        near = [samples for samples in (share * world_size, (share + 1) * world_size) if samples]
        raise InvalidInputError(
            f"target_batch={target_batch} cannot be divided by world_size={world_size} ranks; choose a multiple "
            f"of {world_size}, such as {' or '.join(map(str, near))}"
        )
    size = _largest_divisor(share, share if most is None else check_positive_int("micro_batch", most))
    return Cut(target_batch, size, share // size, world_size)


def smaller(cut: Cut, failed: int) -> Cut | None:
    """Return the next cut to try after `failed` samples at once ran out of memory; None if there is none."""
    most = shrink(cut.share, min(failed, cut.micro_batch))
    return None if most is None else cut_within(cut.target_batch, cut.world_size, most)


def remark(cut: Cut, most: int) -> str | None:
    """Return a remark if the target batch has few divisors, with a better target nearby.

    Args:
        cut: The cut that was chosen.
        most: The largest micro-batch allowed.
    """
    fewest = -(-cut.share // most)
    if cut.accum_steps <= MOST_STEPS_FOR_EQUAL_SIZES * fewest:
        return None
    better = round(cut.share / fewest) * fewest * cut.world_size
    return (
        f"of the sizes up to {most} only {cut.micro_batch} divides the {cut.share} samples of a rank, which needs "
        f"{cut.accum_steps} micro-batches instead of {fewest}; --target-batch {better} has a better cut"
    )


def _largest_divisor(share: int, most: int) -> int:
    # By number of parts up to the square root, then by size: the result is near the fewest parts, and the search is
    # short even for a large prime.
    root = math.isqrt(share)
    by_parts = (share // parts for parts in range(-(-share // min(most, share)), root + 1) if share % parts == 0)
    by_size = (size for size in range(min(most, root), 0, -1) if share % size == 0)
    return next(itertools.chain(by_parts, by_size))
