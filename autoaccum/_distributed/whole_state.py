"""Gathers the state of a sharded model for a checkpoint, which then is that of a whole model, and shards it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map

from autoaccum._distributed.buckets import Outcome
from autoaccum._engine.dtensor import is_spread

if TYPE_CHECKING:
    from autoaccum._distributed.process_group import Ranks


def gathered(ranks: Ranks, state: Any) -> Any:
    """Return a state with whole tensors in place of sharded ones, on the host of rank 0; None in their place elsewhere.

    All ranks call this together, with as many tensors in the same order.

    Raises:
        RankFailedError: Another rank is gone.
        Exception: The host of rank 0 has no room for them; raised there once no other rank waits any more.
    """
    outcome = Outcome()

    def whole(value: Any) -> Any:
        if not is_spread(value):
            return value
        with ranks.on_network():
            # Copies of what an optimizer trains with are on the host, which has no network of the device's.
            found = value.to(value.device_mesh.device_type).full_tensor()
        return None if ranks.rank else outcome.run(found.cpu)

    found = tree_map(whole, state)
    if outcome.failure is not None:
        raise outcome.failure
    return found


def as_spread(value: Any, like: Any) -> Any:
    """Return a tensor in the shards of another one of its shape; unchanged if that is not sharded."""
    if not is_spread(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - imports slowly, and is rarely needed

    # Every rank has the whole tensor, so none is asked for it.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
