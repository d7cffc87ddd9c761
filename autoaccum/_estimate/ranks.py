"""What a training step takes on each of several ranks, from its timeline on one: buckets of gradients, or shards.

Whole models (docs/several-gpus.md): each rank holds the model and sends gradients through buckets of 25 MiB.

Sharded models (docs/several-gpus.md): `fully_shard` of each repeated block and of the model. A rank holds its share of
weights, gradients and optimizer state, and beside them what is whole at once: the model's own group (what is in no
block), which stays gathered until the backward pass has ended, and of blocks the one that computes and the next one;
likewise their gradients in the backward pass. No measurement on GPUs confirms this, and the network library's own
memory is not counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoaccum._distributed.buckets import BUCKET_BYTES
from autoaccum._estimate.allocation_trace import Category
from autoaccum._saving.checkpointing import repeated_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from autoaccum._estimate.allocation_trace import Timeline

_SHARDED = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
# Blocks whose weights, or gradients, are whole at once.
_AT_ONCE = 2


def in_buckets(timeline: Timeline) -> Timeline:
    """Return the step of a rank that holds the whole model, with its buckets."""
    return timeline.with_held(min(_bytes_of(timeline, Category.GRADIENTS), BUCKET_BYTES))


def sharding(model: nn.Module, ranks: int) -> Callable[[Timeline], Timeline]:
    """Return a function that makes the step of one rank of a sharded model from that of the whole model."""
    whole = sum(parameter.nbytes for parameter in model.parameters()) or 1
    blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in repeated_blocks(model)]
    largest, rest = max(blocks, default=0) / whole, max(0, whole - sum(blocks)) / whole

    def of_a_rank(timeline: Timeline) -> Timeline:
        start = next((start for start, name in timeline.phases if name == "optimizer"), len(timeline.events))
        in_optimizer_step = {event for event in timeline.events[start:] if event >= 0}
        storages = [
            replace(one, size_bytes=-(-one.size_bytes // ranks))
            if one.category in _SHARDED or number in in_optimizer_step
            else one
            for number, one in enumerate(timeline.storages)
        ]
        gathered = _bytes_of(timeline, Category.PARAMETERS) * (rest + _AT_ONCE * largest)
        reduced = _bytes_of(timeline, Category.GRADIENTS) * max(rest, _AT_ONCE * largest)
        # An optimizer step needs less than they, so it does not matter that they are held in it too.
        return replace(timeline, storages=storages).with_held(int(gathered + reduced))

    return of_a_rank


def _bytes_of(timeline: Timeline, category: Category) -> int:
    return sum(one.size_bytes for one in timeline.storages if one.category is category)
