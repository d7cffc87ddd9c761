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

    import torch
    from torch import nn

# What there is for models and trainings that are refused.
OTHERWISE = (
    "train in a function with @autoaccum.find_executable_micro_batch(target=...), or run the script under `autoaccum "
    "run`"
)


def is_spread(tensor: Any) -> bool:
    """Whether each rank holds only a shard of a tensor (a DTensor)."""
    # If nothing has imported the module, no DTensors exist, and the import is slow.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def is_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether any parameter of the modules is sharded over ranks."""
    return any(is_spread(parameter) for module in modules for parameter in module.parameters())


def fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the parts of modules to which `fully_shard` was applied."""
    return [part for module in modules for part in module.modules() if is_fsdp_module(part)]


def is_fsdp_module(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module itself."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def spread_again(modules: Iterable[nn.Module]) -> None:
    """Register the shards of modules whose last forward pass has left whole parameters, as one without gradients."""
    for part in fsdp_modules(modules):
        part.reshard()


def lines_of_shards(modules: Iterable[nn.Module]) -> list[str]:
    """Return in words how `fully_shard` was asked to communicate, which has to be the same on all ranks."""
    modules = list(modules)
    named: dict[Any, str] = {
        one: name for module in modules for name, one in module.named_parameters() if is_spread(one)
    }
    lines = [
        f"{type(part).__name__} {number}: reshard_after_forward={_kept(part._get_fsdp_state(), group)}, "
        f"mp_policy={part._get_fsdp_state()._mp_policy}, of {', '.join(_names(group, named))}"
        for number, part in enumerate(fsdp_modules(modules))
        for group in _groups(part)
    ]
    # Of unlike parts of as many elements, ranks would gather a mixture.
    return lines + [f"{name}: {one.placements} of {tuple(one.device_mesh.shape)}" for one, name in named.items()]


def _names(group: Any, named: Mapping[Any, str]) -> list[str]:
    """Return the names of the parameters that are gathered at once, in the order in which they are."""
    return [named.get(one.sharded_param, "?") for one in group.fsdp_params]


def casts(modules: Iterable[nn.Module]) -> bool:
    """Whether `fully_shard` runs any of the modules in another precision than that of its parameters."""
    return any(part._get_fsdp_state()._mp_policy.param_dtype is not None for part in fsdp_modules(modules))


def means_in(modules: Iterable[nn.Module]) -> set[torch.dtype]:
    """Return the types in which `fully_shard` takes the means of gradients over ranks."""
    found = set()
    for part in fsdp_modules(modules):
        policy = part._get_fsdp_state()._mp_policy
        asked = policy.reduce_dtype or policy.param_dtype
        found |= {asked or parameter.dtype for parameter in part.parameters() if parameter.requires_grad}
    return found


def _groups(part: Any) -> list[Any]:
    """Return the groups of parameters that a part communicates at once; there is no public way."""
    state = part._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)  # in newer versions, several
    return [one for one in (found if found is not None else [state._fsdp_param_group]) if one is not None]


def _all_groups(modules: Iterable[nn.Module]) -> list[Any]:
    return [group for part in fsdp_modules(modules) for group in _groups(part)]


def _kept(state: Any, group: Any) -> str:
    mesh = group.post_forward_mesh_info
    if getattr(state, "_auto_reshard_after_forward", False):
        return "None"
    return "False" if mesh is None else "True" if mesh is group.mesh_info else str(mesh.shard_mesh_size)


def refuse_sharded(modules: Iterable[nn.Module]) -> None:
    """Raise InvalidInputError if a parameter is sharded over ranks, where this process trains alone."""
    spread = (name for module in modules for name, one in module.named_parameters() if is_spread(one))
    if name := next(spread, None):
        raise InvalidInputError(
            f"parameter {name!r} is a DTensor, spread over ranks by fully_shard or tensor parallelism, and only fit "
            "and Accumulator train such a model, in every process that torchrun started; use them there, or leave "
            "fully_shard out"
        )


def check_sharded(modules: Iterable[nn.Module], ranks: int, asked: Mapping[str, bool]) -> int | None:
    """Reject requests that a sharded model does not support.

    Args:
        modules: The model, and losses that are modules.
        ranks: Number of processes in the training.
        asked: For each optional argument, as the user would write it, whether it was requested.

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
    theirs = {parameter for part in fsdp_modules(modules) for parameter in part.parameters()}
    for module in modules:
        for name, parameter in module.named_parameters():
            mesh, placements = (getattr(parameter, name, None) for name in ("device_mesh", "placements"))
            if mesh is not None and (size := mesh.size()) != ranks:
                raise InvalidInputError(
                    f"parameter {name!r} is spread over {size} ranks, and this training has {ranks}, each with samples "
                    f"of its own; spread it over all of them, or {OTHERWISE}"
                )
            if mesh is not None and (parameter not in theirs or not _is_of_data(placements)):
                raise InvalidInputError(
                    f"parameter {name!r} is a DTensor of {placements}, as tensor parallelism makes it, whose "
                    f"ranks share samples; use fully_shard alone, or {OTHERWISE}"
                )
            if parameter.requires_grad and mesh is None:
                raise InvalidInputError(
                    f"parameter {name!r} is trained and on every rank whole, while others are spread by fully_shard, "
                    "so that nothing adds up its gradients; call fully_shard on the whole model too"
                )
    if any(getattr(group, "gradient_divide_factor", None) is not None for group in _all_groups(modules)):
        raise InvalidInputError(
            "set_gradient_divide_factor(...) changes what gradients are divided by, and autoaccum weighs them itself; "
            "leave it out"
        )
    return least_size(modules)


def refuse_offloaded(modules: Iterable[nn.Module]) -> None:
    """Raise InvalidInputError if `fully_shard` keeps parameters on the host; call it before modules are moved."""
    if any(type(group.offload_policy).__name__ == "CPUOffloadPolicy" for group in _all_groups(modules)):
        raise InvalidInputError(
            "offload_policy=CPUOffloadPolicy(...) keeps parameters on the host, and autoaccum trains what is on the "
            f"device; leave it out, or {OTHERWISE}"
        )


def _is_of_data(placements: Any) -> bool:
    """Whether a DTensor is spread by `fully_shard` alone: in one dimension of ranks, with copies in those before it."""
    *before, last = placements
    return last.is_shard() and all(placement.is_replicate() for placement in before)


def least_size(modules: Iterable[nn.Module]) -> int:
    """Return the fewest samples that the modules can be trained on at once."""
    has_norm = any(isinstance(part, _BatchNorm) for module in modules for part in module.modules())
    return 2 if has_norm else 1  # BatchNorm rejects a single value per channel
