"""Saves and restores the state that a training step changes: buffers, random state, parameters, gradients, optimizer.

`Mark` is cheap and taken for every window. It covers buffers and random state, which a forward pass changes before it
can fail. `Snapshot` is complete and taken once, before trials. It also covers parameters, gradients and optimizer
state, in host memory so that it works for a model that does not fit twice. Both restore bit for bit.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from autoaccum._metric_states import MetricStates
from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


# A Mersenne twister that has advanced or was reseeded has another position or another key. Of its 624 words these
# suffice: two keys agree in them by chance once in 2 ** 128.
_WORDS_LOOKED_AT = 4
_WORD_BYTES = 4
_KEY_BYTES = 624 * _WORD_BYTES


class _NumpyState:
    """NumPy's global generator, read again only when it has advanced, since a read takes 33 microseconds."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._key: Any = None
        self._position: Any = None
        self._seen = b""
        self._state: Any = None

    def take(self) -> Any:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._generator:
            self._watch(generator)
        now = b"" if self._key is None else self._key.raw + self._position.raw
        # A second normal variate may lie ready (has_gauss); using it up does not move the twister.
        if not now or self._state is None or now != self._seen or self._state["has_gauss"]:
            self._state = np.random.get_state(legacy=False)  # noqa: NPY002 - the user's global generator
            self._seen = now
        return self._state

    def put_back(self, state: Any) -> None:
        # A variate that lies ready shows in no counter: the state that was read last may be gone from here on.
        self._state = None
        np.random.set_state(state)  # noqa: NPY002

    def _watch(self, generator: Any) -> None:
        self._generator, self._state, self._key = generator, None, None
        if isinstance(generator, np.random.MT19937):
            address = generator.ctypes.state_address
            self._key = (ctypes.c_char * (_WORDS_LOOKED_AT * _WORD_BYTES)).from_address(address)
            self._position = (ctypes.c_char * _WORD_BYTES).from_address(address + _KEY_BYTES)


class _PythonState:
    """Python's global generator, read again only when it has advanced, since a read takes 11 microseconds.

    The memory layout of its key is a detail of CPython, so it is verified before use.
    """

    def __init__(self) -> None:
        self._words: Any = None
        self._seen = b""
        self._state: Any = None
        generator = _python_generator()
        # The position, then the key, behind the object's header.
        address = id(generator) + object.__basicsize__
        if type(generator) is random.Random:
            position, *key = struct.unpack("=i624I", ctypes.string_at(address, _WORD_BYTES + _KEY_BYTES))
            if (*key, position) == random.getstate()[1]:
                self._words = (ctypes.c_char * ((1 + _WORDS_LOOKED_AT) * _WORD_BYTES)).from_address(address)

    def take(self) -> Any:
        now = b"" if self._words is None else self._words.raw
        # A second normal variate may lie ready (the state's last item); using it up does not move the twister.
        if not now or self._state is None or now != self._seen or self._state[2] is not None:
            self._state, self._seen = random.getstate(), now
        return self._state

    def put_back(self, state: Any) -> None:
        self._state = None  # as for NumPy
        random.setstate(state)


def _python_generator() -> random.Random:
    """Return the generator that the functions of `random` are methods of."""
    return random.seed.__self__  # type: ignore[attr-defined,no-any-return]


@functools.cache
def _global_generators() -> tuple[_PythonState, _NumpyState]:
    return _PythonState(), _NumpyState()


class RandomState:
    """Saves and restores the random generators that a model, a loss or a transform may draw from.

    These are the global ones of torch, Python and NumPy, and generators that modules hold as attributes.

    Args:
        device: Its generator is saved in addition to the CPU's.
        modules: Their attributes are searched once for generators.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module] = ()) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._python, self._numpy = _global_generators()
        self._own = [_OwnGenerator(found) for found in _generators(modules)]
        self._states: tuple[Any, ...] | None = None

    def take(self) -> None:
        """Save the current states."""
        self._states = (
            torch.default_generator.get_state(),
            None if self._module is None else self._module.get_rng_state(self._device),
            self._python.take(),
            self._numpy.take(),
            [own.take() for own in self._own],
        )

    def put_back(self) -> None:
        """Restore the states saved by `take`."""
        assert self._states is not None
        on_host, on_device, of_python, of_numpy, own_states = self._states
        torch.set_rng_state(on_host)
        if self._module is not None:
            self._module.set_rng_state(on_device, self._device)
        self._python.put_back(of_python)
        self._numpy.put_back(of_numpy)
        for own, state in zip(self._own, own_states, strict=True):
            own.put_back(state)

    def seed(self, seed: int) -> None:
        """Seed every generator that `take` saves."""
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            with self._module.device(self._device):
                self._module.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the user's global generator
        for own in self._own:
            own.seed(seed)

    def has_moved(self) -> bool:
        """Whether a generator has advanced or been seeded since `take`; those of modules count as if they had."""
        on_host, on_device, of_python, of_numpy, own = self.taken
        numpy_now = np.random.get_state(legacy=False)  # noqa: NPY002 - the user's global generator
        return (
            bool(own)
            or not _are_equal(torch.default_generator.get_state(), on_host)
            or (self._module is not None and not _are_equal(self._module.get_rng_state(self._device), on_device))
            or random.getstate() != of_python
            or pickle.dumps(numpy_now) != pickle.dumps(of_numpy)
        )

    @property
    def taken(self) -> tuple[Any, ...]:
        """The states saved by `take`, for `assume` of another instance; never modified."""
        assert self._states is not None
        return self._states

    def assume(self, taken: tuple[Any, ...]) -> None:
        """Use the states saved by another instance of the same device and modules."""
        self._states = taken


def _are_equal(state: Tensor, other: Tensor) -> bool:
    """Whether two states of torch's generators are equal, which are bytes in host memory; runs no operator."""
    return _bytes_of(state) == _bytes_of(other)


