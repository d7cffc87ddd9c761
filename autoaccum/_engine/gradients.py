"""Results of a window's micro-batches, before and after they are combined over processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoaccum._loss.reported import LOSS

if TYPE_CHECKING:
    from torch import Tensor

    from autoaccum._engine.noise_scale import Spread
    from autoaccum._loss.reported import Slot


@dataclass(frozen=True, slots=True)
class Given:
    """Results of a window's micro-batches, or of this process's part of it. Gradients are in `.grad`.

    Attributes:
        losses: The losses by name, on the device.
        pair_weight: Weight of a (sum, weight) pair. Gradients and losses have been divided by the number of samples
            instead, and are still to be divided by it; None if nothing is left to correct.
        samples: Samples of the window or part.
        reported: Values reported in addition to the losses: sums and weights, as `reported.means` expects them.
        spread: How far the gradients of the micro-batches are apart, if that is measured.
    """

    losses: dict[str, Tensor]
    pair_weight: float | Tensor | None
    samples: int
    reported: dict[Slot, Any] = field(default_factory=dict)
    spread: Spread | None = None

    @property
    def slots(self) -> dict[Slot, Any]:
        """The losses and reported values, as `reported.means` expects them."""
        return {(LOSS, name): loss for name, loss in self.losses.items()} | self.reported

    @property
    def correction(self) -> float | Tensor:
        """The factor for gradients and losses if these samples are the whole window."""
        return 1.0 if self.pair_weight is None else self.samples / self.pair_weight

    def corrected_losses(self) -> dict[str, Tensor]:
        """Return the losses if these samples are the whole window."""
        correction = self.correction
        return self.losses if self.pair_weight is None else {n: loss * correction for n, loss in self.losses.items()}


@dataclass(slots=True)
class Reduced:
    """Results of a whole window, over all processes. Its gradient is in `.grad`, unscaled and clipped.

    Attributes:
        losses: The window's losses by name, on the device.
        reported: Values reported in addition to the losses, by name.
        samples: Samples of the window; 0 means that there is no update to make.
        grad_norm: Norm of the gradient before clipping, on the device; None if it is not clipped.
        spread: How far the gradients of all micro-batches are apart, if that was measured.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    reported: dict[str, Tensor] = field(default_factory=dict)
    samples: int = 0
    grad_norm: Tensor | None = None
    spread: Spread | None = None
