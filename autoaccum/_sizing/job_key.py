"""Describes a training job by whatever determines the memory of its steps, as the key of the plan cache.

The description is coarse, since the next start confirms a cached plan by a trial. It covers classes, shapes, precision,
device, limit and versions, but not code, values or settings such as learning rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoaccum._records import SAMPLES
from autoaccum._sizing.cache import Key, digest_of
from autoaccum._system.own_distribution import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._memory.base import MemoryBackend


def key_of(
    modules: Sequence[nn.Module],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | str,
    memory: MemoryBackend,
    precision: str,
    target_batch: int,
    limit_bytes: int | None,
    loss_scope: str,
    cap: int | None = None,
    counts: str = SAMPLES,
    saves: Sequence[str] = (),
) -> Key:
    """Return the key of a job.

    Args:
        modules: The model, already on its device, and losses that are modules.
        batch: A batch; only the structure of a sample matters, not their number.
        optimizer: Only its class matters; or what stands for it, in a loop of the user's own.
        memory: The device.
        precision: The precision in use.
        target_batch: Samples per update.
        limit_bytes: In the memory backend's terms; None for no limit.
        loss_scope: As for `fit`.
        counts: What `target_batch` and sizes count, as in `Plan`.
        cap: The most samples allowed at once: a result found under a cap does not tell what fits without it.
        saves: What saves memory, as `fit` takes it in `memory`.
    """
    about: dict[str, str | int | None] = {
        "model": _class_name(modules[0]),
        "parameters": sum(0 if is_lazy(parameter) else parameter.numel() for parameter in modules[0].parameters()),
        "optimizer": optimizer if isinstance(optimizer, str) else _class_name(optimizer),
        "precision": precision,
        "device": memory.name,
        "device_bytes": memory.reading().total_bytes,
        "limit_bytes": limit_bytes,
        "target_batch": target_batch,
        "loss_scope": loss_scope,
        "torch": str(torch.version.__version__),
        "autoaccum": __version__,
    }
    structures = [_structure(module) for module in modules]
    marks = [*([counts] if counts != SAMPLES else []), *saves]
    most = target_batch if counts == SAMPLES else None
    return Key(digest_of([about, structures, _form(batch), cap, *marks]), most, about)


def _structure(model: nn.Module) -> list[Any]:
    # Including boolean attributes: with `gradient_checkpointing` on, a model needs much less memory.
    modules = [[name, _class_name(module), _switches(module)] for name, module in model.named_modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [modules, [[name, *_shape(tensor), tensor.requires_grad] for name, tensor in tensors]]


def _switches(module: nn.Module) -> dict[str, bool]:
    # A forward of its own is another than that of its class: it may save memory.
    return {name: value for name, value in vars(module).items() if type(value) is bool} | (
        {"forward": True} if "forward" in vars(module) else {}
    )


def _shape(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), None if is_lazy(tensor) else list(tensor.shape)]


def _form(batch: Any) -> Any:
    """Return the nesting, types and shapes of one sample."""
    if isinstance(batch, Tensor | np.ndarray):
        return [str(batch.dtype), batch.ndim, list(batch.shape[1:])]
    if isinstance(batch, Mapping):
        return {str(name): _form(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list) and not all(isinstance(item, str | int | float | None) for item in batch):
        return [_form(item) for item in batch]
    return _class_name(batch)  # a list of file names is as long as the batch but takes no device memory


def _class_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
