"""Which device: what the user asked for, checked, or what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from autoaccum.errors import InvalidInputError
from autoaccum.memory import backend_for
from autoaccum.memory.base import MemoryBackend

if TYPE_CHECKING:
    from autoaccum.notices import Notices


def resolve(device: str | torch.device | MemoryBackend | None, model: nn.Module, notices: Notices) -> MemoryBackend:
    """Find the device to train on, with what is known about its memory.

    None means where the model is if that is an accelerator, else the accelerator, else the CPU.

    Args:
        device: A device, its name, or a memory backend (such as a simulated device) that stands for one.
        model: Its parameters tell where it is.
        notices: Where the choice is said.

    Raises:
        InvalidInputError: The device is unknown or not there, or `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model={model!r} is no torch.nn.Module; pass one, made and not its class")
    if isinstance(device, MemoryBackend):
        return device
    if device is not None:
        return backend_for(_existing(device))
    at_home = next(model.parameters(), torch.empty(0)).device
    chosen = at_home if at_home.type not in ("cpu", "meta") else _accelerator() or torch.device("cpu")
    notices.say(f"device: {chosen} (device=None)")
    return backend_for(chosen)


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


def _existing(device: str | torch.device) -> torch.device:
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(f"device={device!r} is no device that torch knows; {_there_is()}") from error
    if asked.type == "cpu":
        return torch.device("cpu")
    accelerator = _accelerator()
    count = torch.accelerator.device_count() if accelerator is not None else 0
    if accelerator is None or accelerator.type != asked.type or (asked.index or 0) >= count:
        raise InvalidInputError(f"device={str(device)!r} is not there; {_there_is()}")
    return asked if asked.index is not None else torch.device(asked.type, torch.accelerator.current_device_index())


def _there_is() -> str:
    accelerator = _accelerator()
    names = ["'cpu'"]
    if accelerator is not None:
        names += [f"'{accelerator.type}:{index}'" for index in range(torch.accelerator.device_count())]
    return f"this machine has {', '.join(names)}"
