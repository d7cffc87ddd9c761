"""Restores seeds, learning rates, types of weights and folders if a call of `fit` fails before its first step.

A refused call can then be corrected and repeated as if it had never been made. The runner restores parameters, buffers,
gradients and optimizer state.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from autoaccum._data.loader_memory import generators_of
from autoaccum._data.random_state import RandomState, set_states, states_of
from autoaccum._engine.optimizers import SCALED, parts_of_scheduler
from autoaccum._system import folder_lock, signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from autoaccum._training.loop import Training


class RestoreOnFailure:
    """A context manager that restores the state at its making if it exits with an error before a window is done.

    Args:
        device: The device whose random state is restored, as is the host's.
        folders: Folders to remove if they were made inside the context and are still empty, including any parents made.
        loaders: Loaders whose own random generators are restored.

    Attributes:
        training: The training, whose windows done are counted; None before it exists.
    """

    def __init__(self, device: torch.device, folders: Iterable[Path | None], loaders: Iterable[Any]) -> None:
        self.training: Training | None = None
        self._process = os.getpid()
        # Interrupts within torch's own `no_grad` and `autocast` can leave these as they are in it, whatever is done.
        self._has_grad_mode, self._kind = torch.is_grad_enabled(), device.type
        has_autocast = torch.amp.is_autocast_available(device.type)
        self._is_autocast = torch.is_autocast_enabled(device.type) if has_autocast else None
        random = RandomState(device)
        generators = [generator for loader in loaders for generator in generators_of(loader)]
        self._undo: list[Callable[[], object]] = [
            partial(random.restore, random.capture()),
            partial(set_states, generators, states_of(generators)),
        ]
        self._folders = [one for folder in folders if folder is not None for one in _missing(folder)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with signals.deferred():
            torch.set_grad_enabled(self._has_grad_mode)
            if self._is_autocast is not None:
                torch.set_autocast_enabled(self._kind, self._is_autocast)
        is_forked = os.getpid() != self._process
        if kind is None or is_forked or (self.training is not None and self.training.windows):
            return
        with signals.deferred():
            for undo in self._undo:
                undo()
            for folder in self._folders:
                folder_lock.remove_free(folder)

    def keep_rates(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Keep the optimizer's settings and a scheduler's base learning rates, to restore them.

        Args:
            optimizer: The optimizer whose parameter groups are read.
            scheduler: A scheduler, a function that makes one, or None.
        """
        for group in optimizer.param_groups:
            self._undo.append(partial(_put_back_settings, group, _settings(group)))
        for part in parts_of_scheduler(scheduler):
            for name in (name for name in SCALED if hasattr(part, name)):
                self._undo.append(partial(setattr, part, name, getattr(part, name)))


def _missing(folder: Path) -> list[Path]:
    """Return those of a folder and its parents that do not exist, the deepest first."""
    try:
        return [one for one in (folder, *folder.parents) if not one.exists()]
    except OSError:  # the name is too long or a parent is not accessible, so nothing can be made there
        return []


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters; tensors are copied, since rates may change in place."""
    settings = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in settings.items()}


def _put_back_settings(group: dict[str, Any], before: dict[str, Any]) -> None:
    for name in group.keys() - before.keys() - {"params"}:
        del group[name]
    for name, value in before.items():
        now = group.get(name)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
            now.copy_(value)
        else:
            group[name] = value
