"""Trainings of models that are spread over ranks, in which memory runs out once in a part of the library."""

import contextlib
import itertools
from unittest import mock

import torch

from autoaccum._data.transfer import Transfer  # a place that is failed in
from autoaccum._distributed.data_parallel import RankPeers  # a place that is failed in
from autoaccum._engine.forward_backward import GradientStep  # a place that is failed in
from autoaccum._engine.optimizer_step import OptimizerSteps  # a place that is failed in
from autoaccum._loss.known_shares import Nothing  # a place that is failed in
from support.ranks.sharded import train

WHERE = {
    "enter": (GradientStep, "run"),
    "transfer": (Transfer, "feed"),
    "reserve": (OptimizerSteps, "reserve"),
    "spare pass": (Nothing, "enter"),
    "after the passes": (RankPeers, "_fill_losses"),
}


def raising():
    yield from ()
    raise torch.OutOfMemoryError("for this test")


def lacking(rank, size, where, *, fails_at, who=0, **arguments):
    owner, name = WHERE[where]
    real, calls = getattr(owner, name), itertools.count(1)

    def failing(*given, **named):
        if rank == who and next(calls) == fails_at:
            return contextlib.nullcontext(raising()) if where == "transfer" else next(raising())
        return real(*given, **named)

    with mock.patch.object(owner, name, failing):
        return train(rank, size, **arguments)


def lacking_each(rank, size, points, **arguments):
    where, fails_at = points[rank]
    return lacking(rank, size, where, fails_at=fails_at, who=rank, **arguments)
