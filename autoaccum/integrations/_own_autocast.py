"""Models that a framework runs in autocast, which the accumulator must know of and not enter again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoaccum._training.accumulator import Accumulator


def tell_of_autocast(accumulator: Accumulator, name: str) -> None:
    """Let an accumulator that was made with precision="fp32" know that its model casts by itself.

    Its messages then name the right precision, and what it compares is compared as half precision rounds.

    Args:
        accumulator: The accumulator.
        name: "bf16" or "fp16".
    """
    step = accumulator._step
    step.precision.name = name
    step.objective.casts_itself = True
