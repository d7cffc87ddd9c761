"""Selects the device: what the user requested, validated, or what is available."""

from __future__ import annotations

import ctypes
import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autoaccum._arguments import shown
from autoaccum._memory.available_devices import backend_for, existing, find_accelerator, there_is
from autoaccum._memory.base import MemoryBackend
from autoaccum._memory.limits import describe_neighbours, describe_room
from autoaccum._oom import first_line, is_device_lost, is_oom
from autoaccum._system import launched
from autoaccum.errors import AutoaccumError, DeviceLostError, DeviceMissingError, DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._system.notices import Notices


def resolve(device: str | torch.device | MemoryBackend | None, model: nn.Module, notices: Notices) -> MemoryBackend:
    """Find the device to train on and its memory backend, which may be given in place of a device.

    None means the model's device if that is an accelerator, else the accelerator, else the CPU.
    """
    if not isinstance(model, nn.Module):
        advice = f"pass an instance: {model.__name__}(...)" if isinstance(model, type) else "pass one"
        if hasattr(model, "dataset"):
            advice = "the first argument is the model, and the loader comes second"
        raise InvalidInputError(f"model={shown(model)} is not a torch.nn.Module; {advice}")
    if isinstance(device, MemoryBackend):
        existing(device.device)
        return device
    memory = backend_for(_of_this_process(existing(device)) if device is not None else _chosen(model, notices))
    if neighbours := describe_neighbours(memory):
        notices.say(neighbours)
    return memory


def _chosen(model: nn.Module, notices: Notices) -> torch.device:
    at_home = next(model.parameters(), torch.empty(0)).device
    chosen = at_home if at_home.type not in ("cpu", "meta") else _own_accelerator() or torch.device("cpu")
    notices.choose(f"device {chosen}", "device=")
    return chosen


def _own_accelerator() -> torch.device | None:
    """Return the accelerator. If several processes share a machine with several, return the one at the local rank."""
    found = find_accelerator()
    count = 0 if found is None else torch.accelerator.device_count()
    if found is None or count == 1 or launched.world_size() == 1:
        return found
    index = launched.local_rank()
    if index >= count:
        raise DeviceMissingError(f"LOCAL_RANK={index} has no device of its own; {there_is()}")
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)


def _of_this_process(asked: torch.device) -> torch.device:
    """Return the device with its index if only its type was given."""
    if asked.type == "cpu" or asked.index is not None:
        return asked
    own = _own_accelerator()
    if own is not None and own.index is not None:
        return own
    return torch.device(asked.type, torch.accelerator.current_device_index())


@contextmanager
def oom_explained(memory: MemoryBackend, what: str) -> Iterator[None]:
    """Translate device failures in work such as "preparing the training", which cannot be made smaller.

    Raises:
        DoesNotFitError: Memory ran out.
        DeviceLostError: This process can no longer use the device.
    """
    try:
        yield
    except AutoaccumError:
        raise
    except Exception as error:
        if is_device_lost(error):
            raise lost(memory, error) from error
        if not is_oom(error):
            raise
        found = "; ".join(part for part in (first_line(error), describe_room(memory)) if part)
        raise DoesNotFitError(
            f"{what} does not fit on {memory.name} ({found}); end other processes there, or choose another device or a "
            "smaller model"
        ) from error


def lost(memory: MemoryBackend, error: BaseException) -> DeviceLostError:
    """Return the error to raise if this process has lost the device, given what was observed."""
    if memory.device.type == "cuda":
        _keep_host_memory()
    return DeviceLostError(
        f"{memory.name} can no longer be used by this process ({first_line(error)}); start a new one"
    )


def _keep_host_memory() -> None:
    """Keep the tensors in host memory for ever, since PyTorch ends the process where it frees pinned memory now."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
