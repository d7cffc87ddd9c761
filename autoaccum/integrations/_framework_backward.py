"""What a framework does around a backward pass, which the accumulator must know of: autocast, accumulated batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from autoaccum._training.accumulator import Accumulator


def tell_of_autocast(accumulator: Accumulator, name: str | None) -> None:
    """Let an accumulator that was made with precision="fp32" know that its model casts by itself.

    Its messages then name the right precision, and what it compares is compared as half precision rounds.

    Args:
        accumulator: The accumulator.
        name: "bf16" or "fp16"; None if the model does not cast.
    """
    if name is not None:
        accumulator._step.precision.name = name
        accumulator._step.objective.casts_itself = True


def divide_gradients(accumulator: Accumulator, batches: Callable[[], int]) -> None:
    """Divide gradients by the number of batches that the framework makes an update of, as its backward pass does."""
    step = accumulator._step
    scale = step.scale

    def divided(loss: Tensor) -> Tensor:
        number = batches()
        loss = loss if number == 1 else loss / number
        return loss if scale is None else scale(loss)

    step.scale = divided
