"""AdamW with its two moments in 8 bits, by torchao's numbers, or bitsandbytes' optimizer where torchao is missing.

Both are extras, imported when such an optimizer is made. torchao's own class compiles its step, which takes a compiler
inside the memory limit and long for the first step, and a failure inside it cannot be told from a success. So
`AdamW8bit` calls the function that torchao compiles, on slices: temporary memory is bounded, state consists of plain
tensors, and each operator may fail.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autoaccum._arguments import shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

# As in torchao and bitsandbytes: numbers that share a scale, and the fewest that are worth 8 bits.
BLOCK = 256
LEAST = 4096
# Elements of a parameter that are updated at once, which bounds temporary memory; a card needs larger kernels.
_AT_ONCE = {"cpu": 1 << 16}
_AT_ONCE_ON_CARDS = 1 << 20
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_SCALE = "_scale"
_LARGEST = 1e300


def adamw8bit(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> torch.optim.Optimizer:
    """Return an AdamW whose moments take 8 bits each, in blocks of 256 numbers that share a scale.

    The moments are rounded after each update, so the training is another one than with `torch.optim.AdamW`. Parameters
    of fewer than 4,096 numbers, or of a number that 256 does not divide, have moments in float32. Source: Dettmers et
    al. 2022, arXiv:2110.02861.

    Args:
        parameters: As for `torch.optim.AdamW`.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.

    Returns:
        An optimizer by torchao, or bitsandbytes' `AdamW8bit` if torchao is not installed.

    Raises:
        InvalidInputError: Neither package is installed, or an argument is out of its range.
    """
    parameters = _checked(parameters)
    _check_settings(lr, betas, eps, weight_decay)
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if _imported("torchao.optim.subclass_8bit") is not None:
        return AdamW8bit(parameters, **settings)
    if (found := _imported("bitsandbytes")) is not None:
        made: torch.optim.Optimizer = found.optim.AdamW8bit(parameters, **settings)
        return made
    raise InvalidInputError(
        "optimizer='adamw8bit' needs torchao or bitsandbytes, and neither can be imported here; "
        "pip install 'autoaccum[low-memory]', or pass optimizer='adamw'"
    )


def _checked(parameters: Any) -> list[Any]:
    """Return what an optimizer is given as a list.

    Raises:
        InvalidInputError: It is no parameters, nor groups of them.
    """
    is_iterable = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor | Mapping | str)
    found = list(parameters) if is_iterable else []
    if not found or not all(isinstance(one, Tensor) or (isinstance(one, dict) and "params" in one) for one in found):
        raise InvalidInputError(
            f"adamw8bit: parameters={shown(parameters)} holds no parameters to update; pass model.parameters(), or a "
            "list of groups as for torch.optim.AdamW"
        )
    return found


def _check_settings(lr: object, betas: object, eps: object, weight_decay: object) -> None:
    """Check the settings of `adamw8bit`.

    Raises:
        InvalidInputError: One is out of its range.
    """
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not _is_number(value, _LARGEST):
            raise InvalidInputError(f"adamw8bit: {name}={shown(value)} must be a number, at least 0")
    is_pair = isinstance(betas, tuple | list) and len(betas) == 2  # noqa: PLR2004 - of two moments
    if not is_pair or not all(_is_number(one, 1.0) for one in betas):  # type: ignore[attr-defined]
        raise InvalidInputError(
            f"adamw8bit: betas={shown(betas)} must be two numbers, each at least 0 and below 1, as (0.9, 0.999)"
        )


def _is_number(value: object, below: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value < below


def _imported(name: str) -> ModuleType | None:
    """Return a module; None if it is not installed, or does not go with what is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except (ImportError, OSError):
        return None


