"""What a window's micro-batches give, and what becomes of it before the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoaccum._loss.reported import LOSS

if TYPE_CHECKING:
    from torch import Tensor

    from autoaccum._loss.reported import Slot


@dataclass(frozen=True, slots=True)
class Given:
    """What the micro-batches of a window, or of this process's part of it, have given; gradients lie in `.grad`.

    Attributes:
        losses: The losses by name, on the device.
        pair_weight: Of a (sum, weight) pair, the weight by which gradients and losses are still to be divided, which
            have been divided by the number of samples; None where nothing is left to do.
        samples: Samples of the window or part.
        reported: What is reported besides the losses: sums and weights, as `reported.means` takes them.
    """

    losses: dict[str, Tensor]
    pair_weight: float | Tensor | None
    samples: int
    reported: dict[Slot, Any] = field(default_factory=dict)

    @property
    def slots(self) -> dict[Slot, Any]:
        """The losses and what is reported besides them, as `reported.means` takes them."""
        return {(LOSS, name): loss for name, loss in self.losses.items()} | self.reported

    @property
    def correction(self) -> float | Tensor:
        """The factor for gradients and losses where these samples are the whole window."""
        return 1.0 if self.pair_weight is None else self.samples / self.pair_weight

    def corrected_losses(self) -> dict[str, Tensor]:
        """Return the losses where these samples are the whole window."""
        correction = self.correction
        return self.losses if self.pair_weight is None else {n: loss * correction for n, loss in self.losses.items()}


@dataclass(slots=True)
class Reduced:
    """A whole window, over all processes; its gradient lies in `.grad`, unscaled and clipped.

    Attributes:
        losses: The window's losses by name, on the device.
        reported: What is reported besides the losses, by name.
        samples: Samples of the window; with 0 there is no update to make.
        grad_norm: Norm of the gradient before clipping, on the device; None where it is not clipped.
    """

    losses: dict[str, Tensor] = field(default_factory=dict)
    reported: dict[str, Tensor] = field(default_factory=dict)
    samples: int = 0
    grad_norm: Tensor | None = None