def _bytes_of(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


class _OwnGenerator:
    """A generator that a module holds."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def take(self) -> Any:
        if isinstance(self._generator, torch.Generator):
            return self._generator.get_state()
        if isinstance(self._generator, random.Random):
            return self._generator.getstate()
        return self._generator.bit_generator.state

    def put_back(self, state: Any) -> None:
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(state)
        elif isinstance(self._generator, random.Random):
            self._generator.setstate(state)
        else:
            self._generator.bit_generator.state = state

    def seed(self, seed: int) -> None:
        if isinstance(self._generator, torch.Generator):
            self._generator.manual_seed(seed)
        elif isinstance(self._generator, random.Random):
            self._generator.seed(seed)
        else:
            self._generator.bit_generator.state = type(self._generator.bit_generator)(seed).state


class OwnGenerators:
    """Generators of one owner, with their initial states."""

    def __init__(self, generators: Iterable[Any]) -> None:
        self._own = [_OwnGenerator(generator) for generator in generators]
        self._states = [own.take() for own in self._own]

    def put_back(self) -> None:
        """Restore the initial states."""
        for own, state in zip(self._own, self._states, strict=True):
            own.put_back(state)


def _generators(modules: Iterable[nn.Module]) -> list[Any]:
    kinds = (torch.Generator, random.Random, np.random.Generator)
    parts = [part for module in modules for part in module.modules()]
    found = {id(value): value for part in parts for value in vars(part).values() if isinstance(value, kinds)}
    for shared in (torch.default_generator, _python_generator()):
        found.pop(id(shared), None)
    return list(found.values())


# Kernels like BatchNorm's write their statistics without changing the version counter, so small buffers are copied
# every time. Larger ones (masks, position tables) are too large for statistics, and copied when the counter changes.
_ALWAYS_COPIED_ELEMENTS = 65_536


class _Kept:
    """A tensor and a copy of its values; the tensor itself, since a model may replace it."""

    __slots__ = ("copies_always", "copy", "tensor", "version")

    def __init__(self, tensor: Tensor | None, copy: Tensor | None = None, *, always: bool = False) -> None:
        self.tensor = tensor
        self.copy = copy
        self.version = 0 if tensor is None else tensor._version
        self.copies_always = always or (tensor is not None and tensor.numel() <= _ALWAYS_COPIED_ELEMENTS)

    def stands_for(self, tensor: Tensor) -> bool:
        return self.tensor is tensor and self.copy is not None and self.copy.shape == tensor.shape

    def write_back(self) -> None:
        if self.tensor is None:
            return
        assert self.copy is not None
        if self.tensor.shape != self.copy.shape:
            self.tensor.resize_(self.copy.shape)  # the model resized it in place
        if self.tensor.layout is torch.strided and 0 in self.tensor.stride():
            # All rows of an expanded tensor share memory, which torch refuses to write more than once.
            rows = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self.tensor.stride())
            self.tensor[rows].copy_(self.copy[rows])
        else:
            self.tensor.copy_(self.copy)
        self.version = self.tensor._version


class Mark:
    """Saves and restores buffers, random state and what torchmetrics' metrics have counted.

    Buffers are copied on their device: small ones every time, large ones only after a write.

    Args:
        modules: Modules whose buffers may change (the model, and losses that are modules).
        device: Its random generator is saved.
        earlier: Another mark of the same modules. Equal copies of large buffers are shared with it.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device, *, earlier: Mark | None = None) -> None:
        modules = list(modules)
        self.random = RandomState(device, modules)
        self._holders: list[tuple[dict[Any, Any], dict[Any, _Kept]]] = [
            (part._buffers, {}) for module in modules for part in module.modules()
        ]
        self._metrics = MetricStates(part for module in modules for part in module.modules())
        self._modules = len(self._holders)
        self._earlier = earlier
        self._has_random = False
        self._tell_apart()

    def _tell_apart(self) -> None:
        """Find the modules that hold buffers, so that `take` need not look at the others one by one."""
        self._holding = [number for number, (holder, kept) in enumerate(self._holders) if holder or kept]
        self._empty = [holder for holder, kept in self._holders if not (holder or kept)]

    def keep_also(self, parameters: Sequence[nn.Parameter]) -> None:
        """Save these parameters too, from the next `take` on: some models modify theirs in the forward pass.

        They are copied every time, since a write through `.data` changes no counter.
        """
        self._holders[self._modules :] = [(dict(enumerate(parameters)), {})]
        self._tell_apart()

    def take(self, *, random: bool = True) -> None:
        """Save the current buffers, states of metrics and random state.

        Args:
            random: Whether to save random state too; if not, `put_back` leaves it as it is.
        """
        self._has_random = random
        if random:
            self.random.take()
        self._metrics.take()
        changed: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        if any(self._empty):
            self._tell_apart()
        for number in self._holding:
            self._keep(number, *self._holders[number], changed)
        if changed:
            with torch.no_grad():
                for copies, tensors in changed.values():
                    torch._foreach_copy_(copies, tensors)

    def put_back(self) -> None:
        """Restore what `take` saved."""
        with torch.no_grad():
            for holder, kept in self._holders:
                for name in holder.keys() - kept.keys():
                    del holder[name]
                for name, known in kept.items():
                    holder[name] = known.tensor
                    # All of them: a write through .data changes no counter, and this path need not be cheap.
                    known.write_back()
        self._metrics.put_back()
        if self._has_random:
            self.random.put_back()

    def changes(self) -> dict[int, dict[str, tuple[Tensor | None, Tensor | None]]]:
        """Return the buffers that have changed since `take`: by the number of the module, and by name.

        Modules are numbered in the order of `modules()`, those of the first argument first. Each buffer comes with its
        values then and now; None if there was or is none.
        """
        changed: dict[int, dict[str, tuple[Tensor | None, Tensor | None]]] = {}
        for number, (holder, kept) in enumerate(self._holders[: self._modules]):
            for name in {**kept, **holder}:
                known, now = kept.get(name), holder.get(name)
                before = None if known is None else known.copy
                if not _same(before, now):
                    changed.setdefault(number, {})[name] = (before, now)
        return changed

    def empty_ones(self) -> set[tuple[int, str]]:
        """Return the buffers that had no elements at `take`, each by the number of its module and its name."""
        return {
            (number, name)
            for number, (_, kept) in enumerate(self._holders[: self._modules])
            for name, known in kept.items()
            if known.copy is not None and not known.copy.numel()
        }

    def _keep(
        self,
        number: int,
        holder: dict[Any, Tensor | None],
        kept: dict[Any, _Kept],
        changed: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]],
    ) -> None:
        """Save one module's tensors; existing copies to overwrite are left to the caller, grouped by type."""
        for name, tensor in holder.items():
            known = kept.get(name)
            if tensor is None:
                if known is None or known.tensor is not None:
                    kept[name] = _Kept(None)
            elif known is None or known.copy is None or not known.stands_for(tensor):
                kept[name] = self._copy(number, name, tensor)
            elif known.copies_always:
                copies, tensors = changed.setdefault(tensor.dtype, ([], []))
                copies.append(known.copy)
                tensors.append(tensor)
            elif known.version != tensor._version:
                kept[name] = self._copy(number, name, tensor)
        for name in kept.keys() - holder.keys():
            del kept[name]

    def _copy(self, number: int, name: Any, tensor: Tensor) -> _Kept:
        """Copy a tensor. Copies of large ones are never modified, so they can be shared."""
        if number >= self._modules:
            return _Kept(tensor, tensor.detach().clone(), always=True)
        if self._earlier is not None:
            theirs = self._earlier._holders[number][1].get(name)
            same = theirs is not None and theirs.stands_for(tensor) and theirs.version == tensor._version
            if theirs is not None and same and not theirs.copies_always:
                return _Kept(tensor, theirs.copy)
        return _Kept(tensor, tensor.detach().clone())


