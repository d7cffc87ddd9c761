"""Copies in host memory of what an optimizer's step writes, and of all that a whole training step may change.

They are in host memory so that they work for a model that does not fit twice. Both restore bit for bit.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

from autoaccum._engine.savepoint import Savepoint

if TYPE_CHECKING:
    from collections.abc import Iterable


class OptimizerCopy:
    """Copies in host memory of what an optimizer step writes: parameters, state, settings and the scaler's scale."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._scaler_state = None if scaler is None else scaler.state_dict()
        self._holders = list(optimizer.state)
        leaves, self._form = tree_flatten((list(optimizer.state.values()), optimizer.param_groups))
        self._leaves = list(map(own_container, leaves))
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._copies = [(tensor, tensor._version, _aside(tensor)) for tensor in tensors]

    def undo(self) -> bool:
        """Restore the state at the time of the copy; tensors keep their identity."""
        with torch.no_grad():
            for tensor, _, value in self._copies:
                tensor.copy_(value)
        state, groups = tree_unflatten(self._leaves, self._form)
        put_back(self._optimizer, zip(self._holders, state, strict=True), groups)
        if self._scaler is not None and self._scaler_state is not None:
            self._scaler.load_state_dict(self._scaler_state)
        return True

    def was_written_unseen(self) -> bool:
        """Whether a parameter has changed without its version counter, as by `parameter.data.add_(...)`."""
        return any(
            tensor.requires_grad and tensor._version == version and not torch.equal(tensor.detach().cpu(), value)
            for tensor, version, value in self._copies
        )


def own_container(leaf: Any) -> Any:
    """Return a copy of a container that PyTorch's trees do not look into (a Counter, a set); anything else as it is."""
    return copy.copy(leaf) if isinstance(leaf, dict | list | set) else leaf


def put_back(
    optimizer: torch.optim.Optimizer, state: Iterable[tuple[Tensor, Any]], groups: list[dict[str, Any]]
) -> None:
    """Give an optimizer this state and these settings, in the objects that it has for them."""
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(settings)


class Snapshot:
    """A savepoint, and copies in host memory of all else that a training step may change."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        scaler: torch.amp.GradScaler | None = None,
        functions: Iterable[Any] = (),
    ) -> None:
        modules = list(modules)
        self._forward = Savepoint(modules, device, functions)
        self._forward.take()
        self._optimizer = OptimizerCopy(optimizer, scaler)
        trained = (p for group in optimizer.param_groups for p in group["params"])
        everything = dict.fromkeys([*trained, *(p for module in modules for p in module.parameters())])
        self._gradients = [(p, None if p.grad is None else (p.grad, _aside(p.grad))) for p in everything]

    def restore(self) -> None:
        """Restore the state at the time of the snapshot; tensors keep their identity."""
        self._optimizer.undo()
        with torch.no_grad():
            for parameter, gradient in self._gradients:
                parameter.grad = None if gradient is None else gradient[0]
                if gradient is not None:
                    gradient[0].copy_(gradient[1])
        self._forward.restore()


def _aside(tensor: Tensor) -> Tensor:
    if is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "device_mesh"):  # but for DTensor
        # `to` of some, such as torchao's states of 8 bits, shares memory where the device stays the same.
        names, context = tensor.__tensor_flatten__()
        inner = {name: _aside(getattr(tensor, name)) for name in names}
        made: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        return made
    return tensor.detach().to("cpu", copy=True)
