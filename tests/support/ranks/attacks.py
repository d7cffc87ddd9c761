"""Trainings on ranks with unlike memory and unlike numbers of samples, in which memory runs out once on one of them."""

import itertools
from unittest import mock

import torch
from torch import nn

import autoaccum
from autoaccum._distributed.data_parallel import RankPeers  # a place that is failed in
from autoaccum._engine.optimizer_step import OptimizerSteps  # a place that is failed in
from support.ranks import training

INSIDE = {"reserve": (OptimizerSteps, "reserve"), "reduce": (RankPeers, "_fill_losses")}
# Windows of 40 samples on devices that hold some of them at once, and one with fewer samples than there are ranks.
SAMPLES, TARGET, SIZES = 122, 40, ["5KiB", "8KiB", "1MiB", "6KiB"]


class Fails(nn.Module):
    """Lacks memory once, in a forward or a backward pass of the second window."""

    def __init__(self, where):
        super().__init__()
        self.where, self.has_failed, self.may_fail = where, False, False

    def forward(self, inputs):
        if self.may_fail and inputs.requires_grad:
            if self.where == "forward":
                self.fail()
            elif self.where == "backward":
                inputs.register_hook(lambda _: self.fail())
        return inputs * 1.0

    def fail(self):
        if not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError("CUDA out of memory: for this test")


class SecondWindow(autoaccum.Callback):
    def __init__(self, layer):
        self.layer = layer

    def on_step(self, report, *, epoch):
        self.layer.may_fail = True


def model():
    return training.net()


def lacking(rank, size, where, who):
    net = model()
    fails = Fails(where if rank == who else "nowhere")
    net.insert(2, fails)
    owner, name = INSIDE.get(where, (OptimizerSteps, "reserve"))
    real = getattr(owner, name)

    def failing(*given, **named):
        if rank == who and where in INSIDE and fails.may_fail:
            fails.fail()
        return real(*given, **named)

    with mock.patch.object(owner, name, failing):
        found = training.train(
            rank,
            size,
            data=training.vectors(SAMPLES),
            model=net,
            target_batch=TARGET,
            shard_data=True,
            device=autoaccum.Simulated(SIZES[rank]),
            callbacks=[SecondWindow(fails)],
        )
    return found | {"has failed": fails.has_failed}


def alone():
    arguments = {"data": training.vectors(SAMPLES), "target_batch": TARGET, "micro_batch": TARGET}
    return training.train(0, 1, model=model(), **arguments)


def counted(outcomes):
    return [sum(itertools.chain(*cuts)) for cuts in zip(*(one["cuts"] for one in outcomes), strict=True)]
