"""Trainings of models to which `fully_shard` was applied."""

from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import autoaccum
from support.ranks import named_losses, training


def sharded(model, *, last_layer_is_whole=False, stays_gathered=False):
    """Spread a sequence of layers over all ranks, as is usual: the larger layers by themselves, then the whole."""
    if last_layer_is_whole:
        fully_shard(model[0])
        return model
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=not stays_gathered)
    return fully_shard(model)


def whole(outcome):
    """Return an outcome whose parameters are gathered, so that it can leave its process."""
    return {**outcome, "parameters": [one.full_tensor() for one in outcome["parameters"]]}


def train(
    rank, size, *, norm=False, dropout=0.0, model=None, last_layer_is_whole=False, stays_gathered=False, **arguments
):
    model = model or training.net(norm=norm, dropout=dropout)
    training.seeded(rank)
    model = sharded(model, last_layer_is_whole=last_layer_is_whole, stays_gathered=stays_gathered)
    return whole(training.train(rank, size, model=model, **arguments))


def with_own_samples(rank, size, lengths, **arguments):
    return train(rank, size, make_loader=training.own_loader(lengths), **arguments)


def alone(rank, size, **arguments):
    return training.train(rank, size, **arguments)


def evaluated(rank, size, lengths, *, loss="tokens, found out", **arguments):
    samples = training.LOSSES[loss][0](sum(lengths), seed=5)
    loader = training.own_loader(lengths)(rank, size, samples)
    own = training.own_loader([training.SAMPLES // size] * size)
    arguments |= {"make_loader": own, "metrics": {"size": training.mean_size}}
    return train(rank, size, loss=loss, val_loader=loader, **arguments)


class Greedy(nn.Module):
    """Takes more memory than there is for more than `most` samples: really, so that the allocator fails."""

    def __init__(self, most, *, backward=False):
        super().__init__()
        self.most, self.backward = most, backward

    def forward(self, inputs):
        return _Take.apply(inputs, self.most, self.backward)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, most, backward):
        ctx.is_too_many = len(inputs) > most
        if ctx.is_too_many and not backward:
            torch.empty(1 << 50)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.is_too_many:
            torch.empty(1 << 50)
        return gradient, None, None


def greedy(rank, size, most, *, greedy_rank=1, backward=False, norm=False, **arguments):
    net = training.net(norm=norm)
    net.insert(2, Greedy(most if rank == greedy_rank else 1000, backward=backward))
    return train(rank, size, model=net, **arguments)


class GreedyInEvaluation(Greedy):
    def forward(self, inputs):
        return inputs.clone() if self.training else super().forward(inputs)


def greedy_in_evaluation(rank, size, most, **arguments):
    """Train and evaluate as on a device that fails cleanly, which a host does not."""
    net = training.net()
    net.insert(2, GreedyInEvaluation(most))
    loader = DataLoader(training.vectors(40, seed=5), batch_size=10)
    return train(rank, size, model=net, val_loader=loader, device=autoaccum.Simulated("1GiB"), **arguments)


def without_room(rank, size, **arguments):
    """Train where the host of rank 0 has no room for the second tensor of a whole state."""
    copies = []

    def cpu(tensor):
        copies.append(tensor)
        if rank == 0 and len(copies) > 1:
            raise MemoryError("for this test")
        return tensor

    with mock.patch.object(torch.Tensor, "cpu", cpu):
        return train(rank, size, **arguments)


def unsharded(rank, size, *, norm=False, **arguments):
    return training.train(rank, size, model=training.net(norm=norm), **arguments)


class EndsAfter(autoaccum.Callback):
    """Ends a training after a step by an error, as a process does that is killed there."""

    def __init__(self, step):
        self.step = step

    def on_step(self, report, *, epoch):
        if report.step == self.step:
            raise RuntimeError("told to")


def evaluation_of_names(rank, size, kind, samples, folder=None, *, ends_after=None):
    """Train one epoch on named losses; return the losses of the evaluation at its end, None if it did not come."""
    model = sharded(training.net())
    try:
        result = autoaccum.fit(
            model,
            DataLoader(training.texts(), batch_size=7),
            target_batch=25,
            micro_batch=5,
            loss=named_losses.LOSSES[kind],
            optimizer=training.sgd,
            epochs=1,
            shard_data=True,
            device="cpu",
            progress=False,
            checkpoint=folder,
            checkpoint_every=None if folder is None else 1,
            callbacks=[] if ends_after is None else [EndsAfter(ends_after)],
            val_loader=DataLoader(training.texts(samples, seed=5), batch_size=3),
        )
    except RuntimeError:
        return None
    (evaluation,) = result.evaluations
    return evaluation.loss, dict(evaluation.losses)
