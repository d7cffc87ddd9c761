"""Checks that all ranks of a training have the same configuration, and gives them the same weights to begin with.

What is compared when a training begins is one record, made in `make_alike`. The settings of the optimizer, which
schedulers and callbacks move, are compared again before each optimizer step; what is trained, now and then.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._arguments import listed
from autoaccum._data.nesting import tensors_in
from autoaccum._distributed.buckets import Buckets, Outcome, as_plain
from autoaccum._distributed.descriptions import checksums, is_plain, lines_of, lines_of_module, parts_of, text_of
from autoaccum._engine.dtensor import is_spread, lines_of_shards
from autoaccum._engine.finiteness import coming
from autoaccum._engine.forward_backward import TrainingStep
from autoaccum._engine.optimizers import OptimizerList, name_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._system.notices import Notices

# The options of which ranks need the same.
_OPTIONS = ("loss", "loss_reduction", "forward", "split", "batchnorm", "clip_grad_norm", "on_nan")
# Entries of an optimizer's group with an item for each parameter, of which the number is compared.
_OF_PARAMETERS = frozenset({"params", "param_names"})
# Types of settings that `repr` describes in full.
_PLAIN = frozenset({float, int, bool, str, type(None)})


def make_alike(ranks: Ranks, step: GradientStep, arguments: Mapping[str, Any]) -> None:
    """Reject what ranks cannot do together, and ranks that differ, and say in what; give all the weights of rank 0.

    Args:
        ranks: All ranks.
        step: This rank's training step.
        arguments: What has to be the same beside the step and its options, by name.

    Raises:
        InvalidInputError: They differ, which is raised on every rank; or each can tell by itself what it cannot do.
    """
    modules, options = step.objective.modules, step.options
    refuse_wrapped(modules)
    _refuse_unsupported_layers(modules)
    if (scope := options.loss_scope) != "micro_batch":
        raise InvalidInputError(
            f"loss_scope={scope!r} computes the loss of a whole window at once, but each of {ranks.size} ranks holds "
            "only a part of it; train in one process"
        )
    mine = {
        **{name: lines_of(value) for name, value in arguments.items()},
        **{name: lines_of(getattr(options, name)) for name in _OPTIONS},
        "model": [line for module in modules for line in lines_of_module(module)],
        "use of fully_shard": lines_of_shards(modules),
        "optimizer": _lines_of_optimizer(step),
        "device": [step.memory.device.type],
        "precision": [step.precision.name],
    }
    _refuse_differences(ranks.exchange("arguments", mine), "every process of a training needs the same")
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    _broadcast_weights(ranks, step, tensors)


def _refuse_differences(said: Sequence[Mapping[str, Sequence[str]]], remedy: str) -> None:
    """Raise InvalidInputError if ranks say different things, with the first of them."""
    first, *others = said
    for name, lines in first.items():
        for rank, theirs in enumerate(others, 1):
            pairs = itertools.zip_longest(theirs[name], lines, fillvalue="nothing")
            there, here = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
            if there != here:
                raise InvalidInputError(
                    f"rank {rank} has another {name} than rank 0 ({there}, and {here} on rank 0); {remedy}"
                )


class SharedSettings:
    """The settings of an optimizer's groups, compared with those of the other ranks before each optimizer step.

    Args:
        step: This rank's training step; one without an optimizer has no settings.
    """

    def __init__(self, step: GradientStep) -> None:
        self._step = step
        self._copies: dict[int, Tensor] = {}  # of settings that are on a GPU, by their identities
        self._arrival: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Begin to copy what is on a GPU: a copy made at the end of a window would wait for all of its work."""
        if self._step.memory.device.type == "cuda":
            settings = [value for group in self._groups() for value in group.values()]
            found = {id(one): one for one in settings if isinstance(one, Tensor) and one.is_cuda and not is_spread(one)}
            self._copies, self._arrival = coming(found, self._step.memory.device) if found else ({}, None)

    def digest(self) -> bytes:
        """Return a digest, equal wherever settings are the same objects or written alike."""
        text = "".join(
            repr({name: one if _is_plain(one) else self._text(name, one) for name, one in group.items()})
            for group in self._groups()
        )
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    def lines(self) -> list[str]:
        """Return them in words."""
        return [
            f"{name}={self._text(name, one)} in group {number}"
            for number, group in enumerate(self._groups())
            for name, one in sorted(group.items())
        ]

    def compare(self, ranks: Ranks) -> None:
        """Raise InvalidInputError on all ranks if their settings differ; call it where their digests do."""
        _refuse_differences(
            ranks.exchange("settings", {"optimizer": self.lines()}),
            "nothing has changed in this window. A scheduler has to be the same on all ranks, and as long on each, "
            "whatever the length of its loader; a callback has to set the same on all",
        )

    def _groups(self) -> list[dict[str, Any]]:
        return self._step.optimizer.param_groups if isinstance(self._step, TrainingStep) else []

    def _text(self, name: str, value: Any) -> str:
        if name in _OF_PARAMETERS:
            return str(len(value))
        if self._arrival is not None:
            self._arrival.synchronize()
        return text_of(self._copies.get(id(value), value))


