"""Follows every storage that PyTorch makes and lets go of during one training step, and writes it down as a timeline.

What comes in are operators as they are dispatched, on fake tensors or on real ones; a timeline goes out. Liveness is
exact: a storage counts from the operator that returned it until it dies. What a kernel takes and gives back within one
operator no mode can see: that is asked of rules (`_estimate/cpu_kernels.py`). Nothing here knows a model.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum._estimate.allocation_trace import Category, Storage, Timeline
from autoaccum._estimate.quick_fakes import quick_fake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from autoaccum._estimate.cpu_kernels import Workspace

# Asked of fake tensors thousands of times a step; they make nothing.
_QUESTIONS = (torch.ops.prim.device.default,)
# Of a fake tensor these change nothing, and going through them is a tenth of a step's time.
_IN_PLACE = frozenset(
    (
        torch.ops.aten.add_.Tensor,
        torch.ops.aten.add_.Scalar,
        torch.ops.aten.mul_.Tensor,
        torch.ops.aten.mul_.Scalar,
        torch.ops.aten.relu_.default,
        torch.ops.aten.zero_.default,
    )
)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes a timeline while it is entered.

    Args:
        size: Samples in the micro-batch.
        device_type: Only storages there count.
        workspace_of: Says what an operator takes for itself while it runs, of its arguments and results.
        phase: Says in which phase the step is.

    Attributes:
        timeline: What was written so far.
    """

    def __init__(
        self,
        size: int,
        device_type: str,
        workspace_of: Callable[..., Workspace | None] | None = None,
        phase: Callable[[], str] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase = phase
        self._device_type = device_type
        self.timeline = Timeline(size)
        self._workspace_of = workspace_of
        self._number_by_storage: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and write down what it made."""
        if func in _QUESTIONS:
            return func(*args, **(kwargs or {}))
        if func in _IN_PLACE and isinstance(args[0], FakeTensor):
            return args[0]
        if _is_in_place_on_lists(func) and args[0] and self._is_fake_there(args[0][0]):
            return None
        if self._phase is not None and self._phase() != self.timeline.phases[-1][1]:
            self.enter(self._phase())
        result = None if not args or not isinstance(args[0], FakeTensor) else quick_fake(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        workspace = None if self._workspace_of is None else self._workspace_of(func, args, result)
        if workspace is None:
            self._note(result, func)
            return result
        name = str(func)
        held = [self._open(size, Category.WORKSPACE, name) for size in workspace.beside if size]
        for step in workspace.steps:
            for number in [self._open(size, Category.WORKSPACE, name) for size in step if size]:
                self._close(number)
        self._note(result, func)
        for number in held:
            self._close(number)
        return result

    def _is_fake_there(self, tensor: Tensor) -> bool:
        """Whether a tensor is a fake of the device in question; an optimizer's counts elsewhere have values."""
        return isinstance(tensor, FakeTensor) and tensor.device.type == self._device_type

    def enter(self, phase: str) -> None:
        """Note that a phase begins."""
        self.timeline.phases.append((len(self.timeline.events), phase))

    def hold(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Note tensors that are there before the step begins."""
        for tensor in tensors:
            self._see(tensor, category, "")

    def _note(self, value: Any, func: Any) -> None:
        if isinstance(value, Tensor):
            self._see(value, Category.MADE, func)
        elif isinstance(value, tuple | list):
            for item in value:
                self._note(item, func)

    def _see(self, tensor: Tensor, category: Category, func: Any) -> None:
        for strided in _strided(tensor):
            storage = strided.untyped_storage()
            # The address of PyTorch's own record, by which its own weak references tell storages apart; it is given to
            # another storage only after this one has died, and then it has been forgotten.
            key = storage._cdata
            number = self._number_by_storage.get(key)
            if number is not None:
                if self.timeline.storages[number].size_bytes != storage.nbytes():
                    self._close(number)
                    self._number_by_storage[key] = self._open(storage.nbytes(), category, str(func))
                continue
            if tensor.device.type != self._device_type:
                continue
            self._number_by_storage[key] = self._open(storage.nbytes(), category, str(func))
            self._watched[key] = weakref.ref(storage, functools.partial(self._forget, key))

    def _open(self, size_bytes: int, category: Category, operator: str) -> int:
        number = len(self.timeline.storages)
        self.timeline.storages.append(Storage(size_bytes, category, operator))
        self.timeline.events.append(number)
        return number

    def _close(self, number: int) -> None:
        self.timeline.events.append(~number)

    def _forget(self, key: int, _reference: weakref.ref[torch.UntypedStorage]) -> None:
        del self._watched[key]
        self._close(self._number_by_storage.pop(key))


@functools.cache
def _is_in_place_on_lists(func: Any) -> bool:
    """Whether an operator is one by which optimizers change lists of tensors: a fake one costs its hundreds of keys."""
    name: str = func._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_")


def _strided(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with a storage of which a tensor consists."""
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
