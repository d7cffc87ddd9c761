"""Runs modules in training mode without what draws random numbers or moves statistics there: dropout and BatchNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Layers of torch whose training mode draws numbers or takes a batch's statistics, and has no term of a loss.
_QUIET = (_DropoutNd, _NormBase, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)
# What timm, torchvision and others call a layer that drops whole residual branches at random.
_STOCHASTIC_DEPTH = ("DropPath", "StochasticDepth")
# Functions that are told whether they train: the place and the name of that argument.
_OF_TRAINING = {
    functional.dropout: (2, "training"),
    functional.dropout1d: (2, "training"),
    functional.dropout2d: (2, "training"),
    functional.dropout3d: (2, "training"),
    functional.alpha_dropout: (2, "training"),
    functional.feature_alpha_dropout: (2, "training"),
    functional.rrelu: (3, "training"),
    functional.batch_norm: (5, "training"),
    torch.dropout: (2, "train"),
    torch.alpha_dropout: (2, "train"),
    torch.feature_dropout: (2, "train"),
    torch.feature_alpha_dropout: (2, "train"),
    torch.rrelu: (3, "training"),
}
_STATISTICS, _RATE = 1, 4  # places of batch_norm's running mean, and of attention's dropout_p


@contextmanager
def quiet_training(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep modules in their modes for the block, except for layers that draw numbers or take a batch's statistics.

    Args:
        modules: The modules.
    """
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    modes = [(part, part.training) for part in parts]
    try:
        for part in parts:
            if isinstance(part, _QUIET) or type(part).__name__ in _STOCHASTIC_DEPTH:
                part.training = False
        with _Quiet():
            yield
    except Exception as error:
        _leave_out_frames(error)
        raise
    finally:
        for part, training in modes:
            part.training = training


def _leave_out_frames(error: Exception) -> None:
    """Leave the frames of `_Quiet` out of a traceback, which then ends in the code that failed."""
    here = error.__traceback__
    while here is not None:
        while here.tb_next is not None and here.tb_next.tb_frame.f_code is _Quiet.__torch_function__.__code__:
            here.tb_next = here.tb_next.tb_next
        here = here.tb_next


class _Quiet(TorchFunctionMode):
    """Calls functions that are told whether they train as if they did not."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is functional.scaled_dot_product_attention:
            args, kwargs = _with(args, kwargs, _RATE, "dropout_p", value=0.0)
        elif function in _OF_TRAINING and not (function is functional.batch_norm and _takes_statistics(args, kwargs)):
            args, kwargs = _with(args, kwargs, *_OF_TRAINING[function], value=False)
        return function(*args, **kwargs)


def _takes_statistics(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a batch norm has no running statistics."""
    return (args[_STATISTICS] if len(args) > _STATISTICS else kwargs.get("running_mean")) is None


def _with(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, *, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > place:
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, kwargs | {name: value}
