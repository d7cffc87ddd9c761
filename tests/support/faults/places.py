"""Memory that runs out, or another error, at chosen places of a training and at chosen times."""

import torch


def lack():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (injected)")


class Fault:
    """Raises at chosen times of those at which a place is passed, counted from 0 since it was armed.

    A place calls it: as a hook, in a function of the user's, or on the way back. Copies of a model hold the same one.

    Args:
        times: When it raises.
        error: What it raises; None for lack of memory.

    Attributes:
        passed: How often the place was passed.
        hits: How often it has raised.
    """

    def __init__(self, *times, error=None):
        self.arm(*times, error=error)

    def arm(self, *times, error=None):
        self.times, self.error, self.passed, self.hits = times, error, 0, 0

    def __call__(self, *_, **__):
        self.passed += 1
        if self.passed - 1 in self.times:
            self.hits += 1
            raise self.error or lack()

    def __deepcopy__(self, _):
        return self


def passed_back(values, place):
    """Return the values; the place is called where their gradient arrives."""
    return _Back.apply(values, place)


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, place):
        ctx.place = place
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.place()
        return gradient, None