class AdamW8bit(torch.optim.Optimizer):
    """The optimizer of `adamw8bit`, by torchao.

    Each parameter's state holds `step`, and for each moment uint8 codes of the parameter's shape and the scale of each
    block in float32; or the moments themselves in float32.

    Args:
        parameters: As for `adamw8bit`.
        lr: As for `adamw8bit`.
        betas: As for `adamw8bit`.
        eps: As for `adamw8bit`.
        weight_decay: As for `adamw8bit`.

    Raises:
        InvalidInputError: An argument is out of its range, or a parameter is complex.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as any optimizer does.

        Raises:
            InvalidInputError: One of them is complex, or a setting of theirs is out of its range.
        """
        if isinstance(param_group, dict):  # the base refuses others
            settings = self.defaults | param_group
            _check_settings(settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"])
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            del self.param_groups[-1]
            raise InvalidInputError("optimizer='adamw8bit' rounds real numbers, and a parameter is complex; use AdamW")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make an update from the gradients.

        Raises:
            InvalidInputError: A closure was given, or a gradient is sparse.
        """
        if closure is not None:
            raise InvalidInputError("closure= cannot be given to this optimizer; compute gradients before its step")
        codes: dict[torch.device, _Codes] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.device not in codes:
                        codes[parameter.device] = _Codes(parameter.device)
                    self._update(parameter, parameter.grad, group, codes[parameter.device])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, whose codes and scales keep their types."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):  # the base casts it to the type of the parameter
                    place = "cpu" if name == "step" else parameter.device
                    self.state[parameter][name] = value.to(place, copy=True)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], codes: _Codes) -> None:
        if gradient.layout is not torch.strided:
            raise InvalidInputError("optimizer='adamw8bit' takes no sparse gradients; use torch.optim.SparseAdam there")
        state = self.state[parameter]
        if not state:
            state.update(_made(parameter))
        state["step"] += 1
        values = parameter.detach().contiguous()  # the parameter itself, but for other memory formats
        flat, share = values.view(-1), gradient.contiguous().view(-1)
        size = _AT_ONCE.get(parameter.device.type, _AT_ONCE_ON_CARDS)
        for begin in range(0, len(flat), size):
            end = min(begin + size, len(flat))
            codes.update(
                flat[begin:end],
                share[begin:end],
                state["step"],
                *(codes.moment(state, name, begin, end) for name in _SIGNED),
                None,
                group["lr"],
                *group["betas"],
                group["weight_decay"],
                group["eps"],
                IS_ADAMW=True,
                BF16_STOCHASTIC_ROUND=False,
            )
        if values.data_ptr() != parameter.data_ptr():
            parameter.detach().copy_(values)


class _Codes:
    """What torchao does with 8 bits, on one device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        module = importlib.import_module("torchao.optim.subclass_8bit")
        self.update = importlib.import_module("torchao.optim.adam").single_param_adam
        self._kind = module.OptimState8bit
        with _disable_current_modes():  # torchao computes these lists with tensors once, and under fakes it could not
            meanings = {True: module.get_qmap_signed(), False: module.get_qmap_unsigned()}
        self._numbers = {signed: torch.tensor(each, device=device) for signed, each in meanings.items()}

    def moment(self, state: dict[str, Tensor], name: str, begin: int, end: int) -> Tensor:
        """Return some numbers of a moment, which write through to the state."""
        values, scale = state[name].view(-1)[begin:end], state.get(name + _SCALE)
        if scale is None:
            return values
        signed = _SIGNED[name]
        scale = scale[begin // BLOCK : end // BLOCK]
        made: Tensor = self._kind(values, scale, self._numbers[signed], signed, dtype=torch.float32)
        return made


def _made(parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of a parameter before its first update: a scale of 0 makes every code a 0."""
    state = {"step": torch.zeros((), device="cpu")}
    in_8_bits = parameter.numel() >= LEAST and parameter.numel() % BLOCK == 0
    for name in _SIGNED:
        kind = torch.uint8 if in_8_bits else torch.float32
        state[name] = torch.zeros(parameter.shape, dtype=kind, device=parameter.device)
        if in_8_bits:
            state[name + _SCALE] = torch.zeros(parameter.numel() // BLOCK, device=parameter.device)
    return state
