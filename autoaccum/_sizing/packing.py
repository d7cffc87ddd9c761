"""Fills packed micro-batches, which take the memory of their tokens, padding none. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def best_fit(each: Sequence[int], tokens: int, most: int | None) -> list[list[int]]:
    """Return which samples go together: each goes where it leaves least room (best fit, decreasing).

    In this order, `in_turn` makes the same of them: the first sample of each has fitted into none before it.

    Args:
        each: The tokens of each sample, the most first.
        tokens: The most tokens that go together; a sample of more is alone.
        most: The most samples that go together; None for no cap.
    """
    found: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # what is left in which of them, in order
    for sample, own in enumerate(each):
        at = bisect_left(rooms, (own, -1))
        if at == len(rooms):
            found.append([])
            room, index = tokens, len(found) - 1
        else:
            room, index = rooms.pop(at)
        found[index].append(sample)
        if len(found[index]) != most:
            insort(rooms, (room - own, index))
    return found


def in_turn(each: Sequence[int], tokens: int, most: int | None) -> tuple[int, ...]:
    """Return how many samples in a row go together, given the tokens of each; arguments as for `best_fit`."""
    sizes: list[int] = []
    room = 0
    for own in each:
        if not sizes or own > room or sizes[-1] == most:
            sizes.append(0)
            room = tokens
        sizes[-1] += 1
        room -= own
    return tuple(sizes)
