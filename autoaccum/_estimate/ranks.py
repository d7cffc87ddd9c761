"""What a training step takes on each of several ranks, from its timeline on one: buckets of gradients, or shards.

Whole models (docs/several-gpus.md): each rank holds the model and sends gradients through buckets of 25 MiB.

Sharded models (docs/several-gpus.md): `fully_shard` of each repeated block and of the model. A rank holds its share of
weights, gradients and optimizer state. PyTorch's documentation of `fully_shard` gives the rest: the model's own group,
what is in no block, stays gathered until the backward pass has ended; of blocks, one computes while the next one is
gathered; in the backward pass the gradients of one block are made while those of another are being reduced. No
measurement on cards confirms this, and the network library's own memory is not counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoaccum._distributed.buckets import BUCKET_BYTES
from autoaccum._engine.checkpointing import repeated_blocks
from autoaccum._estimate.allocation_trace import Category, Storage, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_SHARDED = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
# Blocks whose weights, or gradients, are whole at once.
_AT_ONCE = 2


def in_buckets(timeline: Timeline) -> Timeline:
    """Return the step of a rank that holds the whole model, with its buckets."""
    gradients = _bytes_of(timeline, Category.GRADIENTS)
    return timeline.with_held(min(gradients, BUCKET_BYTES))


def sharding(model: nn.Module, ranks: int) -> Callable[[Timeline], Timeline]:
    """Return a function that makes the step of one rank of a sharded model from that of the whole model."""
    whole = sum(parameter.nbytes for parameter in model.parameters()) or 1
    blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in repeated_blocks(model)]
    largest, rest = max(blocks, default=0) / whole, max(0, whole - sum(blocks)) / whole

    def of_a_rank(timeline: Timeline) -> Timeline:
        weights = _bytes_of(timeline, Category.PARAMETERS)
        gradients = _bytes_of(timeline, Category.GRADIENTS)
        update = _made_in_update(timeline)
        storages = [
            replace(one, size_bytes=-(-one.size_bytes // ranks))
            if one.category in _SHARDED or number in update
            else one
            for number, one in enumerate(timeline.storages)
        ]
        gathered = int(weights * (rest + _AT_ONCE * largest))
        reduced = int(gradients * max(rest, _AT_ONCE * largest))
        shards = replace(timeline, storages=storages)
        return _with_spans(shards, [("forward", gathered), ("backward", reduced)], until="optimizer")

    return of_a_rank


def _bytes_of(timeline: Timeline, category: Category) -> int:
    return sum(one.size_bytes for one in timeline.storages if one.category is category)


def _made_in_update(timeline: Timeline) -> set[int]:
    start = next((start for start, name in timeline.phases if name == "optimizer"), len(timeline.events))
    return {event for event in timeline.events[start:] if event >= 0}


def _with_spans(timeline: Timeline, spans: Sequence[tuple[str, int]], *, until: str) -> Timeline:
    """Return a timeline with further storages, each from the beginning of a phase to that of a later one."""
    starts = {name: start for start, name in reversed(timeline.phases)}
    end = starts.get(until, len(timeline.events))
    storages, inserted = list(timeline.storages), []
    for phase, size_bytes in spans:
        if phase in starts and size_bytes:
            inserted += [(starts[phase], len(storages)), (end, ~len(storages))]
            storages.append(Storage(size_bytes, Category.WORKSPACE, "ranks"))
    events = list(timeline.events)
    for index, event in sorted(inserted, key=lambda one: -one[0]):
        events.insert(index, event)
    # A phase begins with what is inserted at its start, but for what ends there.
    phases = [
        (start + sum(index < start or (index == start and event < 0) for index, event in inserted), name)
        for start, name in timeline.phases
    ]
    return Timeline(timeline.size, storages, events, phases)
