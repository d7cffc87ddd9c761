"""Records the storages of one training step as a timeline: every allocation and every free, in order.

It observes operators as they are dispatched, on fake or real tensors, whatever the model. A storage counts from the
operator that returned it until it is freed. A dispatch mode cannot see memory that a kernel allocates and frees within
one operator; for a GPU, rules provide it (`_estimate/cuda_kernels.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum._estimate.allocation_trace import Category, Storage, Timeline
from autoaccum._estimate.owners import is_of_loss
from autoaccum._memory._storages import StorageMode, key_of, strided

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from autoaccum._estimate.cuda_kernels import Workspace
    from autoaccum._estimate.owners import Owners

# Called on fake tensors thousands of times per step.
_DEVICE = torch.ops.prim.device.default


class Ledger(StorageMode):  # type: ignore[no-untyped-call]
    """Records a timeline while it is entered.

    Args:
        size: Samples in the micro-batch.
        device_type: Only storages on this type of device count.
        workspace_of: Returns an operator's workspace, given the operator, its arguments and its results.
        phase: Returns the step's current phase.
        owners: Knows to which modules storages belong; None to leave that open.

    Attributes:
        timeline: The timeline so far.
    """

    def __init__(
        self,
        size: int,
        device_type: str,
        workspace_of: Callable[..., Workspace] | None = None,
        phase: Callable[[], str] | None = None,
        owners: Owners | None = None,
    ) -> None:
        super().__init__(device_type)
        self._phase = phase
        self._owners = owners
        self.timeline = Timeline(size)
        self._workspace_of = workspace_of

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and record what it allocated."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if self._phase is not None and self._phase() != self.timeline.phases[-1][1]:
            self.enter(self._phase())
        result = func(*args, **(kwargs or {}))
        workspace = () if self._workspace_of is None else self._workspace_of(func, args, result)
        held = [self._open(size, Category.WORKSPACE, str(func)) for size in workspace if size]
        self._note(result, func)
        for number in held:
            self._close(number)
        return result

    def enter(self, phase: str) -> None:
        """Record that a phase begins."""
        self.timeline.phases.append((len(self.timeline.events), phase))

    def hold(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Record tensors that exist before the step begins."""
        for tensor in tensors:
            self._see(tensor, category, "")

    def _note(self, value: Any, func: Any) -> None:
        if isinstance(value, Tensor):
            self._see(value, Category.MADE, func)
        elif isinstance(value, tuple | list):
            for item in value:
                self._note(item, func)

    def _see(self, tensor: Tensor, category: Category, func: Any) -> None:
        for part in strided(tensor):
            storage = part.untyped_storage()
            key = key_of(storage)
            number = self._record_by_key.get(key)
            if number is None:
                if tensor.device.type != self._device_type:
                    continue
            elif self.timeline.storages[number].size_bytes == storage.nbytes():
                continue
            else:
                self._close(number)
            owner = None if func or self._owners is None else self._owners.of(tensor)
            self._track(key, storage, self._open(storage.nbytes(), category, str(func), owner))

    def _open(self, size_bytes: int, category: Category, operator: str, owner: str | None = None) -> int:
        number = len(self.timeline.storages)
        if owner is None:
            owner = "" if self._owners is None else self._owners.at_work(self.timeline.phases[-1][1])
        if category is Category.MADE and is_of_loss(owner, operator):
            category = Category.LOSS
        self.timeline.storages.append(Storage(size_bytes, category, operator, owner))
        self.timeline.events.append(number)
        return number

    def _close(self, number: int) -> None:
        self.timeline.events.append(~number)

    def freed(self, key: int, record: int) -> None:  # noqa: ARG002 - its number is enough
        """Record the free."""
        self._close(record)
