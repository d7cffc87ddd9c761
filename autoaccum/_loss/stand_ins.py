"""Puts copies in the place of modules' parameters and buffers while losses are asked and gradients compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# The most elements of all parameters together that are copied in float64: 32 MiB.
_COPIED = 2**22
# The most elements that are copied in float32 on the host, where lack of memory may end in native code, unless
# gradients take as much later: 64 MiB.
_WIDENED = 2**24
HALF = (torch.float16, torch.bfloat16)


def may_be_replaced(modules: Sequence[nn.Module]) -> bool:
    """Whether the parameters of modules are theirs to set, as those of compiled scripts are not."""
    return not any(isinstance(part, torch.jit.ScriptModule) for module in modules for part in module.modules())


def may_be_copied(modules: Sequence[nn.Module]) -> bool:
    """Whether the parameters of modules are few enough, and of types, for copies in float64."""
    parameters = _parameters_of(modules)
    return (
        all(type(parameter) is nn.Parameter and parameter.is_floating_point() for parameter in parameters)
        and all(parameter.device.type != "mps" for parameter in parameters)
        and sum(parameter.numel() for parameter in parameters) <= _COPIED
    )


def may_be_widened(modules: Sequence[nn.Module]) -> bool:
    """Whether modules have parameters in half precision, and all may have copies in float32.

    Gradients in float32 take as much, and come later; where those are in half precision, too, few may on the host.
    """
    narrow = [parameter for parameter in _parameters_of(modules) if parameter.dtype in HALF]
    return (
        bool(narrow)
        and may_be_replaced(modules)
        and all(type(parameter) is nn.Parameter for parameter in narrow)
        and sum(parameter.numel() for parameter in narrow if _could_lack(parameter)) <= _WIDENED
    )


def doubled(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 if it holds floating-point numbers."""
    return tensor.double() if tensor.is_floating_point() else tensor


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it is in half precision."""
    return tensor.float() if tensor.dtype in HALF else tensor


class StandIns:
    """Parameters in the place of the modules' own, which collect gradients of their own.

    Args:
        modules: The modules.
        convert: Makes each from the module's own, and a buffer from a buffer; None if they have the same values.
        may_be_written: Whether forward() may write parameters and buffers, so that each has a copy.

    Attributes:
        trained: Those that collect a gradient, by name.
    """

    def __init__(
        self, modules: Sequence[nn.Module], *, convert: Callable[[Tensor], Tensor] | None, may_be_written: bool
    ) -> None:
        self._convert = convert or _as_is
        self._may_be_written = may_be_written
        self._replaces_buffers = convert is not None or may_be_written
        self._places = [
            (part, f"{path}.{name}" if path else name, name, parameter)
            for number, module in enumerate(modules)
            for path, part in module.named_modules(prefix="loss" if number else "")
            for name, parameter in part._parameters.items()
            if type(parameter) is nn.Parameter
        ]
        # A module may hold its parameters a second time, where they are not replaced.
        self._gradients = {parameter: parameter.grad for module in modules for parameter in module.parameters()}
        self._buffers = [(part._buffers, dict(part._buffers)) for module in modules for part in module.modules()]
        self._made: dict[nn.Parameter, nn.Parameter] = {}
        self.trained: dict[str, nn.Parameter] = {}

    def put_in(self) -> None:
        """Take the places of the modules' own."""
        for parameter in self._gradients:
            parameter.grad = None
        for part, path, name, parameter in self._places:
            if parameter not in self._made:
                values = self._copied(parameter.detach())
                self._made[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(part, name, self._made[parameter])
            if parameter.requires_grad:
                self.trained[path] = self._made[parameter]
        self._replace_buffers()

    def renew(self) -> None:
        """Undo what forward() has written, before the next run begins."""
        if not self._may_be_written:
            return
        with torch.no_grad():
            for parameter, made in self._made.items():
                made.data.copy_(parameter)
        self._replace_buffers()

    def clear_gradients(self) -> None:
        """Drop what has been collected."""
        for made in self._made.values():
            made.grad = None

    def take_out(self) -> None:
        """Restore the modules' own parameters, buffers and gradients."""
        for holder, own in self._buffers:
            holder.update(own)
        for part, _, name, parameter in self._places:
            setattr(part, name, parameter)
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient

    def _replace_buffers(self) -> None:
        for holder, own in self._buffers if self._replaces_buffers else ():
            holder.update({name: None if value is None else self._copied(value) for name, value in own.items()})

    def _copied(self, tensor: Tensor) -> Tensor:
        converted = self._convert(tensor)
        return converted.clone() if self._may_be_written and converted is tensor else converted


@contextmanager
def standing_in(
    modules: Sequence[nn.Module], *, convert: Callable[[Tensor], Tensor] | None, may_be_written: bool
) -> Iterator[StandIns]:
    """Put other parameters in the place of the modules' own for the block; arguments as for `StandIns`."""
    made = StandIns(modules, convert=convert, may_be_written=may_be_written)
    try:
        made.put_in()
        yield made
    finally:
        made.take_out()


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


def _could_lack(parameter: nn.Parameter) -> bool:
    return parameter.device.type == "cpu" and getattr(parameter, "grad_dtype", None) is not torch.float32
