"""What a training step changes is put back bit for bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from autoaccum._data.random_state import RandomState
from autoaccum._engine.probing import Snapshot
from autoaccum._engine.savepoint import Savepoint
from helpers import CPU, assert_bitwise, classifier, labelled, state_of

LARGE = 70_000  # elements; a buffer of this size is copied only when it was written


def draw():
    """One number of every generator that is kept, and of both kinds where NumPy has two."""
    return (
        torch.rand(3).tolist(),
        random.random(),  # noqa: S311 - Python's generator is what is meant
        np.random.random(),  # noqa: NPY002 - the global generator is what is meant
        np.random.standard_normal(),  # noqa: NPY002
    )


# --- random state ----------------------------------------------------------------------------------------------------


def test_every_generator_repeats_after_each_put_back_from_the_state_that_was_taken_last():
    state = RandomState(CPU)
    state.take()
    draw()
    state.take()
    later = draw()

    for _ in range(2):
        state.put_back()
        assert draw() == later


# --- buffers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    return classifier()


class Holder(nn.Module):
    """A module whose forward pass does whatever a test wants with its buffers."""

    def __init__(self, elements=4):
        super().__init__()
        self.register_buffer("seen", torch.zeros(elements))
        self.register_buffer("absent", None)


def assign(holder):
    holder.seen = holder.seen + 1


def add_in_place(holder):
    holder.seen += 1


def write_through_a_view(holder):
    holder.seen[:2].fill_(3.0)


def resize(holder):
    holder.seen.resize_(2 * holder.seen.numel()).fill_(7.0)


def shrink(holder):
    holder.seen.resize_(2).fill_(7.0)


def add(holder):
    holder.register_buffer("new", torch.ones(2))


def remove(holder):
    del holder.seen


def fill_the_absent_one(holder):
    holder.absent = torch.ones(2)


def empty(holder):
    holder.seen = None


CHANGES = [assign, add_in_place, write_through_a_view, resize, shrink, add, remove, fill_the_absent_one, empty]


@pytest.mark.parametrize("elements", [4, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_model_does_with_its_buffers_is_undone(change, elements):
    holder = Holder(elements)
    mark, tensor = Savepoint([holder], CPU), holder.seen
    mark.take()
    change(holder)

    mark.restore()

    assert dict(holder.named_buffers()).keys() == {"seen"}
    assert holder.seen is tensor
    assert holder._buffers["absent"] is None
    assert_bitwise(holder.seen, torch.zeros(elements))


def test_large_buffer_is_not_copied_any_more_once_it_was_seen_to_stay_and_one_that_moves_then_is_named():
    holder, calm = Holder(LARGE), Holder(LARGE)
    mark = Savepoint([nn.ModuleList([holder, calm])], CPU)
    mark.take(is_thorough=True)
    add_in_place(holder)
    assert mark.learn_moved() == ["0.seen"]

    mark.take(copies_all=False)
    add_in_place(holder)
    add_in_place(calm)
    mark.restore()

    assert_bitwise(holder.seen, torch.ones(LARGE))
    assert_bitwise(calm.seen, torch.ones(LARGE))
    assert mark.damage() == ["1.seen"]


def test_parameter_that_is_written_through_data_is_seen():
    layer = nn.Linear(3, 2)
    mark = Savepoint([layer], CPU, parameters=layer.parameters)
    mark.take(is_thorough=True)
    layer.bias.data.add_(1.0)

    mark.restore()

    assert mark.damage() == ["bias"]


# --- everything ------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def one_update(model, optimizer):
    inputs, targets = labelled(6)
    functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def whole_state(model, optimizer):
    return state_of(model) | {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "with state"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_snapshot_puts_back_every_bit(make, warm, model):
    optimizer = make(list(model.parameters()))
    if warm:
        one_update(model, optimizer)
        one_update(model, optimizer)
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    before = state_copy(model, optimizer)
    snapshot = Snapshot([model], optimizer, CPU)
    one_update(model, optimizer)
    optimizer.zero_grad()
    one_update(model, optimizer)

    snapshot.restore()

    assert_bitwise(whole_state(model, optimizer), before)
    now = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert all(one is other for one, other in zip(now, tensors, strict=True))


def state_copy(model, optimizer):
    """A copy that later steps do not write into."""
    state = whole_state(model, optimizer)
    state["optimizer"]["state"] = {
        key: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
        for key, entry in state["optimizer"]["state"].items()
    }
    state["optimizer"]["param_groups"] = [dict(group) for group in state["optimizer"]["param_groups"]]
    return state
