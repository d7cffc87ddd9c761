"""Models to which `fully_shard` was applied, and layers of them that lack memory within a pass."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def spread(model, **policy):
    """Spread a sequence of layers over all ranks, as is usual: its linear layers each, then the rest."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **policy)
    return fully_shard(model, **policy)


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def here(tensor):
    """What this rank has of a tensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


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
