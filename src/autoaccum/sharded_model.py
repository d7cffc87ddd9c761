"""Models whose parameters `fully_shard` has spread over ranks: recognised, and refused.

Such a model talks to all ranks inside every forward and backward pass, and what `fit` does on several ranks rests on
passes that do not: a rank that cuts otherwise, or runs out of memory, would leave the others waiting for good.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def refuse_sharded(modules: Iterable[nn.Module]) -> None:
    """Refuse modules of which each rank holds a part only.

    Raises:
        InvalidInputError: A parameter is spread over ranks (a DTensor).
    """
    # Where nothing has imported it there are none, and the import takes long.
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return
    for module in modules:
        for name, parameter in module.named_parameters():
            if isinstance(parameter, tensors.DTensor):
                raise InvalidInputError(
                    f"parameter {name!r} is a DTensor, spread over ranks by fully_shard or tensor parallelism; every "
                    "rank must hold the whole model here, so leave that out, or train with a loop of your own"
                )
