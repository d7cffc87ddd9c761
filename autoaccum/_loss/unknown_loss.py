"""Says why no weighting fits a loss, and what to do: it draws random numbers, or it is no mean over its samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoaccum._loss.nonlinear_terms import bent_entries

if TYPE_CHECKING:
    from autoaccum._loss.observation import Attempt

# Each is used twice: what agrees under one seed and not under two is random.
_SEEDS = (1, 2)


def advice(name: str, attempt: Attempt) -> str:
    """Return why the reduction of a loss cannot be inferred, and what to do about it."""
    if (how := randomness(name, attempt)) is not None:
        return f"{how}: pass loss_reduction='mean' or 'sum', or return a (sum, weight) pair"
    if bent := bent_entries(attempt):
        names = " + ".join(map(repr, bent))
        return (
            f"Its term {names} is no mean over the samples, and is taken for each micro-batch. {window_scope(attempt)}"
        )
    if not attempt.sample.is_nested:
        return (
            "If it is a mean over tokens, boxes or the like, give the split weight(batch), which counts them. "
            f"{window_scope(attempt)}"
        )
    if attempt.way.outputs is None:
        others = (
            "Class weights are exact as a (sum, weight) pair. A term that is no mean over the samples (a router's "
            "load-balancing loss) keeps the rest from being recognised: return both as a mapping of several losses"
        )
    else:
        others = (
            "Class weights are exact in torch.nn.CrossEntropyLoss(weight=...), passed as loss= itself; means of "
            "different kinds are exact as a mapping of several losses, or as (sum, weight) pairs"
        )
    return f"{window_scope(attempt)}. {others}"


def randomness(name: str, attempt: Attempt) -> str | None:
    """Return how random numbers, or state, change a loss from one run to the next; None if they do not."""
    if name not in attempt.observed[0].whole:
        return None
    tried = [attempt.repeat(name, seed=seed) for seed in _SEEDS for _ in range(2)]
    calls = [values for values in tried if values is not None]
    if len(calls) < len(tried):
        return None
    tolerance = attempt.observed[0].split(name).rounding.most
    one, again, other, once_more = (first for first, _ in calls)
    if not (_are_close(one, again, tolerance) and _are_close(other, once_more, tolerance)):
        return (
            "Two runs on the same samples, in evaluation mode and from the same random state, differ: the loss or the "
            "model draws random numbers from a generator that is not torch's, Python's or NumPy's own, or keeps state"
        )
    if not _are_close(one, other, tolerance):
        return "The loss or the model draws random numbers even in evaluation mode, so no two runs agree"
    if not _are_close(*calls[0], tolerance):
        return "The loss or the model writes to its own buffers, even in evaluation mode, so no two calls agree"
    return None


def window_scope(attempt: Attempt) -> str:
    """Return whether `loss_scope="window"` helps."""
    if attempt.way.outputs is not None:
        return (
            "Pass loss_scope='window', which is exact for any deterministic function of per-sample outputs "
            "(contrastive and metric losses, hard example mining, the root of a mean)"
        )
    why = (
        "the outputs that loss= takes do not have one row for each sample"
        if attempt.run.objective.takes_outputs
        else "the model computes this loss itself"
    )
    return f"loss_scope='window' cannot mend it, since {why}: it needs loss=, a function of per-sample outputs"


def _are_close(one: float, other: float, tolerance: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(abs(one), abs(other))
