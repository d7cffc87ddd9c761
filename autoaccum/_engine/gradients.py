"""Results of a window's micro-batches, before and after they are combined over processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._loss.reported import LOSS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from autoaccum._engine.noise_scale import Spread
    from autoaccum._loss.reported import Slot

    Losses = Mapping[str, "Parts"]


# A relative difference that is rounding of double precision.
_ROUNDING = 1e-14


class Parts:
    """What each micro-batch adds to a loss, on the device. They are added only when the loss is read.

    Args:
        parts: Tensors without dimensions.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Tensor]) -> None:
        self._parts = parts

    def total(self) -> Tensor:
        """Return the loss, on the device."""
        return self._parts[0] if len(self._parts) == 1 else torch.stack(self._parts).sum()


@dataclass(slots=True)
class Progress:
    """How far a window is.

    Attributes:
        sizes: The sizes of its micro-batches, in the order of its samples.
        size: That of the micro-batch which is running; None for none.
        done: Samples whose gradients are complete.
        recomputed: Samples that were computed and discarded.
    """

    sizes: tuple[int, ...] = ()
    size: int | None = None
    done: int = 0
    recomputed: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """Results of a window's micro-batches, or of this process's part of it. Gradients are in `.grad`.

    Attributes:
        samples: Samples of the window or part.
        parts: The losses by name, as what each micro-batch adds to them.
        weight: What the loss is divided by; None if nothing is left to correct.
        provisional: What gradients and losses have been divided by instead.
        reported: Values reported in addition to the losses: sums and weights, as `reported.means` expects them.
        spread: How far the gradient of the first micro-batch is from the whole, if that is measured.
        outputs: The model's outputs for each micro-batch, without graphs, if the step keeps them.
    """

    samples: int
    parts: Losses
    weight: float | Tensor | None = None
    provisional: float = 1.0
    reported: dict[Slot, Any] = field(default_factory=dict)
    spread: Spread | None = None
    outputs: tuple[Any, ...] = ()

    @property
    def losses(self) -> dict[str, Tensor]:
        """The losses by name, on the device."""
        return {name: parts.total() for name, parts in self.parts.items()}

    @property
    def slots(self) -> dict[Slot, Any]:
        """The losses and reported values, as `reported.means` expects them."""
        return {(LOSS, name): loss for name, loss in self.losses.items()} | self.reported

    @property
    def correction(self) -> float | Tensor:
        """The factor for gradients and losses if these samples are the whole window."""
        if self.weight is None:
            return 1.0
        if isinstance(self.weight, float) and abs(self.weight - self.provisional) <= _ROUNDING * self.provisional:
            return 1.0
        return self.provisional / self.weight

    def corrected(self) -> Losses:
        """Return the losses if these samples are the whole window."""
        factor = self.correction
        if isinstance(factor, float) and factor == 1.0:
            return self.parts
        return {name: Parts([loss * factor]) for name, loss in self.losses.items()}


@dataclass(slots=True)
class Reduced:
    """Results of a whole window, over all processes. Its gradient is in `.grad`, unscaled and clipped.

    Attributes:
        losses: The window's losses by name, as parts that are still to be added.
        reported: Values reported in addition to the losses, by name.
        samples: Samples of the window; 0 means that there is no update to make.
        grad_norm: Norm of the gradient before clipping, on the device; None if it is not clipped.
        spread: As in `Given`, over all processes.
    """

    losses: Losses = field(default_factory=dict)
    reported: dict[str, Tensor] = field(default_factory=dict)
    samples: int = 0
    grad_norm: Tensor | None = None
    spread: Spread | None = None
