"""Says which windows are due for all checks, and which batches are just like those of a window before.

Due are the first, second, fourth, ... window of each structure, then one now and then, and the first after a change
that voids what such windows saw. Misuse that begins between two of them is found by the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from autoaccum._data.batches import KnownWindow

if TYPE_CHECKING:
    from collections.abc import Hashable

    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._engine.forward_backward import GradientStep

_BEFORE_TENSORS = len(("type", "keys"))
_IS_TRAINED, _PARAMETERS, _VALUES = attrgetter("requires_grad"), itemgetter("params"), methodcaller("values")
_HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
# Windows of one structure that are due for all checks: the first, second, fourth, ..., and then now and then.
_LAST_POWER = 1024
_EVERY = 1000
# More come of keys that differ from batch to batch.
_MOST_STRUCTURES = 256


def is_check_window(number: int) -> bool:
    """Whether the window of this number is due: the first, second, fourth, ..., and then now and then."""
    return number % _EVERY == 0 or (number & (number - 1) == 0 and number <= _LAST_POWER)


@dataclass(slots=True)
class _Structure:
    """What is known of windows of one structure.

    Attributes:
        key: The structure.
        windows: How many there have been.
        epoch: That of the checks when the last of them was checked.
        kinds: The tensors of that window, by type, shape and device; None if it was not a batch of tensors.
        split: How that window was cut.
    """

    key: Hashable
    windows: int = 0
    epoch: int = 0
    kinds: list[Any] | None = None
    split: Split | None = None


class DueChecks:
    """Knows what windows that were checked have seen."""

    def __init__(self, step: GradientStep, *, is_part: bool) -> None:
        self._step = step
        self._is_part = is_part
        self._structures: dict[Hashable, _Structure] = {}
        self._now = _Structure(None)
        # What must not have changed: None for what is not known.
        self._state: tuple[Any, ...] | None = None
        self._epoch = 0  # rises when it changes: what is known of every structure is void then
        self._held: list[Any] = []  # what is compared by its id, which nothing else gets meanwhile
        self._hooked: list[bool] = []
        # The parameters and parts of each module.
        self._tables: list[dict[str, Any]] = []
        self._handles = 0

    def are_due(self, window: Window) -> bool:
        """Whether a window, which is counted here, is due for all checks."""
        key = window.structure()
        known = self._structures.get(key)
        if known is None:
            if len(self._structures) == _MOST_STRUCTURES:
                self._structures.clear()
            known = self._structures[key] = _Structure(key)
        self._now = known
        number = known.windows = known.windows + 1
        if self._has_changed():
            self._state, self._held, self._epoch = None, [], self._epoch + 1
        return is_check_window(number) or known.epoch != self._epoch

    def is_first(self) -> bool:
        """Whether the window that `are_due` was asked about is the first of its structure."""
        return self._now.windows == 1

    def learn(self, window: Window) -> None:
        """Note that a window is complete that was checked."""
        step, known = self._step, self._now
        known.epoch = self._epoch
        # `fully_shard` swaps parameters, which is no change.
        modules = [] if step.is_sharded else step.objective.modules
        parts = chain.from_iterable(module.modules() for module in modules)
        self._tables = [table for part in parts for table in (part._parameters, part._modules)]
        self._held = list(chain.from_iterable(map(_VALUES, self._tables)))
        self._state, self._hooked, self._handles = self._now_in_force(), self._are_hooked(), RemovableHandle.next_id
        batch = window.plain_batch()
        tensors = batch.values() if type(batch) is dict else batch
        is_known = batch is not None and all(type(tensor) is Tensor for tensor in tensors)
        known.kinds, known.split = _kinds(batch) if is_known else None, window.split

    def known(self, batch: Any) -> KnownWindow | None:
        """Return a window of a batch of tensors just like those of the last window; None if it is anything else."""
        known = self._now
        kinds, kind, tensors = known.kinds, type(batch), batch
        if kinds is None or kind is not kinds[0] or len(batch) != len(kinds) - _BEFORE_TENSORS:
            return None
        if kind is dict:
            # A single row may be several sequences, which only its values show: it is read anew.
            if tuple(batch) != kinds[1] or kinds[_BEFORE_TENSORS][0][0] == 1:
                return None
            tensors = batch.values()
        for tensor, own in zip(tensors, kinds[_BEFORE_TENSORS:], strict=True):
            if type(tensor) is not Tensor or (tensor.shape, tensor.dtype, tensor.device) != own:
                return None
        return KnownWindow(batch, known.key, kinds, known.split)

    def void(self) -> None:
        """Check the next window, whatever its structure."""
        self._state = None

    def _has_changed(self) -> bool:
        """Whether what checks saw may not hold any more."""
        if self._state is None or self._now_in_force() != self._state:
            return True
        handles = RemovableHandle.next_id
        if handles != self._handles:  # somewhere a hook was registered
            self._handles = handles
            return self._are_hooked() != self._hooked
        return False

    def _now_in_force(self) -> tuple[Any, ...]:
        step = self._step
        groups = [] if step.optimizer is None else list(map(_PARAMETERS, step.optimizer.param_groups))
        return (
            list(map(id, chain(chain.from_iterable(map(_VALUES, self._tables)), groups))),
            list(map(len, groups)),
            step.objective.calls.model.training,
            step.objective.settings,
            dict(step.objective.knowledge.summands),
            torch.is_autocast_enabled(step.memory.device.type),
            id(step.scale),
            step.keeps_outputs,
            # Ranks do not add up gradients of parameters that come to be trained.
            list(map(_IS_TRAINED, step.parameters)) if self._is_part else None,
        )

    def _are_hooked(self) -> list[bool]:
        return [any(map(hooks, self._step.parameters)) for hooks in _HOOKS]


def _kinds(batch: Any) -> list[Any]:
    keys, tensors = (tuple(batch), batch.values()) if type(batch) is dict else (None, batch)
    return [type(batch), keys, *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)]
