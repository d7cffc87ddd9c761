"""What several test files want: small models, loaders that count, states to compare."""

import contextlib
import copy
import gc
import itertools
import logging

import pytest
import torch
from torch import nn

import autoaccum

CPU = torch.device("cpu")
WITHOUT_WARNINGS = pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in ("User", "Future", "Deprecation")))


def classifier(classes=3, features=4):
    """A network with buffers (BatchNorm) and random masks (Dropout), so that every kind of state is there."""
    return nn.Sequential(
        nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, classes)
    ).double()


def labelled(samples, classes=3, features=4):
    """A batch (inputs, targets) in which every sample is another one."""
    return torch.randn(samples, features, dtype=torch.float64), torch.arange(samples) % classes


def batches_of(batch, *sizes):
    return list(zip(*(half.split(list(sizes)) for half in batch), strict=True))


def runner_of(model, optimizer=None, samples=8, micro_batch=8, *, loss=None, **options):
    """A runner by SGD, of cross entropy, on the CPU, unless something else is said."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return autoaccum.Runner(
        model,
        torch.optim.SGD(trained, 0.1) if optimizer is None else optimizer,
        autoaccum.plan(samples, micro_batch),
        loss=nn.CrossEntropyLoss() if loss is None else loss,
        **{"device": "cpu"} | options,
    )


def fit_quietly(model, loader, target_batch, **options):
    """Train on the CPU and say nothing, unless something else is said."""
    return autoaccum.fit(model, loader, target_batch, **{"device": "cpu", "progress": False} | options)


class Limited(nn.Module):
    """Lacks memory where more samples come at once than `most`."""

    def __init__(self, body, most):
        super().__init__()
        self.body, self.most = body, most

    def forward(self, inputs):
        outputs = self.body(inputs)
        if self.most is not None and len(inputs) > self.most:
            raise torch.OutOfMemoryError("told to")
        return outputs


class CountingLoader:
    def __init__(self, batches):
        self.batches = list(batches)
        self.drawn = 0

    def __iter__(self):
        for batch in self.batches:
            self.drawn += 1
            yield batch


def state_of(model):
    """A copy of everything in a model that a call must leave alone: values, buffers, gradients and modes."""
    return {
        "values": copy.deepcopy(model.state_dict()),
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [part.training for part in model.modules()],
    }


def assert_bitwise(found, expected):
    """Same values to the last bit, types and keys included; NaN equals NaN."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def a_few_of(*axes):
    """Combinations for `parametrize`: the quick tests take so many that every value occurs, the sweeps the rest."""
    most = max(map(len, axes))
    quick = {tuple(list(axis)[number % len(axis)] for axis in axes) for number in range(most)}
    return [
        pytest.param(*values, marks=() if values in quick else pytest.mark.sweep) for values in itertools.product(*axes)
    ]


def one_in(number, table):
    """Rows of a table for `parametrize`: of so many one is quick, the others slow."""
    return [pytest.param(row, marks=pytest.mark.slow if place % number else ()) for place, row in enumerate(table)]


@contextlib.contextmanager
def logged():
    """Yields a list of what is logged under "autoaccum" in the block."""
    lines, handler, logger = [], logging.Handler(), logging.getLogger("autoaccum")
    handler.emit = lambda record: lines.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
