"""Checks that all ranks of a training started with the same configuration, and gives them the same initial weights."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoaccum._data.nesting import tensors_in
from autoaccum._distributed.buckets import Buckets, Outcome, as_plain
from autoaccum._engine.dtensor import is_spread
from autoaccum._engine.forward_backward import TrainingStep
from autoaccum._engine.optimizers import name_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._system.notices import Notices


def make_alike(ranks: Ranks, step: GradientStep, arguments: Mapping[str, Any]) -> None:
    """Reject what ranks cannot do together, and ranks that differ, and say in what; give all the weights of rank 0.

    Raises:
        InvalidInputError: They differ, which is raised on every rank; or each can tell by itself what it cannot do.
    """
    modules = step.objective.modules
    _refuse_unsupported_layers(modules)
    if (scope := step.options.loss_scope) != "micro_batch":
        raise InvalidInputError(
            f"loss_scope={scope!r} computes the loss of a whole window at once, but each of {ranks.size} ranks holds "
            "only a part of it; train in one process"
        )
    named = [(f"{at}.{name}", tensor) for at, module in enumerate(modules) for name, tensor in _tensors(module)]
    mine = {
        **{name: repr(value) for name, value in arguments.items()},
        "model": "; ".join(f"{name}: {_form(tensor)}" for name, tensor in named),
        "optimizer": _in_words(step.optimizer) if isinstance(step, TrainingStep) else "",
        "device": step.memory.device.type,
        "precision": step.precision.name,
    }
    said = ranks.exchange("arguments", mine)
    for name in mine:
        for rank, theirs in enumerate(said[1:], 1):
            if theirs[name] != said[0][name]:
                found = _first_difference(said[0][name], theirs[name])
                raise InvalidInputError(
                    f"rank {rank} has another {name} than rank 0 ({found}); every process of a training needs the same"
                )
    _broadcast_weights(ranks, step, [tensor for _, tensor in named])


def _refuse_unsupported_layers(modules: Sequence[nn.Module]) -> None:
    """Reject layers that communicate in their forward pass, or whose tensors cannot be sent in flat buffers."""
    for module in modules:
        for name, tensor in _tensors(module):
            if tensor.layout is not torch.strided:
                raise InvalidInputError(
                    f"{name!r} is a tensor of layout {tensor.layout}, which several ranks cannot send each other; keep "
                    "its indices and values as two dense buffers"
                )
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                raise InvalidInputError(
                    f"layer {name!r} is a SyncBatchNorm, which waits for all ranks in every forward pass; each rank "
                    "cuts its windows by itself, so use BatchNorm (its statistics are averaged after every window) "
                    "or GroupNorm"
                )


def _broadcast_weights(ranks: Ranks, step: GradientStep, named: Sequence[Tensor]) -> None:
    """Give every rank the tensors of rank 0, except for those that are sharded or on another device.

    Raises:
        InvalidInputError: A tensor that cannot be written to in place is a view of another. Raised on every rank.
    """
    device = step.memory.device.type
    whole = (one for one in named if one.device.type == device and not is_spread(one))
    tensors = list({id(part): part for tensor in whole for part in _parts(tensor)}.values())
    for tensor in tensors:
        if (plain := as_plain(tensor)) is not tensor:
            storage = tensor.untyped_storage().data_ptr()
            if any(one is not tensor and one.untyped_storage().data_ptr() == storage for one in tensors):
                raise InvalidInputError(
                    f"a tensor of the model, of shape {tuple(tensor.shape)}, is an expanded, conjugate or negative "
                    "view of another of its tensors, and several ranks write to each by itself; compute it in forward()"
                )
            tensor.data = plain
    outcome, buckets = Outcome(), Buckets(tensors, step.memory.device, range(len(tensors)))
    ranks.exchange("weights")  # no rank has failed yet
    buckets.add_up(outcome, tensors, ranks.all_reduce, factors=[float(ranks.rank == 0)] * len(tensors))
    if outcome.failure is not None:
        raise outcome.failure


def warn_of_same_samples(ranks: Ranks, first: Window, notices: Notices) -> None:
    """Report once if every rank's loader yields the same samples."""
    values = [tensor.tolist() for tensor in tensors_in(first.cut(0, 1))] if first.samples else []
    said = ranks.exchange("first samples", hashlib.blake2b(repr(values).encode()).digest())
    if len(set(said)) == 1 and first.samples:
        notices.say(
            "every rank's loader gives the same samples, so each is used once by every rank; pass shard=True, or give "
            "each rank its own by a DistributedSampler"
        )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _form(tensor: Tensor) -> str:
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    parts = " and ".join(f"{tuple(part.shape)} of {part.dtype}" for part in _parts(tensor))
    return f"{parts} (frozen)" if is_frozen else parts


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that make up a quantised one; any other as it is."""
    if is_spread(tensor) or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _in_words(optimizer: torch.optim.Optimizer) -> str:
    found = [name_of(optimizer)]
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            plain = value.tolist() if isinstance(value, Tensor) else len(value) if name == "params" else value
            found.append(f"{name}={plain} in group {number}")
    return "; ".join(found)


def _first_difference(one: str, other: str) -> str:
    pairs = itertools.zip_longest(one.split("; "), other.split("; "), fillvalue="nothing")
    here, there = next((a, b) for a, b in pairs if a != b)
    return f"{there}, and {here} on rank 0"
