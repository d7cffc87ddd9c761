"""A steady window launches what a loop by hand launches, and the copies of the savepoint; it waits for nothing."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoaccum

SAMPLES, MICRO_BATCH = 12, 4
WINDOWS = 6  # the sixth is neither the first nor a power of two
# Views compute nothing.
VIEWS = (
    "slice",
    "split",
    "split_with_sizes",
    "detach",
    "view",
    "t",
    "transpose",
    "select",
    "_unsafe_view",
    "alias",
    "expand",
)


class Launched(TorchDispatchMode):
    """Counts operators, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names[operator.overloadpacket.__name__] += 1
        return operator(*args, **kwargs or {})


def by_hand(model, optimizer, loss, inputs, targets):
    optimizer.zero_grad()
    for part in zip(inputs.split(MICRO_BATCH), targets.split(MICRO_BATCH), strict=True):
        (loss(model(part[0]), part[1]) / (SAMPLES / MICRO_BATCH)).backward()
    optimizer.step()


def data():
    return torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,))


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))


def normalised():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def launched_by_hand(model):
    optimizer, loss = torch.optim.AdamW(model.parameters(), foreach=False), nn.CrossEntropyLoss()
    for _ in range(WINDOWS - 1):
        by_hand(model, optimizer, loss, *data())
    given = data()
    with Launched() as launched:
        by_hand(model, optimizer, loss, *given)
    return launched.names


def launched_by_runner(model):
    optimizer, loss = torch.optim.AdamW(model.parameters(), foreach=False), nn.CrossEntropyLoss()
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(SAMPLES, MICRO_BATCH), loss=loss, device="cpu")
    for _ in range(WINDOWS - 1):
        runner.step(data())
    given = data()
    with Launched() as launched:
        runner.step(given)
    return launched.names


def launched_by_accumulator(model):
    optimizer, loss = torch.optim.AdamW(model.parameters(), foreach=False), nn.CrossEntropyLoss()
    accumulator = autoaccum.Accumulator(model, loss=loss, micro_batch=MICRO_BATCH, device="cpu")
    for _ in range(WINDOWS - 1):
        optimizer.zero_grad()
        accumulator.backward(data())
        optimizer.step()
    given = data()
    with Launched() as launched:
        optimizer.zero_grad()
        accumulator.backward(given)
        optimizer.step()
    return launched.names


@pytest.mark.parametrize("model", [plain, normalised])
@pytest.mark.parametrize("train", [launched_by_runner, launched_by_accumulator])
def test_operators_are_those_of_a_loop_by_hand_and_the_savepoints_copies(model, train):
    torch.manual_seed(0)
    one = model()
    expected = launched_by_hand(copy.deepcopy(one))

    found = train(one)

    # Of each type of small buffer one: the statistics, and the counter.
    copies = Counter(cat=2) if model is normalised else Counter()
    further = found - expected - copies
    # Both multiply each loss once: by 1 / 3, or by its share of the window.
    assert found["mul"] - expected["mul"] == expected["div"] - found["div"]
    assert [name for name in further if name not in (*VIEWS, "mul")] == []
    assert "_local_scalar_dense" not in found - expected  # by which `item()` waits for a device
