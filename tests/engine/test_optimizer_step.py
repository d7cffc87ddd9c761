"""An update is made whole, or not begun: what it takes is measured once and asked for before each step."""

import copy

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._engine import optimizer_step
from autoaccum._engine.lack_of_memory import Stage
from autoaccum._engine.optimizer_step import Updates
from autoaccum._memory.host import Host
from autoaccum._system.notices import Notices
from faults import FailAt, differences, state_of

SIZE = 64
BYTES = 4 * SIZE * SIZE  # of the one parameter


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


@pytest.mark.parametrize(
    ("make", "transient"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0),
        (lambda p: torch.optim.Adam(p, lr=0.1, foreach=False), 2),
        (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), 1),
    ],
    ids=["momentum", "adam loop", "adamw foreach"],
)
def test_temporaries_are_asked_for_before_every_step_but_the_first_of_an_optimizer_without_state(make, transient):
    model, memory = one_parameter(), Asked()
    updates = updates_of(model, make(model.parameters()), memory)
    for number in range(6):
        if number == 3:
            updates._optimizer.state.clear()  # as after the trials of a probe
        model.weight.grad = torch.ones_like(model.weight)
        updates.make()

    assert [asked // BYTES for asked in memory.asked] == [transient] * 4 * bool(transient)


def test_layers_that_are_dropped_at_random_are_measured_no_more_than_once_each():
    model, memory = nn.Sequential(*(one_parameter() for _ in range(4))), Asked()
    updates = updates_of(model, torch.optim.Adam(model.parameters(), lr=0.1, foreach=True), memory)
    for number in range(1, 16):  # each of their combinations
        for place, layer in enumerate(model):
            layer.weight.grad = torch.ones(SIZE, SIZE) if number >> place & 1 else None
        updates.make()
        if number not in (1, 2, 4, 8):  # which are measured
            assert memory.asked[-1] >= BYTES * number.bit_count()

    assert len(memory.asked) == 15 - 4
    updates._optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    updates.make()  # of which nothing is known
    assert len(memory.asked) == 15 - 4


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


@pytest.mark.parametrize(("kernel", "is_told"), [("zeros_like", False), ("_foreach_addcdiv_", True)])
def test_first_step_for_which_the_host_has_no_memory_for_a_copy_is_undone_or_told(kernel, is_told, monkeypatch):
    def lacks(*_, **__):
        raise torch.OutOfMemoryError("out of memory (injected)")

    model = one_parameter()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
    memory = Asked()
    memory.device = torch.device("cuda")
    updates = updates_of(model, optimizer, memory)
    before = copy.deepcopy(state_of(model, optimizer))
    monkeypatch.setattr(optimizer_step, "OptimizerCopy", lacks)

    run = getattr(torch, kernel)
    with monkeypatch.context() as patched:
        patched.setattr(torch, kernel, lambda *given, **named: (run(*given, **named), lacks()))
        with pytest.raises((torch.OutOfMemoryError, autoaccum.StateDamagedError)) as caught:
            updates.make()

    assert isinstance(caught.value, autoaccum.StateDamagedError) == is_told
    assert (differences(state_of(model, optimizer), before) == []) != is_told


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


def test_reservation_that_fails_once_is_made_again_from_the_gradients_at_hand():
    memories = Asked(), Asked()
    (one, clean), (other, refused) = map(runner_on, memories)
    reports = []
    for runner, memory, refusals in ((clean, memories[0], 0), (refused, memories[1], 1)):
        runner.step(window())
        memory.refusals = refusals
        reports.append(runner.step(window()))

    assert (reports[1].oom_events, reports[1].recomputed_samples) == (1, 0)
    assert differences(state_of(one, clean.optimizer), state_of(other, refused.optimizer)) == []


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
