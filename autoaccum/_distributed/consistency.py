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
    from collections.abc import Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._system.notices import Notices


def check_alike(ranks: Ranks, step: GradientStep, arguments: Mapping[str, Any]) -> None:
    """Reject ranks whose model, optimizer or arguments differ, and say which differ.

    Raises:
        InvalidInputError: They differ. Raised on every rank.
    """
    mine = {
        **{name: repr(value) for name, value in arguments.items()},
        "model": _forms(step),
        "optimizer": _optimizer(step.optimizer) if isinstance(step, TrainingStep) else "",
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


def refuse_unsupported_layers(modules: Sequence[nn.Module]) -> None:
    """Reject layers that communicate in their forward pass, or whose tensors cannot be sent in flat buffers.

    Raises:
        InvalidInputError: There are such layers.
    """
    for module in modules:
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
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
            if getattr(part, "sparse", False) and isinstance(part, nn.Embedding | nn.EmbeddingBag):
                raise InvalidInputError(
                    f"layer {name!r} has sparse gradients, which several ranks cannot add up; pass sparse=False"
                )


def broadcast_weights(ranks: Ranks, step: GradientStep) -> None:
    """Give every rank the weights and buffers of rank 0.

    Raises:
        InvalidInputError: A tensor that cannot be written to in place is a view of another. Raised on every rank.
    """
    tensors = _state(step)
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
    tensors = tensors_in(first.cut(0, 1)) if first.samples else []
    said = ranks.exchange("first samples", _digest(tensors))
    if len(set(said)) == 1 and first.samples:
        notices.say(
            "every rank's loader gives the same samples, so each is used once by every rank; pass shard=True, or give "
            "each rank its own by a DistributedSampler"
        )


def _forms(step: GradientStep) -> str:
    names: list[str] = []
    for number, module in enumerate(step.objective.modules):
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            trained = "" if not isinstance(tensor, nn.Parameter) or tensor.requires_grad else " (frozen)"
            forms = " and ".join(f"{tuple(part.shape)} of {part.dtype}" for part in _parts(tensor))
            names.append(f"{number}.{name}: {forms}{trained}")
    return "; ".join(names)


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    groups = [
        {
            **{name: _plain(value) for name, value in group.items() if name != "params"},
            "parameters": len(group["params"]),
        }
        for group in optimizer.param_groups
    ]
    return f"{name_of(optimizer)} {groups}"


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _first_difference(one: str, other: str) -> str:
    pairs = itertools.zip_longest(one.split("; "), other.split("; "), fillvalue="nothing")
    here, there = next((a, b) for a, b in pairs if a != b)
    return f"{there}, and {here} on rank 0"


def _state(step: GradientStep) -> list[Tensor]:
    device = step.memory.device.type
    found = {
        id(part): part
        for module in step.objective.modules
        for tensor in itertools.chain(module.parameters(), module.buffers())
        if tensor.device.type == device and not is_spread(tensor)
        for part in _parts(tensor)
    }
    return list(found.values())


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that make up a quantised one; any other as it is."""
    if is_spread(tensor) or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _digest(tensors: Sequence[Tensor]) -> bytes:
    """Return a digest of some tensors' bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
