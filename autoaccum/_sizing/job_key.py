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

# Dimensions of a batch of texts: samples, and the tokens of each.
_TEXTS = 2


def key_of(
    modules: Sequence[nn.Module],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | str,
    memory: MemoryBackend,
    target_batch: int,
    counts: str = SAMPLES,
    **settings: Any,
) -> Key:
    """Return the key of a job.

    Args:
        modules: The model, already on its device, and losses that are modules.
        batch: A batch; only the structure of a sample matters, not their number.
        optimizer: Only its class matters; or what stands for it, in a loop of the user's own.
        memory: The device.
        target_batch: Samples per optimizer step.
        counts: What `target_batch` and sizes count, as in `Plan`.
        settings: What else decides how much memory a step takes, or how much there is, as JSON values.
    """
    about = {
        "model": _class_name(modules[0]),
        "parameters": sum(0 if is_lazy(parameter) else parameter.numel() for parameter in modules[0].parameters()),
        "optimizer": optimizer if isinstance(optimizer, str) else _class_name(optimizer),
        "device": memory.name,
        "device_bytes": memory.reading().total_bytes,
        "target_batch": target_batch,
        "counts": counts,
        "torch": str(torch.version.__version__),
        "autoaccum": __version__,
        **settings,
    }
    digest = digest_of([about, list(map(_structure, modules)), _form(batch)])
    return Key(digest, target_batch if counts == SAMPLES else None, about)


def _structure(model: nn.Module) -> list[Any]:
    modules = [[name, _class_name(module), _switches(module)] for name, module in model.named_modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [None if is_lazy(tensor) else list(tensor.shape) for _, tensor in tensors]
    return [modules, shapes, [[name, str(tensor.dtype), tensor.requires_grad] for name, tensor in tensors]]


def _switches(module: nn.Module) -> dict[str, bool]:
    # With `gradient_checkpointing` on, or a forward of its own, a model may need much less memory.
    return {name: value is True for name, value in vars(module).items() if type(value) is bool or name == "forward"}


def _form(batch: Any) -> Any:
    """Return the nesting, types and shapes of one sample.

    Rows of integers are texts, whose width may differ from batch to batch, as the frontier knows.
    """
    if isinstance(batch, Tensor | np.ndarray):
        numbers = torch.as_tensor(batch)
        is_text = numbers.ndim == _TEXTS and not (numbers.is_floating_point() or numbers.is_complex())
        return [str(batch.dtype), batch.ndim, [] if is_text else list(batch.shape[1:])]
    if isinstance(batch, Mapping):
        return {str(name): _form(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list) and not all(isinstance(item, str | int | float | None) for item in batch):
        return [_form(item) for item in batch]
    return _class_name(batch)  # a list of file names is as long as the batch but takes no device memory


def _class_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
