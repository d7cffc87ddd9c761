"""Names the blocks of a model that are checkpointed, by their numbers in the model's order from 0.

"4" is the first four blocks, and "0-2,5-5" the blocks 0, 1, 2 and 5.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# No model has a number of blocks with more digits.
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")


def is_name(text: str) -> bool:
    """Whether a text names blocks: a number of them, or ranges that rise and do not overlap."""
    if _COUNT.fullmatch(text):
        return True
    found = [_RANGE.fullmatch(part) for part in text.split(",")]
    if not all(found):
        return False
    bounds = [int(bound) for one in found if one is not None for bound in one.groups()]
    rises = all(first <= last for first, last in zip(bounds[::2], bounds[1::2], strict=True))
    return rises and all(last < first for last, first in zip(bounds[1::2], bounds[2::2], strict=False))


def numbers_in(text: str, count: int) -> frozenset[int]:
    """Return the numbers of the blocks that a name is for, of a model with `count` blocks."""
    if "-" not in text:
        return frozenset(range(min(int(text), count)))
    bounds = [tuple(map(int, part.split("-"))) for part in text.split(",")]
    return frozenset(number for first, last in bounds for number in range(first, min(last + 1, count)))


def name_of(numbers: Iterable[int]) -> str:
    """Return the name of these blocks; the shorter one where they are the first of the model."""
    ordered = sorted(numbers)
    if ordered == list(range(len(ordered))):
        return str(len(ordered))
    breaks = [at for at, (one, other) in enumerate(pairwise(ordered), start=1) if other != one + 1]
    groups = [ordered[first:last] for first, last in pairwise([0, *breaks, len(ordered)])]
    return ",".join(f"{group[0]}-{group[-1]}" for group in groups)
