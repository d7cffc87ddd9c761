"""Keeps modules from doing what a pass beside the training must not do, and lets compiled code run eagerly."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from autoaccum._system import signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._data.random_state import RandomState


class Mark(Protocol):
    """Saves and restores what passes change."""

    random: RandomState

    def take(self) -> None:
        """Save the state."""

    def restore(self) -> None:
        """Restore it."""

    def settle(self) -> Sequence[object]:
        """Return what passes have moved since the state was saved."""


class Modes:
    """Saves which submodules are in training mode.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._modes = [part.training for part in self.parts]

    def put_back(self) -> None:
        """Restore the mode of each submodule."""
        for part, training in zip(self.parts, self._modes, strict=True):
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


class Eager:
    """Lets compiled modules and functions run eagerly: a size that occurs once is not worth a graph.

    There is one for the process: after an interrupt, a block may end while a later one runs, or never.
    """

    def __init__(self) -> None:
        self._stance: AbstractContextManager[None] | None = None

    def take(self) -> None:
        """Run everything eagerly from now on, unless the compiler was never imported, which would take seconds."""
        if self._stance is None and "torch._dynamo" in sys.modules:
            with signals.held():  # the stance holds from when the object is made
                self._stance = torch.compiler.set_stance("force_eager")

    def put_back(self) -> None:
        """Run compiled code as before, if that was not done already."""
        with signals.held():
            stance, self._stance = self._stance, None
            if stance is not None:
                stance.__exit__(None, None, None)


eager = Eager()

# --- training mode without dropout and BatchNorm's statistics ---------------------------------------------------------

# Layers of torch whose training mode draws numbers or takes a batch's statistics, and has no term of a loss.
_QUIET = (_DropoutNd, _NormBase, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)
# What timm, torchvision and others call a layer that drops whole residual branches at random.
_STOCHASTIC_DEPTH = ("DropPath", "StochasticDepth")
# Arguments that turn such functions off: the functions, the argument's place and name, and its value.
_OFF: dict[Callable[..., Any], tuple[int, str, Any]] = {
    **dict.fromkeys((functional.dropout, functional.dropout1d, functional.dropout2d), (2, "training", False)),
    **dict.fromkeys((functional.dropout3d, functional.alpha_dropout), (2, "training", False)),
    functional.feature_alpha_dropout: (2, "training", False),
    **dict.fromkeys((torch.dropout, torch.alpha_dropout, torch.feature_dropout), (2, "train", False)),
    torch.feature_alpha_dropout: (2, "train", False),
    **dict.fromkeys((functional.rrelu, torch.rrelu), (3, "training", False)),
    functional.batch_norm: (5, "training", False),
    functional.scaled_dot_product_attention: (4, "dropout_p", 0.0),
}


@contextmanager
def quiet_training(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep modules in their modes for the block, except for layers that draw numbers or take a batch's statistics."""
    modes = Modes(modules)
    try:
        for part in modes.parts:
            if isinstance(part, _QUIET) or type(part).__name__ in _STOCHASTIC_DEPTH:
                part.training = False
        with _Quiet():
            yield
    except Exception as error:
        here = error.__traceback__
        while here is not None:  # leave out frames of `_Quiet`: the traceback then ends in the code that failed
            while here.tb_next is not None and here.tb_next.tb_frame.f_code is _Quiet.__torch_function__.__code__:
                here.tb_next = here.tb_next.tb_next
            here = here.tb_next
        raise
    finally:
        modes.put_back()


class _Quiet(TorchFunctionMode):
    """Calls functions that are told whether they train as if they did not."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _OFF:
            place, name, value = _OFF[function]
            has_statistics = (args[1] if len(args) > 1 else kwargs.get("running_mean")) is not None
            if function is not functional.batch_norm or has_statistics:
                if len(args) > place:
                    args = (*args[:place], value, *args[place + 1 :])
                else:
                    kwargs[name] = value
        return function(*args, **kwargs)
