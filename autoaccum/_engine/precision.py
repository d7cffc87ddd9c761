"""Arithmetic precision: autocast, and the gradient scaler that fp16 needs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from autoaccum._arguments import check_choice, check_function
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from autoaccum._system.notices import Notices

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
# What Lightning and Accelerate call them.
ALIASES = {"no": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Precision:
    """One precision on one device.

    Attributes:
        scaler: Scales the loss so that fp16 gradients do not vanish; None where none is due.
    """

    def __init__(self, name: str, device: torch.device, *, autocasts: bool = True, yields: bool = False) -> None:
        self.name = name
        self.scaler: torch.amp.GradScaler | None = None
        self._yields_on = device.type if yields else None
        # One object for all uses: making an autocast context costs more than entering it.
        self._autocast: AbstractContextManager[object] = nullcontext()
        if name == "fp32" or not autocasts:
            return
        self._autocast = torch.autocast(device.type, dtype=_DTYPES[name])
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(device.type)
            _prepare(self.scaler, device)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass; not to be nested in itself."""
        if self._yields_on is not None and torch.is_autocast_enabled(self._yields_on):
            return nullcontext()
        return self._autocast


def resolve(name: str, device: torch.device, model: nn.Module, notices: Notices) -> Precision:
    """Create the requested precision; "auto" selects the device's best. What the name does not say is reported."""
    check_choice("precision", name, PRECISIONS)
    own = own_half_type(model)
    if own is not None:
        # Casting and scaling are for fp32 parameters: a scaler rejects fp16 gradients.
        notices.choose(f"precision {own}", "as the model's parameters have it")
        return Precision(own, device, autocasts=False)
    if name == "auto":
        name = _best_for(device)
        notices.choose(f"precision {name}", "precision=")
    return Precision(name, device)


def resolve_without_scaler(
    name: str,
    device: torch.device,
    model: nn.Module,
    notices: Notices,
    scale: torch.amp.GradScaler | Callable[[Tensor], Tensor] | None,
) -> Precision:
    """Create the requested precision for a loop that scales its own losses with `scale`, if any."""
    if isinstance(scale, torch.amp.GradScaler):
        _prepare(scale, device)
    elif scale is not None:
        check_function("scale", scale, "loss")
    found = resolve(name, device, model, notices)
    if found.scaler is not None and scale is None:
        if name != "auto":
            raise InvalidInputError(
                "precision='fp16' needs scale=, a torch.amp.GradScaler, with which your loop steps; pass both, or "
                "precision='fp32'"
            )
        notices.say("precision: fp32, since fp16 needs a gradient scaler, and there is no scale=")
        found = Precision("fp32", device)
    if name == "auto" and own_half_type(model) is None:
        found = Precision(found.name, device, yields=True)
    found.scaler = None
    return found


def _prepare(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Let a scaler create its two tensors now: it stays broken if memory runs out between them at its first use."""
    scaler.scale(torch.zeros((), device=device))


def own_half_type(model: nn.Module) -> str | None:
    """Return the half precision that all of a model's parameters have; None if they have none in common."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return _NAMES.get(dtypes.pop()) if len(dtypes) == 1 else None


def _best_for(device: torch.device) -> str:
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    # On the CPU, half precision is faster on only a few processors, and fp16 is far slower on all.
    return "fp32"
