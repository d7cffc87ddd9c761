"""Replays a timeline on a model of PyTorch's caching allocator for CUDA, to find allocated and reserved memory.

Constants and rules are those of c10/cuda/CUDACachingAllocator.cpp on one stream, with its default settings or with
`expandable_segments`, as PYTORCH_CUDA_ALLOC_CONF sets it.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoaccum._estimate.allocation_trace import Timeline

MIB = 2**20
# kMinBlockSize: every size is rounded up to a multiple of it.
BLOCK_BYTES = 512
# kSmallSize: blocks up to this size come from small segments.
SMALL_BYTES = 1 * MIB
# kSmallBuffer: the size of a small segment.
SMALL_SEGMENT_BYTES = 2 * MIB
# kMinLargeAlloc: a block of at least this size gets its own segment.
LARGE_BYTES = 10 * MIB
# kLargeBuffer: the size of a segment for blocks in between.
MEDIUM_SEGMENT_BYTES = 20 * MIB
# kRoundLarge: a block's own segment is rounded up to a multiple of it.
ROUND_BYTES = 2 * MIB
# The variables that set it, the newer one first.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Steps to replay: the first fills the cache, the second uses its fragments.
STEPS = 2


def expands() -> bool:
    """Whether the environment sets `expandable_segments`, which the step's own process would read as well."""
    text = next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")
    return re.search(r"expandable_segments\s*:\s*true", text, re.IGNORECASE) is not None


class CapacityExceededError(Exception):
    """A block does not fit in the capacity."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment, free or allocated."""

    size: int
    small: bool
    number: int  # orders free blocks, as the address does
    free: bool = True
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Allocates and frees blocks.

    Args:
        capacity_bytes: The device's memory; None for unlimited.
        expandable: Whether each pool is one segment that grows, in place of segments of fixed sizes.

    Attributes:
        allocated_bytes: Bytes in allocated blocks now.
        reserved_bytes: Bytes in segments now.
        peak_allocated_bytes: The peak of `allocated_bytes`.
        peak_reserved_bytes: The peak of `reserved_bytes`.
    """

    def __init__(self, capacity_bytes: int | None = None, *, expandable: bool = False) -> None:
        self._capacity = capacity_bytes
        self._expandable = expandable
        self._last: dict[bool, Block | None] = {True: None, False: None}
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._segments = 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0

    def allocate(self, size_bytes: int) -> Block:
        """Allocate a block.

        Raises:
            CapacityExceededError: It does not fit even after the cache is flushed.
        """
        size = max(BLOCK_BYTES, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
        small = size <= SMALL_BYTES
        block = self._best_fit(size, small=small) or self._new_segment(size, small=small)
        rest = block.size - size
        if rest >= BLOCK_BYTES if small else rest > SMALL_BYTES:
            self._split(block, size)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free a block and merge it with free neighbours."""
        self.allocated_bytes -= block.size
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._forget(other)
                block = self._joined(*((other, block) if other is block.before else (block, other)))
        self._keep(block)

    def release_cached(self) -> None:
        """Return unused segments, or the unused parts of expandable ones, to the device."""
        for small, blocks in self._free.items():
            for entry in list(blocks):
                block = entry[2]
                unused = block.size // self._grown_by(small=small) * self._grown_by(small=small)
                if not self._expandable:
                    unused = block.size if block.before is None and block.after is None else 0
                if unused:
                    blocks.remove(entry)
                    block.free = False  # nothing merges with what is not there
                    self.reserved_bytes -= unused

    def _best_fit(self, size: int, *, small: bool) -> Block | None:
        blocks = self._free[small]
        at = bisect_left(blocks, (size, -1))
        return blocks.pop(at)[2] if at < len(blocks) else None

    def _new_segment(self, size: int, *, small: bool) -> Block:
        last = self._last[small] if self._expandable else None
        if self._expandable:
            grows_by = self._grown_by(small=small)
            lacking = size - (last.size if last is not None and last.free else 0)
            taken = -(-lacking // grows_by) * grows_by
        elif small:
            taken = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            taken = MEDIUM_SEGMENT_BYTES
        else:
            taken = -(-size // ROUND_BYTES) * ROUND_BYTES
        if self._capacity is not None and self.reserved_bytes + taken > self._capacity:
            self.release_cached()
            if self.reserved_bytes + taken > self._capacity:
                raise CapacityExceededError
        self.reserved_bytes += taken
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if last is not None and last.free:
            self._forget(last)
            last.size += taken
            return last
        self._segments += 1
        number = self._segments << 40 if last is None else last.number + last.size
        block = Block(taken, small, number, before=last)
        if last is not None:
            last.after = block
        self._last[small] = block
        return block

    @staticmethod
    def _grown_by(*, small: bool) -> int:
        return SMALL_SEGMENT_BYTES if small else MEDIUM_SEGMENT_BYTES

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.small, block.number + size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if self._last[block.small] is block:
            self._last[block.small] = rest
        self._keep(rest)

    def _joined(self, left: Block, right: Block) -> Block:
        if self._last[left.small] is right:
            self._last[left.small] = left
        left.size += right.size
        left.after = right.after
        if right.after is not None:
            right.after.before = left
        left.free = True
        return left

    def _keep(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.number, block))

    def _forget(self, block: Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect_left(blocks, (block.size, block.number))]


def replay_step(timeline: Timeline, capacity_bytes: int | None = None) -> CachingAllocator | None:
    """Replay a step from the middle of training, with the cache left by the previous step.

    Args:
        timeline: The step.
        capacity_bytes: The device's memory; None for unlimited.

    Returns:
        The allocator after the step, with its peaks; None if the capacity is too small.
    """
    allocator = CachingAllocator(capacity_bytes, expandable=expands())
    blocks: dict[int, Block] = {}
    begins = timeline.phases[1][0] if len(timeline.phases) > 1 else len(timeline.events)
    before, step = timeline.events[:begins], timeline.events[begins:]
    try:
        replay(allocator, timeline, before, blocks)
        for _ in range(STEPS):
            replay(allocator, timeline, step, blocks)
            # Blocks that a step leaves allocated are freed before the next.
            for number in blocks.keys() - set(before):
                allocator.free(blocks.pop(number))
    except CapacityExceededError:
        return None
    return allocator


def replay(allocator: CachingAllocator, timeline: Timeline, events: list[int], blocks: dict[int, Block]) -> None:
    """Replay events of a timeline.

    Args:
        allocator: The allocator.
        timeline: The timeline, for the storages' sizes.
        events: The events.
        blocks: The allocated blocks by storage; updated.

    Raises:
        CapacityExceededError: A block does not fit.
    """
    for event in events:
        if event >= 0:
            if timeline.storages[event].size_bytes:
                blocks[event] = allocator.allocate(timeline.storages[event].size_bytes)
        elif ~event in blocks:
            allocator.free(blocks.pop(~event))
