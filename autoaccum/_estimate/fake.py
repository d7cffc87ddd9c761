"""Makes copies of a model, its batch and its optimizer with fake tensors: shapes and types without memory.

The originals are not changed. Make and use the copies under a `FakeTensorMode`. A model's Python state is copied too,
so a forward pass on the copy does not affect the original.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode

from autoaccum._data.batches import repeated
from autoaccum._data.nesting import copied, map_tensors
from autoaccum._data.splits import Along
from autoaccum._estimate.gpu_properties import UnknownOfGPUError
from autoaccum._oom import first_line
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from autoaccum._data.pieces import Split
    from autoaccum._system.notices import Notices

CALLS_USER_CODE = True  # for own_code.raised_here

# Attributes in which a module keeps tensors that move with it.
_REGISTERED = ("_parameters", "_buffers", "_modules")
# What messages name that come of a missing driver; they differ by build and machine. The last is autograd's engine,
# which needs the driver's context if a model calls torch.autograd.grad.
_OF_DRIVER = ("CUDA", "NVIDIA", "hasPrimaryContext")
_UNFORMED = "; register one with torch.library.register_fake"


class NoFakesError(Exception):
    """A step cannot be traced on fakes, for the reason in the message."""


class FakeCopies:
    """Fakes of one job's modules and optimizer on one device.

    Args:
        device: The device that the fakes claim to be on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []  # objects whose ids are the memo's keys must stay alive

    def copied(self, thing: Any) -> Any:
        """Return a copy of a module, or of any object that holds modules; shared parameters stay shared.

        Raises:
            InvalidInputError: The object cannot be copied.
        """
        self._fake(thing.modules() if isinstance(thing, nn.Module) else ())
        try:
            return copy.deepcopy(thing, self._memo)
        except Exception as error:
            raise InvalidInputError(
                f"a {type(thing).__name__} cannot be copied ({type(error).__name__}: {error}), and an estimate must "
                "not change it; pass a function without arguments that makes the model"
            ) from error

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer of the same class, options and groups over the fakes, without state."""
        fresh: defaultdict[Any, Any] = defaultdict(dict)
        self._memo[id(optimizer.state)] = fresh
        for settings in (optimizer.defaults, *optimizer.param_groups):
            # A rate that is a tensor, as torchao's, stays itself: fake mode cannot copy it.
            self._memo.update({id(value): value for value in settings.values() if isinstance(value, Tensor)})
        made = copy.deepcopy(optimizer, self._memo)
        for name, value in vars(optimizer).items():  # copies of optimizers lose what others than torch set
            vars(made).setdefault(name, value)
        return made

    def _fake(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in self._memo:
                    made = nn.Parameter(like(parameter.data, self._device), requires_grad=parameter.requires_grad)
                    self._remember(parameter, made)
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) not in self._memo:
                    self._remember(buffer, like(buffer, self._device))
            self._fake_plain(module)

    def _fake_plain(self, module: nn.Module) -> None:
        """Replace tensors in a module's plain attributes, which PyTorch's fake mode cannot copy."""
        kept = {name: value for name, value in vars(module).items() if name not in _REGISTERED}
        for value in torch.utils._pytree.tree_leaves(kept):
            if isinstance(value, Tensor) and id(value) not in self._memo:
                self._remember(value, like(value, value.device).requires_grad_(value.requires_grad))

    def _remember(self, real: Tensor, fake: Tensor) -> None:
        self._memo[id(real)] = fake
        self._kept.append(real)


class ValuesAssumed(TorchFunctionMode):
    """Returns 1 if an optimizer reads a value of a fake tensor.

    For optimizers known to only scale an optimizer step by the value (Adafactor's norms). Others may branch on it, as
    models do, and then any value is a guess.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, or return 1 in its place."""
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func not in _READ_AS:
                raise
            return _READ_AS[func](1)


_READ_AS: dict[Any, Callable[[int], object]] = {
    Tensor.item: float,
    Tensor.__float__: float,
    Tensor.__int__: int,
    Tensor.__bool__: bool,
}


def built_on_meta(factory: Callable[[], Any], notices: Notices) -> nn.Module:
    """Return the module that a function makes, without memory for its tensors unless it reads their values.

    Random state is restored. Other exceptions of the function are raised unchanged.

    Raises:
        InvalidInputError: The function does not return a module.
    """
    with torch.random.fork_rng(devices=()):
        try:
            with torch.device("meta"):
                made = factory()
        except Exception as error:
            if not _misses_values(error):
                raise
            notices.say(
                "model: made on the CPU, with memory for its tensors, because the function that makes it reads their "
                f"values ({first_line(error)})"
            )
            made = factory()
    if not isinstance(made, nn.Module):
        raise InvalidInputError(f"the function that makes the model returned {made!r}; return a torch.nn.Module")
    return made


def _misses_values(error: Exception) -> bool:
    """Whether an error comes from the meta device, whose tensors have no values and few kernels."""
    return isinstance(error, NotImplementedError | RuntimeError | TypeError) and "meta" in str(error).lower()


def like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same shape, strides and type, without values."""
    if tensor.layout is not torch.strided:
        return tensor.to(device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def batch_like(batch: Any, samples: int, device: torch.device, split: Split | None = None) -> Any:
    """Return a micro-batch of `samples` samples made of those of `batch`, with tensors without values.

    Raises:
        InvalidInputError: The batch is empty or cannot be cut.
    """

    def without_values(tensor: Tensor) -> Tensor:
        return like(tensor, device)

    if split is None or isinstance(split, Along):
        # A copy, because a cut is a view that keeps the whole alive.
        return copied(repeated(map_tensors(without_values, batch), samples, split))
    # A split of the user's own may read values, as a collator does that pads to the longest.
    with unset_fake_temporarily():
        whole = repeated(batch, samples, split)
    return map_tensors(without_values, whole, objects=_refuse)


def _refuse(thing: Any) -> Any:
    raise NoFakesError(f"a micro-batch holds a {type(thing).__name__}, whose tensors cannot be made without values")


def why_stuck(error: Exception) -> str | None:
    """Return why a step cannot be traced on fakes; None for an error that a real step would raise as well."""
    text, is_runtime = str(error), isinstance(error, RuntimeError)
    reason = None
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        reason = f"it branches on values, with {error.func}"
    elif isinstance(error, UnsupportedOperatorException):
        reason = f"the operator {error.func} has no fake implementation{_UNFORMED}"
    elif isinstance(error, UnknownOfGPUError | NoFakesError):
        reason = text
    elif is_runtime and "no fake impl" in text:  # custom operators of torch.library
        reason = f"a custom operator has no fake implementation ({first_line(error)}){_UNFORMED}"
    elif is_runtime and ".numpy() is not supported" in text:
        reason = "it reads values, with .numpy()"
    elif (
        isinstance(error, RuntimeError | AssertionError)
        and not torch.cuda.is_available()
        and any(name in text for name in _OF_DRIVER)
    ):
        reason = f"an operator needs a CUDA driver, and there is none here ({first_line(error)})"
    return reason


def keep_every_layer(model: nn.Module) -> None:
    """Set the rates at which a copy of a model drops layers (LayerDrop, arXiv:1909.11556) to 0.

    What a step needs at most, it needs with all layers.
    """
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in getattr(holder, "__dict__", {}).items():
                named = name == "layerdrop" or name.endswith("_layerdrop")
                if named and isinstance(value, int | float) and value > 0:
                    setattr(holder, name, 0.0)
