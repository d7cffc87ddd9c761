"""What an object holds is put back in place, however it is nested, or it is known that it cannot be."""

import array
import collections
import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from autoaccum._data.object_state import Holdings


class Box:
    def __init__(self, value):
        self.value = value


def write(target):
    target[0] += 1


NESTED = {
    "list": (lambda: [1, [2, 3]], lambda held: held[1].append(4)),
    "dict of lists": (lambda: {"a": {"b": [1]}}, lambda held: held["a"]["b"].append(2)),
    "deque that drops": (lambda: collections.deque([1, 2], maxlen=2), lambda held: held.append(3)),
    "set in a tuple": (lambda: ({1, 2},), lambda held: held[0].add(3)),
    "own object": (lambda: Box(Box([1])), lambda held: held.value.value.append(2)),
    "counter": (lambda: collections.Counter(a=1), lambda held: held.update(a=1, b=2)),
    "bytes": (lambda: bytearray(b"ab"), lambda held: held.append(1)),
    "array": (lambda: [array.array("i", [1])], lambda held: held[0].append(2)),
    "numpy": (lambda: {"a": np.zeros(2)}, lambda held: write(held["a"])),
    "tensor": (lambda: [torch.zeros(2)], lambda held: write(held[0])),
    "resized tensor": (lambda: [torch.zeros(2)], lambda held: held[0].resize_(3).fill_(1)),
    "many tensors": (lambda: [torch.zeros(1) for _ in range(100)], lambda held: held.append(torch.ones(1))),
    "many numbers": (lambda: [[1.0] * 100_000], lambda held: held[0].append(2.0)),
    "random": (lambda: [random.Random(0)], lambda held: held[0].random()),  # noqa: S311 - a test
}


def plain(held):
    if isinstance(held, Box):
        return plain(held.value)
    if isinstance(held, random.Random):
        return held.getstate()
    if isinstance(held, dict):
        return {name: plain(value) for name, value in held.items()}
    if isinstance(held, list | tuple | collections.deque):
        return [plain(value) for value in held]
    if isinstance(held, np.ndarray | torch.Tensor | array.array):
        return held.tolist()
    return copy.copy(held)


@pytest.mark.parametrize(("make", "change"), NESTED.values(), ids=NESTED)
def test_what_is_held_is_put_back_in_place(make, change):
    owner = Box(make())
    alias, before = owner.value, plain(make())
    held = Holdings([owner])

    change(owner.value)
    changed = plain(owner.value)
    owner.other = 1

    assert held.put_back()
    assert plain(owner.value) == before != changed
    assert owner.value is alias
    assert not hasattr(owner, "other")


def test_circle_is_followed_once():
    owner = Box([])
    owner.value += [owner, owner.value, 1]

    held = Holdings([owner])
    owner.value.clear()

    assert held.put_back()
    assert owner.value == [owner, owner.value, 1]


@pytest.mark.parametrize(
    "value",
    [object(), [[n] for n in range(20_000)], np.zeros(2**22), iter([1])],
    ids=["kind", "many", "large", "place"],
)
def test_what_cannot_be_noted_is_not_put_back(value):
    owner = Box(value)
    held = Holdings([owner])
    owner.value = None

    assert not held.is_complete
    assert not held.put_back()
    assert owner.value is None


def test_large_tensor_that_was_written_is_not_put_back_and_one_that_was_replaced_is():
    large = torch.zeros(2**23)
    replaced, written = Box(large), Box([torch.zeros(2**23)])
    held = [Holdings([replaced]), Holdings([written])]

    replaced.value = large + 1
    written.value[0] += 1

    assert held[0].put_back()
    assert replaced.value is large
    assert not held[1].put_back()


def test_network_within_is_left_alone():
    owner = Box(nn.Linear(1, 1))
    held = Holdings([owner])

    with torch.no_grad():
        owner.value.weight += 1
    now = owner.value.weight.item()

    assert held.put_back()
    assert owner.value.weight.item() == now
