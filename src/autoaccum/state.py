"""Takes and puts back what a training step changes: buffers, random state, parameters, gradients, optimizer.

`Mark` is cheap and taken for every window: buffers and random state, which a forward pass moves before it can fail.
`Snapshot` is whole and taken once, before trials: also parameters, gradients and optimizer state, set aside in host
memory so that a model that does not fit twice can be tried. Both put back bit for bit.
"""

from __future__ import annotations

import ctypes
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class _NumpyState:
    """NumPy's global generator, read anew only when it has moved: reading it costs 33 microseconds."""

    _STATE_BYTES = 4 * 624 + 4  # the Mersenne twister's key and position

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._bytes = b""
        self._state: Any = None

    def take(self) -> None:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._generator:
            self._generator, self._state = generator, None
            self._address = generator.ctypes.state_address if isinstance(generator, np.random.MT19937) else 0
        now = ctypes.string_at(self._address, self._STATE_BYTES) if self._address else b""
        # A second normal variate may lie ready (has_gauss); using it up does not move the twister.
        if not now or self._state is None or now != self._bytes or self._state["has_gauss"]:
            self._state = np.random.get_state(legacy=False)  # noqa: NPY002 - the user's global generator
            self._bytes = now

    def put_back(self) -> None:
        np.random.set_state(self._state)  # noqa: NPY002


class RandomState:
    """The random generators that a model, a loss or a transform may draw from: torch's, Python's and NumPy's.

    Args:
        device: Its generator is kept beside the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._numpy = _NumpyState()
        self._states: tuple[Any, Any, Any] | None = None

    def take(self) -> None:
        """Keep the states as they are now."""
        on_device = None if self._module is None else self._module.get_rng_state(self._device)
        self._numpy.take()
        self._states = (torch.get_rng_state(), on_device, random.getstate())

    def put_back(self) -> None:
        """Set the states to what they were at `take`."""
        assert self._states is not None
        on_host, on_device, of_python = self._states
        torch.set_rng_state(on_host)
        if self._module is not None:
            self._module.set_rng_state(on_device, self._device)
        random.setstate(of_python)
        self._numpy.put_back()


# Kernels like BatchNorm's write their statistics without moving the version counter, so small buffers are copied
# every time. Larger ones (masks, position tables) are far too large for statistics, and copied when the counter moves.
_ALWAYS_COPIED_ELEMENTS = 65_536


@dataclass(slots=True)
class _KeptBuffer:
    """A buffer as it was: the tensor itself, since a model may put another in its place, and what it held."""

    buffer: Tensor | None
    copy: Tensor | None = None
    version: int = 0

    def stands_for(self, buffer: Tensor) -> bool:
        return self.buffer is buffer and self.copy is not None and self.copy.shape == buffer.shape

    def may_differ(self) -> bool:
        return self.buffer is not None and (
            self.buffer.numel() <= _ALWAYS_COPIED_ELEMENTS or self.buffer._version != self.version
        )


class Mark:
    """Buffers and random state at one moment.

    Buffers are copied on their device: small ones every time, large ones when they were written.

    Args:
        modules: Modules whose buffers may change (the model, and losses that are modules).
        device: Its random generator is kept.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._owners = [part._buffers for module in modules for part in module.modules()]
        self._kept: list[dict[str, _KeptBuffer]] = [{} for _ in self._owners]
        self._random = RandomState(device)

    def take(self) -> None:
        """Keep buffers and random state as they are now."""
        self._random.take()
        written: list[tuple[_KeptBuffer, Tensor, Tensor]] = []
        for owner, kept in zip(self._owners, self._kept, strict=True):
            for name, buffer in owner.items():
                known = kept.get(name)
                if buffer is None:
                    kept[name] = _KeptBuffer(None)
                elif known is None or known.copy is None or not known.stands_for(buffer):
                    kept[name] = _KeptBuffer(buffer, buffer.detach().clone(), buffer._version)
                elif known.may_differ():
                    written.append((known, known.copy, buffer))
            for name in kept.keys() - owner.keys():
                del kept[name]
        if written:
            torch._foreach_copy_([copy for _, copy, _ in written], [buffer for _, _, buffer in written])
        for known, _, buffer in written:  # afterwards: a copy that failed is still to be made
            known.version = buffer._version

    def put_back(self) -> None:
        """Set buffers and random state to what they were at `take`."""
        with torch.no_grad():
            for owner, kept in zip(self._owners, self._kept, strict=True):
                for name in owner.keys() - kept.keys():
                    del owner[name]
                for name, known in kept.items():
                    owner[name] = known.buffer
                    # All of them: a write through .data moves no counter, and this path need not be cheap.
                    if known.buffer is not None:
                        _write_back(known)
        self._random.put_back()


def _write_back(known: _KeptBuffer) -> None:
    assert known.buffer is not None
    assert known.copy is not None
    if known.buffer.shape != known.copy.shape:
        known.buffer.resize_(known.copy.shape)  # the model resized it in place
    known.buffer.copy_(known.copy)
    known.version = known.buffer._version


class Snapshot:
    """Everything a training step may change, set aside in host memory.

    Args:
        modules: The model, and losses that are modules.
        optimizer: Its state and settings are kept.
        device: Its random generator is kept.
        scaler: Its scale and how long that has held are kept.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        modules = list(modules)
        self._mark = Mark(modules, device)
        self._mark.take()
        self._optimizer = optimizer
        self._scaler = scaler
        self._scaler_state = None if scaler is None else scaler.state_dict()
        trained = _unique(p for group in optimizer.param_groups for p in group["params"])
        self._values = [(parameter, _aside(parameter.detach())) for parameter in trained]
        everything = _unique([*trained, *(p for module in modules for p in module.parameters())])
        self._gradients = [(p, None if p.grad is None else (p.grad, _aside(p.grad.detach()))) for p in everything]
        self._state = {
            parameter: {
                name: (value, _aside(value) if isinstance(value, Tensor) else value) for name, value in kept.items()
            }
            for parameter, kept in optimizer.state.items()
        }
        self._settings = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]

    def put_back(self) -> None:
        """Set everything to what it was when the snapshot was made; tensors keep their identity."""
        with torch.no_grad():
            for parameter, value in self._values:
                parameter.copy_(value)
            for parameter, gradient in self._gradients:
                parameter.grad = None if gradient is None else gradient[0]
                if gradient is not None:
                    gradient[0].copy_(gradient[1])
            self._optimizer.state.clear()
            for holder, state in self._state.items():
                now = self._optimizer.state[holder]
                for name, (value, aside) in state.items():
                    now[name] = value
                    if isinstance(value, Tensor):
                        value.copy_(aside)
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for name in [known for known in group if known not in settings and known != "params"]:
                del group[name]
            group.update(settings)
        if self._scaler is not None and self._scaler_state is not None:
            self._scaler.load_state_dict(self._scaler_state)
        self._mark.put_back()


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode for the block, then give each submodule the mode it had."""
    modules = list(modules)
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training


def _aside(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameters))
