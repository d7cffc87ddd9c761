"""The arguments that `fit` shares with other entry points, in one record: checked here, described by `fit` alone."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from autoaccum._arguments import check_choice, check_path, check_positive_int, check_positive_number, shown
from autoaccum._callbacks import check_callbacks
from autoaccum._data.splits import check_split
from autoaccum._engine.precision import ALIASES, PRECISIONS
from autoaccum._loss.loss_sources import check_loss_reduction
from autoaccum._memory.limits import parse_limit
from autoaccum._memory.simulated import Simulated
from autoaccum._saving.savings import check_savings
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    import torch
    from torch import nn

    from autoaccum._callbacks import Callback
    from autoaccum._data.pieces import Split
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._loss.loss_sources import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices

LOSS_SCOPES = ("micro_batch", "window")
BATCHNORM_MODES = ("keep", "rescale")
ON_NAN = ("warn", "stop")
ON_TOO_LARGE = ("raise", "skip")
# Before the device is known, a limit and names are read as on one that is larger than any.
_ANY_DEVICE_BYTES = 2**60
_NOISE_EVERY = 50  # windows, with noise_scale=True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """Arguments of `fit`, by their names; where an entry point does not take one, its default.

    Attributes:
        names: The names of all that the entry point takes: errors advise no others.
        notices: Those of an adapter, if it has said something already.

    Raises:
        InvalidInputError: An argument cannot be used, on any device.
    """

    names: frozenset[str] = frozenset()
    loss: Loss | Sequence[Loss] | None = None
    loss_reduction: str | None = None
    loss_scope: str = "micro_batch"
    forward: Callable[[nn.Module, Any], Any] | None = None
    split: Split | None = None
    batchnorm: str = "keep"
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakesOptimizer | str | None = None
    clip_grad_norm: float | None = None
    on_nan: str = "warn"
    noise_scale: bool | int = False
    device: str | torch.device | MemoryBackend | None = None
    precision: str = "auto"
    micro_batch: int | str = "auto"
    memory_limit: float | str | None = None
    save_memory: str | Sequence[str] | None = None
    on_too_large: str = "raise"
    oom_report: str | PathLike[str] | None = None
    callbacks: Sequence[Callback] = ()
    notices: Notices | None = None

    @classmethod
    def of(cls, entry: Callable[..., Any], given: Mapping[str, Any]) -> Self:
        """Return the options of a call of a function or class, of its arguments by name; others are left aside."""
        return cls(names=_taken_by(entry), **{name: given[name] for name in SHARED if name in given})

    def __post_init__(self) -> None:
        """Check them."""
        if isinstance(self.micro_batch, str):
            if self.micro_batch != "auto":
                raise InvalidInputError(
                    f"micro_batch={shown(self.micro_batch)} is unknown; pass 'auto' or a whole number"
                )
        else:
            check_positive_int("micro_batch", self.micro_batch)
        check_callbacks(self.callbacks)
        check_choice("loss_scope", self.loss_scope, LOSS_SCOPES)
        check_choice("batchnorm", self.batchnorm, BATCHNORM_MODES)
        check_choice("on_nan", self.on_nan, ON_NAN)
        check_choice("on_too_large", self.on_too_large, ON_TOO_LARGE)
        if self.on_too_large == "skip" and self.loss_scope == "window":
            raise InvalidInputError(
                "on_too_large='skip' leaves samples out of a window, and loss_scope='window' is for losses over all of "
                "them; use one of the two"
            )
        check_choice("precision", self.precision, (*PRECISIONS, *ALIASES))
        object.__setattr__(self, "precision", ALIASES.get(self.precision, self.precision))
        check_loss_reduction(self.loss_reduction)
        check_split(self.split)
        if self.clip_grad_norm is not None:
            check_positive_number("clip_grad_norm", self.clip_grad_norm)
        _ = self.report_folder
        self._check_noise_scale()
        anywhere = Simulated(_ANY_DEVICE_BYTES)
        self.limit_bytes(anywhere)
        self.savings(anywhere)

    def _check_noise_scale(self) -> None:
        asked = self.noise_scale
        if isinstance(asked, str):
            raise InvalidInputError(
                f"noise_scale={shown(asked)} is neither True nor a number of windows; pass True, or such as 50"
            )
        if not isinstance(asked, bool | None):
            check_positive_int("noise_scale", asked)
        if asked and self.loss_scope == "window":
            raise InvalidInputError(
                f"noise_scale={asked} compares gradients of micro-batches, and loss_scope='window' is for losses whose "
                "gradient is no mean of theirs; leave noise_scale out"
            )

    @property
    def report_folder(self) -> Path | None:
        """The folder of `oom_report`, which need not exist yet; None if none is asked for."""
        return None if self.oom_report is None else check_path("oom_report", self.oom_report, "folder for the report")

    @property
    def noise_every(self) -> int | None:
        """The number of windows from one whose gradient noise is measured to the next; None for no measuring."""
        return _NOISE_EVERY if self.noise_scale is True else self.noise_scale or None

    def limit_bytes(self, device: MemoryBackend) -> int | None:
        """Return the memory limit as the device counts it; None for no limit."""
        return parse_limit(self.memory_limit, device)

    def savings(self, device: MemoryBackend) -> tuple[str, ...]:
        """Return the names in `save_memory`, in order."""
        return check_savings(self.save_memory, device)


# The names of the arguments.
SHARED = frozenset(field.name for field in dataclasses.fields(Options)) - {"names", "notices"}


@functools.cache
def _taken_by(entry: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(entry).parameters)