class OptimizerSnapshot:
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


class Snapshot:
    """Copies in host memory of everything that a training step may change.

    Args:
        modules: The model, and losses that are modules.
        optimizer: Its state and settings are saved.
        device: Its random generator is saved.
        scaler: Its scale and growth counter are saved.
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
        self._optimizer = OptimizerSnapshot(optimizer, scaler)
        trained = (p for group in optimizer.param_groups for p in group["params"])
        everything = _unique([*trained, *(p for module in modules for p in module.parameters())])
        self._gradients = [(p, None if p.grad is None else (p.grad, _aside(p.grad))) for p in everything]

    def put_back(self) -> None:
        """Restore the state at the time of the snapshot; tensors keep their identity."""
        self._optimizer.undo()
        with torch.no_grad():
            for parameter, gradient in self._gradients:
                parameter.grad = None if gradient is None else gradient[0]
                if gradient is not None:
                    gradient[0].copy_(gradient[1])
        self._mark.put_back()


class Modes:
    """Saves which submodules are in training mode.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modes = [(part, part.training) for module in modules for part in module.modules()]

    def put_back(self) -> None:
        """Restore the mode of each submodule."""
        for part, training in self._modes:
            part.training = training


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode for the block, then restore the mode of each submodule."""
    modules = list(modules)
    modes = Modes(modules)
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        modes.put_back()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two buffers hold the same values; NaN equals itself."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())


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
