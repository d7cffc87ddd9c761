"""Memory that runs out once in a part of the library, or at an operator, on the rank that uses this."""

import itertools
from contextlib import nullcontext
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from autoaccum._data.transfer import Transfer  # a place that is failed in
from autoaccum._distributed.data_parallel import RankPeers  # a place that is failed in
from autoaccum._engine.forward_backward import GradientStep  # a place that is failed in
from autoaccum._engine.optimizer_step import OptimizerSteps  # a place that is failed in
from autoaccum._loss.known_shares import Nothing  # a place that is failed in
from support.faults.modes import FailAt

WHERE = {
    "enter": (GradientStep, "run"),
    "transfer": (Transfer, "feed"),
    "reserve": (OptimizerSteps, "reserve"),
    "spare pass": (Nothing, "enter"),
    "after the passes": (RankPeers, "_fill_losses"),
}


def raising():
    yield from ()
    raise torch.OutOfMemoryError("CUDA out of memory: for this test")


def lacking(where, fails_at):
    """Let memory run out where a part of the library is called for the `fails_at`-th time."""
    owner, name = WHERE[where]
    real, calls = getattr(owner, name), itertools.count(1)

    def failing(*given, **named):
        if next(calls) == fails_at:
            return nullcontext(raising()) if where == "transfer" else next(raising())
        return real(*given, **named)

    return mock.patch.object(owner, name, failing)


def lacking_on(who, where, fails_at):
    """The same on one of several ranks: what a row gives."""
    return lambda rank, size: {"during": lacking(where, fails_at) if rank == who and size > 1 else nullcontext()}


class FailAtPoint(FailAt):
    """Counts what a rank computes from the first forward pass of a window to its update, and not what it says.

    What fails elsewhere, in a loader or in the preparations, is no lack of memory that a smaller cut could mend.
    """

    def __init__(self, *points, lasts=False):
        super().__init__(*points)
        self.lasts = lasts
        self.is_in_window = False

    def begin(self, *_):
        self.is_in_window = True

    def end(self, *_):
        self.is_in_window = False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        takes_none = operator.is_view or operator.namespace == "c10d"
        if not self.is_in_window or takes_none or _has_bytes(args, kwargs or {}):
            return operator(*args, **(kwargs or {}))
        if self.lasts and self.hits:
            self.points.add(self.count + 1)
        return super().__torch_dispatch__(operator, types, args, kwargs)


def _has_bytes(args, kwargs):
    """Whether something works on a message: no model here has bytes."""
    return kwargs.get("dtype") is torch.uint8 or any(
        isinstance(one, torch.Tensor) and one.dtype is torch.uint8 for one in tree_leaves(args)
    )
