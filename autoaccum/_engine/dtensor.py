"""Recognises models that `fully_shard` has sharded over ranks, and rejects them if they cannot be trained.

Such a model communicates with all ranks inside every forward and backward pass, so all ranks must run their passes
together; `_distributed/fsdp.py` implements this.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn


def is_spread(tensor: Any) -> bool:
    """Whether each rank holds only a shard of a tensor (a DTensor)."""
    # If nothing has imported the module, no DTensors exist, and the import is slow.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def is_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether any parameter of the modules is sharded over ranks."""
    return any(is_spread(parameter) for module in modules for parameter in module.parameters())


def refuse_sharded(modules: Iterable[nn.Module]) -> None:
    """Raise InvalidInputError if a parameter is sharded over ranks, where this process trains alone."""
    spread = (name for module in modules for name, one in module.named_parameters() if is_spread(one))
    if name := next(spread, None):
        raise InvalidInputError(
            f"parameter {name!r} is a DTensor, spread over ranks by fully_shard or tensor parallelism, and only fit "
            "trains such a model, in every process that torchrun started; call fit there, or leave fully_shard out"
        )


def check_sharded(modules: Iterable[nn.Module], ranks: int, asked: Mapping[str, bool]) -> int | None:
    """Reject requests that a sharded model does not support.

    Args:
        modules: The model, and losses that are modules.
        ranks: Number of processes in the training.
        asked: For each optional `fit` argument, as the user would write it, whether it was requested.

    Returns:
        The smallest micro-batch that can be trained on; None if every rank holds the whole model.

    Raises:
        InvalidInputError: The model is sharded in another way than by `fully_shard` over all ranks, or a request would
            require each rank to act by itself.
    """
    modules = list(modules)
    if not is_sharded(modules):
        return None
    if text := next((text for text, is_asked in asked.items() if is_asked), None):
        raise InvalidInputError(
            f"{text} is not for a model that fully_shard has spread over ranks, whose passes are made by all of them "
            "together; leave it out (docs/several-gpus.md says what there is instead)"
        )
    for module in modules:
        for name, parameter in module.named_parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and (size := mesh.size()) != ranks:
                raise InvalidInputError(
                    f"parameter {name!r} is spread over {size} ranks, and this training has {ranks}, each with samples "
                    "of its own; spread it over all of them (tensor and pipeline parallelism need a loop of your own)"
                )
            if parameter.requires_grad and not is_spread(parameter):
                raise InvalidInputError(
                    f"parameter {name!r} is trained and on every rank whole, while others are spread by fully_shard, "
                    "so that nothing adds up its gradients; call fully_shard on the whole model too"
                )
    return least_size(modules)


def least_size(modules: Iterable[nn.Module]) -> int:
    """Return the fewest samples that the modules can be trained on at once."""
    has_norm = any(isinstance(part, _BatchNorm) for module in modules for part in module.modules())
    return 2 if has_norm else 1  # BatchNorm rejects a single value per channel