def compare_weights(ranks: Ranks, step: GradientStep) -> None:
    """Raise InvalidInputError on all ranks if checksums of their parameters, or of the optimizer's state, differ."""
    mine = Outcome().run(lambda: _checksums(step))  # None, and no comparison, if one lacks memory for them
    said = ranks.exchange("checksums", mine and hashlib.blake2b(repr(mine).encode(), digest_size=8).digest())
    if None in said or len(set(said)) == 1:
        return
    of_all = ranks.exchange("unlike checksums", mine)
    for name in (name for one in of_all for name in one):
        if unlike := [f"rank {rank}" for rank, one in enumerate(of_all) if one.get(name) != of_all[0].get(name)]:
            raise InvalidInputError(
                f"{name} differs from that of rank 0 on {listed(unlike)}: only some ranks have written to it. Do so on "
                "all: compare what callbacks, the optimizer and its hooks do; what forward() writes to must be a buffer"
            )


def _checksums(step: GradientStep) -> dict[str, list[int]]:
    """Return checksums of the parameters and of the state of torch's own optimizers, by name."""
    device, modules = step.memory.device.type, enumerate(step.objective.modules)
    held = [pair for at, module in modules for pair in module.named_parameters(f"module {at}" if at else "")]
    named: list[tuple[str, Any]] = [(f"the parameter {name!r}", parameter) for name, parameter in held]
    if isinstance(step, TrainingStep) and _is_of_torch(step.optimizer):
        states = [(name, step.optimizer.state.get(parameter, {})) for name, parameter in held]
        named += [(f"the optimizer's {key} of {name!r}", value) for name, own in states for key, value in own.items()]
    own = {name: one for name, one in named if isinstance(one, Tensor) and one.device.type == device and is_plain(one)}
    with step.memory.lifted():
        return dict(zip(own, checksums(list(own.values())), strict=True))


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has the same state on all ranks; others than torch's may divide it among them."""
    parts = optimizer.parts if isinstance(optimizer, OptimizerList) else [optimizer]
    return all(type(part).__module__.startswith("torch.optim.") for part in parts)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind is tuple and _PLAIN.issuperset(map(type, value)))


def _lines_of_optimizer(step: GradientStep) -> list[str]:
    """Return the class of the optimizer, its settings, which parameter is in which group, and what it begins with."""
    if not isinstance(step, TrainingStep):
        return []
    optimizer = step.optimizer
    named = (pair for module in step.objective.modules for pair in module.named_parameters())
    names = {parameter: name for name, parameter in named}
    lines = [name_of(optimizer), *SharedSettings(step).lines()]
    for number, group in enumerate(optimizer.param_groups):
        lines += [f"{names[parameter]!r} in group {number}" for parameter in group["params"]]
    lines.append("a state" if optimizer.state else "no state")
    if _is_of_torch(optimizer):
        states = [(names[parameter], optimizer.state.get(parameter, {})) for parameter in step.held()]
        lines += [f"{key}={text_of(value)} of {name!r}" for name, own in states for key, value in own.items()]
    return lines


def refuse_wrapped(modules: Iterable[nn.Module]) -> None:
    """Reject models in DistributedDataParallel, unless their `forward` was replaced.

    Raises:
        InvalidInputError: There is one.
    """
    kind = nn.parallel.DistributedDataParallel
    if any(isinstance(part, kind) and "forward" not in vars(part) for one in modules for part in one.modules()):
        raise InvalidInputError(
            "the model is compiled around DistributedDataParallel, or the closure or the loss calls one in it, which "
            "would sum gradients over ranks in every backward pass, of which ranks make different numbers; call what is"
            " inside (model.module), and compile by model.compile() beforehand, without dynamo_backend= and "
            "torch_compile=True"
        )


def _refuse_unsupported_layers(modules: Sequence[nn.Module]) -> None:
    """Reject layers that communicate in their forward pass, or whose tensors cannot be sent in flat buffers."""
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
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
    tensors = list({id(part): part for tensor in whole for part in parts_of(tensor)}.values())
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
            "every rank's loader gives the same samples, so each is used once by every rank; pass shard_data=True, or "
            "give each rank its own by a DistributedSampler"
        )
