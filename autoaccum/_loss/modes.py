"""Keeps modules from doing what a pass beside the training must not do, and lets compiled code run eagerly."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from autoaccum._data.random_state import RandomState


CALLS_USER_CODE = True  # for own_code.raised_here


class Savepoint(Protocol):
    """Saves what passes change."""

    def save(self, *, with_attributes: bool = False) -> State:
        """Return the current state, with what modules keep as plain attributes if asked to."""


class State(Protocol):
    """What a savepoint has saved."""

    random: RandomState

    def restore(self, *, with_attributes: bool = True) -> None:
        """Restore it, also plain attributes if they were saved."""

    def has_moved(self) -> bool:
        """Whether buffers or plain attributes have moved since."""

    def moved_attributes(self) -> list[str]:
        """Return the names of plain attributes that have moved since."""


@contextmanager
def _followed_by(restore: Callable[[], None]) -> Iterator[None]:
    """Call a function after the block, and once more if an interrupt came while it ran."""
    try:
        yield
    finally:
        try:
            restore()
        except BaseException:
            restore()
            raise


@contextmanager
def _modes_kept(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Restore the mode of each submodule after the block, which gets them."""
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    modes = [part.training for part in parts]

    def restore() -> None:
        for part, training in zip(parts, modes, strict=True):
            part.training = training

    with _followed_by(restore):
        yield parts


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode for the block, then restore the mode of each submodule."""
    modules = list(modules)
    with _modes_kept(modules):
        for module in modules:
            module.eval()
        yield


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled modules and functions eagerly in the block: a size that occurs once is not worth a graph."""
    if "torch._dynamo" not in sys.modules:  # importing it takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def without_onednn() -> Iterator[None]:
    """Leave oneDNN out in the block: it keeps memory for each size that it has met, on the CPU."""
    mkldnn: Any = torch.backends.mkldnn
    before = mkldnn.enabled
    with _followed_by(lambda: setattr(mkldnn, "enabled", before)):
        mkldnn.enabled = False
        yield


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


# Functions that give the greater of two numbers, in whatever place and by whatever name the second is.
_GREATER = {
    *(torch.clamp, torch.clamp_, torch.clip, torch.clip_, torch.clamp_min, torch.clamp_min_),
    *(Tensor.clamp, Tensor.clamp_, Tensor.clip, Tensor.clip_, Tensor.clamp_min, Tensor.clamp_min_),
    *(torch.maximum, torch.fmax, torch.max, Tensor.maximum, Tensor.fmax, Tensor.max),
}
# What Python's max() calls of a tensor.
_COMPARED = {Tensor.gt, Tensor.lt, Tensor.ge, Tensor.le}
# Functions that give a multiple of their first argument, or of either.
_OF_FIRST = (
    "to",
    "type",
    "float",
    "double",
    "half",
    "bfloat16",
    "detach",
    "clone",
    "reshape",
    "view",
    "squeeze",
    "div",
)
_OF_EITHER = ("mul", "mul_")


class Clamp(NamedTuple):
    """The greater of two numbers, as max(k, n), that a pass computes or may compute.

    Attributes:
        numbers: Both, in the order of the call.
        is_computed: Whether torch computes it, and not perhaps Python from a comparison.
    """

    numbers: tuple[float, float]
    is_computed: bool


class Clamps:
    """The numbers that a pass has clamped."""

    def __init__(self) -> None:
        # By the address of the tensor, which is kept: a graph may hold another object of the same memory.
        self._made: dict[int, tuple[Tensor, Clamp]] = {}
        self._compared: list[Clamp] = []

    def clear(self) -> None:
        """Begin a pass."""
        self._made.clear()
        self._compared.clear()

    def of(self, divisor: Any) -> Clamp | None:
        """Return the clamp that made a divisor, or a number that it is a multiple of; None if none did."""
        if (clamp := self._of(divisor)) is not None:
            return clamp
        with suppress(TypeError, ValueError, RuntimeError):  # it is no number
            least = _number(divisor)
            return next((one for one in self._compared if one.numbers[1] == least > one.numbers[0]), None)
        return None

    def _of(self, made: Any) -> Clamp | None:
        """Return the clamp that made a tensor; None if none did."""
        return self._made.get(_address(made), (None, None))[1] if isinstance(made, Tensor) else None

    def look(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Clamp | None:
        """Return the clamp that makes the result of a function that is about to be called; None if none does."""
        is_computed = function in _GREATER
        if is_computed or function in _COMPARED:
            given = [*args, *(kwargs[name] for name in ("input", "min", "other") if name in kwargs)]
            with suppress(TypeError, ValueError, RuntimeError):  # no two numbers, or none that can be read
                first, second = map(_number, given[:2])
                clamp = Clamp((first, second), is_computed)
                if is_computed:
                    return clamp
                self._compared.append(clamp)
                self.note(given[0], clamp)
        elif self._made:
            name = getattr(function, "__name__", "")
            sources = args[:1] if name in _OF_FIRST else args if name in _OF_EITHER else ()
            return next((found for one in sources if (found := self._of(one)) is not None), None)
        return None

    def note(self, made: Any, clamp: Clamp) -> None:
        """Note what a clamp has made."""
        if isinstance(made, Tensor) and made.numel() == 1 and not made.requires_grad:
            self._made[_address(made)] = made, clamp


@contextmanager
def quiet_training(modules: Sequence[nn.Module], *, noting: Clamps) -> Iterator[None]:
    """Keep modules in their modes for the block, except for layers that draw numbers or take a batch's statistics.

    Args:
        modules: The modules.
        noting: Notes which numbers are clamped.
    """
    with _modes_kept(modules) as parts:
        for part in parts:
            if isinstance(part, _QUIET) or type(part).__name__ in _STOCHASTIC_DEPTH:
                part.training = False
        with _Quiet(noting):
            yield


class _Quiet(TorchFunctionMode):
    """Calls functions that are told whether they train as if they did not, and notes which numbers are clamped."""

    def __init__(self, noting: Clamps) -> None:
        super().__init__()
        self._clamps = noting

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
        clamp = self._clamps.look(function, args, kwargs)
        made = function(*args, **kwargs)
        if clamp is not None:
            self._clamps.note(made, clamp)
        return made


def _address(tensor: Tensor) -> int:
    with suppress(RuntimeError):  # it has none, as one that is fake
        return tensor.data_ptr()
    return id(tensor)


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
