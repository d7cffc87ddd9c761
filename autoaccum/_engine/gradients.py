"""Results of a window's micro-batches, before and after they are combined over processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._loss.reported import LOSS, sums_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from autoaccum._engine.noise_scale import Spread
    from autoaccum._loss.reported import Slot
    from autoaccum._loss.window_weights import WindowWeights
    from autoaccum.errors import InvalidInputError

    Losses = Mapping[str, "LossSum"]


class LossSum:
    """What each micro-batch adds to a loss, on the device. The parts are added only when the loss is read."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts

    def total(self) -> Tensor:
        """Return the loss, on the device."""
        return self.parts[0] if len(self.parts) == 1 else torch.stack(self.parts).sum()


@dataclass(slots=True)
class Progress:
    """How far a window is.

    Attributes:
        sizes: The sizes of its micro-batches, in the order of its samples.
        size: That of the micro-batch which is running; None for none.
        done: Samples that were passed through.
        recomputed: Samples that were computed and discarded.
    """

    sizes: tuple[int, ...] = ()
    size: int | None = None
    done: int = 0
    recomputed: int = 0


@dataclass(slots=True)
class PartResult:
    """Results of a window's micro-batches, or of this process's part of it. Gradients are in `.grad`.

    Attributes:
        samples: Samples of the window or part.
        losses: The losses by name, as what each micro-batch adds to them.
        weights: The weights of the micro-batches; None if nothing is left to correct.
        reported: What values reported in addition to the losses add, as recorded by `reported.note`.
        spread: How far the gradient of the first micro-batch is from the whole, if that is measured.
        outputs: The model's outputs for each micro-batch, without graphs, if the step keeps them.
        skipped_leaves: What gradients of losses in which nothing counts, and that had no backward pass, would have
            reached.
        deferred_error: The error with which the training ends, since a loss cannot be weighted as planned; held back
            where processes have to end passes together before they hear of it. These results do not count.
        micro_batches: How many have run, not counted for `loss_scope="window"`.
    """

    samples: int = 0
    losses: dict[str, LossSum] = field(default_factory=dict)
    weights: WindowWeights | None = None
    reported: dict[Slot, list[Any]] = field(default_factory=dict)
    spread: Spread | None = None
    outputs: list[Any] = field(default_factory=list)
    skipped_leaves: list[Tensor] = field(default_factory=list)
    deferred_error: InvalidInputError | None = None
    micro_batches: int = 0

    def loss(self, name: str) -> list[Tensor]:
        """Return the list of what each micro-batch adds to a loss."""
        return self.losses.setdefault(name, LossSum([])).parts

    def fill_zero_gradients(self) -> None:
        """Give zeros to `skipped_leaves` without a gradient: optimizers leave out parameters that have none."""
        for tensor in self.skipped_leaves:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        self.skipped_leaves.clear()

    @property
    def slots(self) -> dict[Slot, Any]:
        """The losses and reported values, as `reported.means` expects them."""
        losses = {(LOSS, name): loss.total() for name, loss in self.losses.items()}
        return losses | sums_of(self.reported)


@dataclass(slots=True)
class WindowResult:
    """Results of a whole window, over all processes. Its gradient is in `.grad`, unscaled and clipped.

    Attributes:
        losses: The window's losses by name, as parts that are still to be added.
        reported: Values reported in addition to the losses, by name.
        samples: Samples of the window; 0 means that there is no optimizer step to make.
        grad_norm: Norm of the gradient before clipping, on the device; None if it is not clipped.
        spread: As in `PartResult`, over all processes.
    """

    losses: Losses = field(default_factory=dict)
    reported: dict[str, Tensor] = field(default_factory=dict)
    samples: int = 0
    grad_norm: Tensor | None = None
    spread: Spread | None = None
