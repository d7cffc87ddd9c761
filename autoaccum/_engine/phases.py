"""The phases of a training step, recorded so that whoever catches a failure knows where it happened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """A phase of a window. Its value appears in `MemoryEvent.phase` and in reports."""

    SAVE = "save"  # buffers and random state, to restore them later
    WEIGH = "weigh"  # try the loss, and weigh micro-batches
    TRANSFER = "transfer"
    FORWARD = "forward"
    BACKWARD = "backward"
    RESERVE = "reserve"  # memory for the optimizer's step
    ADD = "add"  # a batch's gradient to earlier ones
    REDUCE = "reduce"  # gradients over ranks
    UNSCALE = "unscale"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    ELSEWHERE = "on another rank"


@dataclass(slots=True)
class Stage:
    """A training step's current phase, shared by its parts."""

    phase: Phase = Phase.TRANSFER
