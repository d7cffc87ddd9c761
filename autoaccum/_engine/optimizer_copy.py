"""Copies in host memory of what an optimizer's step writes, and of all that a whole training step may change.

They are in host memory so that they work for a model that does not fit twice. Both restore bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoaccum._engine.savepoint import Savepoint

if TYPE_CHECKING:
    from collections.abc import Iterable


class OptimizerCopy:
    """Copies in host memory of all that an optimizer step writes: parameters, state, settings and the scaler's scale.

    Args:
        optimizer: Its parameters, state and settings are saved.
        scaler: Its scale and growth counter are saved.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._scaler_state = None if scaler is None else scaler.state_dict()
        trained = _unique(p for group in optimizer.param_groups for p in group["params"])
        self._values = [(parameter, _aside(parameter)) for parameter in trained]
        self._versions = [parameter._version for parameter in trained]
        self._state = {holder: _kept(state) for holder, state in optimizer.state.items()}
        self._settings = [
            {name: _kept(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def undo(self) -> bool:
        """Restore the state at the time of the snapshot; tensors keep their identity."""
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
            self._optimizer.state.clear()
            for holder, state in self._state.items():
                self._optimizer.state[holder] = _put_back(state)
            for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
                for name in [known for known in group if known not in settings and known != "params"]:
                    del group[name]
                group.update({name: _put_back(kept) for name, kept in settings.items()})
        if self._scaler is not None and self._scaler_state is not None:
            self._scaler.load_state_dict(self._scaler_state)
        return True

    def was_written_unseen(self) -> bool:
        """Whether a parameter has changed without its version counter, as by `parameter.data.add_(...)`."""
        return any(
            parameter._version == version and not torch.equal(parameter.detach().cpu(), value)
            for (parameter, value), version in zip(self._values, self._versions, strict=True)
        )


class Snapshot:
    """Copies in host memory of everything that a training step may change.

    Args:
        modules: The model, and losses that are modules.
        optimizer: Its state and settings are saved.
        device: Its random generator is saved.
        scaler: Its scale and growth counter are saved.
        functions: As for `Savepoint`.
    """

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
        everything = _unique([*trained, *(p for module in modules for p in module.parameters())])
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


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    tensor: Tensor
    copy: Tensor


def _kept(value: Any) -> Any:
    """Return a form of the value for `_put_back`: new containers with the same tensors and copies of their values."""
    if isinstance(value, Tensor):
        return _KeptTensor(value, _aside(value))
    if type(value) in (list, tuple):
        return type(value)(_kept(item) for item in value)
    if isinstance(value, dict):
        return {name: _kept(item) for name, item in value.items()}
    return value


def _put_back(kept: Any) -> Any:
    if isinstance(kept, _KeptTensor):
        kept.tensor.copy_(kept.copy)
        return kept.tensor
    if type(kept) in (list, tuple):
        return type(kept)(_put_back(item) for item in kept)
    if isinstance(kept, dict):
        return {name: _put_back(item) for name, item in kept.items()}
    return kept


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameters))
