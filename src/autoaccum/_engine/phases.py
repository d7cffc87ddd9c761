"""What a training step is doing, so that whoever catches a failure can tell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """A phase of a window; its value is what `MemoryEvent.phase` and reports show."""

    SET_ASIDE = "set aside"  # of buffers and random state, to go back to
    WEIGH = "weigh"  # finding out what the loss runs over, and what micro-batches weigh
    TRANSFER = "transfer"
    FORWARD = "forward"
    BACKWARD = "backward"
    RESERVE = "reserve"  # memory for the optimizer's step
    REDUCE = "reduce"  # gradients over ranks
    UNSCALE = "unscale"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    ELSEWHERE = "on another rank"


@dataclass(slots=True)
class Stage:
    """Where a training step stands, shared by its parts.

    Attributes:
        phase: What is being done.
    """

    phase: Phase = Phase.TRANSFER
