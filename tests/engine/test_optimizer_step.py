"""An update is made whole, or not begun: what it takes is measured once and asked for before each step."""

import copy

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._engine.optimizer_step import Updates
from autoaccum._engine.out_of_memory import Stage
from autoaccum._memory.host import Host
from autoaccum._system.notices import Notices
from faults import FailAt, differences, state_of

SIZE = 64


class Asked(Host):
    """Host memory that notes what it is asked to reserve, and refuses as often as is said."""

    def __init__(self):
        super().__init__()
        self.asked = []
        self.refusals = 0

    def reserve(self, extra_bytes):
        self.asked.append(extra_bytes)
        if self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError("out of memory (refused)")


def one_parameter():
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE, bias=False)


def updates_of(model, optimizer, memory, scaler=None):
    return Updates(optimizer, scaler, memory, clip_grad_norm=None, stage=Stage())


@pytest.mark.parametrize("foreach", [False, True])
def test_first_step_is_taken_back_wherever_it_fails(foreach):
    def run(*points):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).requires_grad_()
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        updates = updates_of(model, optimizer, Asked())
        before = state_of(model, optimizer)
        fault = FailAt(*points)
        try:
            with fault:
                updates.make()
        except torch.OutOfMemoryError:
            assert differences(state_of(model, optimizer), before) == []
        return fault

    counted = run().count
    hits = sum(run(point).hits for point in range(1, counted + 1))

    assert hits == counted > 20


class OwnState(torch.optim.SGD):
    """Keeps numbers, a list and a dict of tensors in its state, as Shampoo does, and fails when told to."""

    error = None

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(steps=0, factors=[torch.zeros(2)], by_name={"of": torch.zeros(2)})
            state["steps"] += 1
            state["factors"][0] = state["factors"][0] + 1
            if self.error is not None:
                raise self.error
            state["by_name"]["of"].add_(1)
        super().step()


@pytest.mark.parametrize("is_measured", [True, False])
def test_containers_in_the_state_are_put_back(is_measured):
    model = nn.Sequential(one_parameter(), one_parameter())
    optimizer = OwnState(model.parameters(), lr=0.1)
    updates = updates_of(model, optimizer, Asked())
    model[0].weight.grad = torch.ones(SIZE, SIZE)
    updates.make()
    optimizer.error = ValueError("mine")

    if is_measured:
        model[1].weight.grad = torch.ones(SIZE, SIZE)
    before = copy.deepcopy(state_of(model, optimizer))
    with pytest.raises(ValueError, match="mine"):
        updates.make()

    assert differences(state_of(model, optimizer), before) == []


def runner_on(memory, optimizer=torch.optim.Adam):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    return model, autoaccum.Runner(
        model,
        optimizer(model.parameters(), lr=0.1),
        autoaccum.plan(12, 4),
        loss=nn.CrossEntropyLoss(),
        device=memory,
        notices=Notices(silent=True),
    )


def window():
    torch.manual_seed(1)
    return torch.randn(12, 6), torch.randint(0, 3, (12,))


def test_reservation_that_cannot_be_had_leaves_everything_as_it_was():
    memory = Asked()
    model, runner = runner_on(memory)
    runner.step(window())
    memory.refusals = 10**6
    torch.manual_seed(2)
    before = copy.deepcopy(state_of(model, runner.optimizer))
    given = window()
    torch.manual_seed(2)

    with pytest.raises(autoaccum.DoesNotFitError, match="the optimizer's step does not fit"):
        runner.step(given)

    assert differences(state_of(model, runner.optimizer), before) == []
