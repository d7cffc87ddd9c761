"""A scheduler moves the optimizer in use, or is refused before anything has moved."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import autoaccum
from autoaccum.errors import InvalidInputError
from support.models.small import assert_bitwise, batches_of, labelled, state_of


@pytest.fixture
def model():
    return nn.Linear(4, 3).double()


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def fit(model, optimizer, scheduler, loader=None, **options):
    return autoaccum.fit(
        model,
        loader or batches_of(labelled(8), 4, 4),
        4,
        **{"optimizer": optimizer, "scheduler": scheduler, "micro_batch": 4, "device": "cpu", "progress": False}
        | options,
    )


def halving(optimizer):
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def nested(optimizer):
    inner = lr_scheduler.SequentialLR(optimizer, [halving(optimizer), halving(optimizer)], milestones=[5])
    return lr_scheduler.ChainedScheduler([inner])


class Hidden:
    """Tells its own optimizer of no other name, as a wrapper of one's own may."""

    def __init__(self, inner):
        self._schedulers = [inner]

    def step(self):
        self._schedulers[0].step()


class OwnScheduler:
    def __init__(self, optimizer):
        self._moves = optimizer

    def step(self):
        for group in self._moves.param_groups:
            group["lr"] *= 0.5


def own(optimizer):
    return OwnScheduler(optimizer)


OVER = {
    "plain": halving,
    "nested": nested,
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler([halving(optimizer)]),
    "hidden": lambda optimizer: Hidden(halving(optimizer)),
}


@pytest.mark.parametrize("is_function", [False, True], ids=["made", "function"])
@pytest.mark.parametrize("make", OVER.values(), ids=OVER)
def test_scheduler_over_another_optimizer_is_refused(make, is_function, model, optimizer):
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of(model)
    scheduler = (lambda _: make(other)) if is_function else make(other)

    with pytest.raises(InvalidInputError, match=r"^scheduler=.* moves the learning rates of another optimizer"):
        fit(model, optimizer, scheduler)

    assert_bitwise(state_of(model), before)
    assert not optimizer.state


@pytest.mark.parametrize("is_function", [False, True], ids=["made", "function"])
@pytest.mark.parametrize("make", [*OVER.values(), own], ids=[*OVER, "own"])
def test_scheduler_over_the_optimizer_in_use_moves_it(make, is_function, model, optimizer):
    fit(model, optimizer, make if is_function else make(optimizer))

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def in_turn(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 1.0), lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


# The latter keep rates of their own, and are at the highest after one step.
SCALED = {
    "StepLR": (lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=100), 3),
    "SequentialLR": (in_turn, 3),
    "OneCycleLR": (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4, pct_start=0.5), 1),
    "CyclicLR": (lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.05, 0.1, step_size_up=1), 1),
    "nested": (lambda optimizer: lr_scheduler.ChainedScheduler([in_turn(optimizer)]), 1),
}


@pytest.mark.parametrize(("name", "is_function"), [*((name, False) for name in SCALED), ("SequentialLR", True)])
def test_scaled_rate_survives_the_scheduler_and_rates_that_it_has_kept_are_scaled(name, is_function, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    make, windows = SCALED[name]
    batches = batches_of(labelled(4 * windows), *[4] * windows)

    fit(model, optimizer, make if is_function else make(optimizer), loader=batches, lr_scaling="linear", base_batch=2)

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


@pytest.mark.parametrize("name", SCALED)
def test_refused_call_leaves_the_rates_that_a_scheduler_has_kept(name, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCALED[name][0](optimizer)
    before = repr(scheduler.state_dict())

    with pytest.raises(InvalidInputError, match="no tensor"):
        fit(model, optimizer, scheduler, loader=[[]], lr_scaling="linear", base_batch=2)

    assert repr(scheduler.state_dict()) == before


class Growing(OwnScheduler):
    """Its state takes other forms as it goes on."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.phase, self.rates = None, [0.1]

    def step(self):
        super().step()
        self.phase = "decay"
        self.rates = [*self.rates, self._moves.param_groups[0]["lr"]]

    def state_dict(self):
        return {"phase": self.phase, "rates": self.rates}

    def load_state_dict(self, state):
        self.phase, self.rates = state["phase"], state["rates"]


def test_scheduler_of_ones_own_whose_state_changes_its_form_is_resumed(model, tmp_path):
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for steps in (1, 2):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = Growing(optimizer)
        fit(model, optimizer, scheduler, max_steps=steps, checkpoint=tmp_path)

    assert (scheduler.phase, scheduler.rates) == ("decay", [0.1, 0.05, 0.025])


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("ended", "scheduler", "interval", "val_every", "is_said"),
    [
        (3, halving, "epoch", None, True),  # within the second epoch of two windows
        (3, plateau, "step", None, True),
        (3, plateau, "step", 2, True),
        (2, halving, "epoch", None, False),
        (4, plateau, "step", 2, False),
        (3, halving, "step", None, False),
    ],
)
def test_resume_says_where_the_end_within_an_epoch_moved_a_scheduler(
    ended, scheduler, interval, val_every, is_said, model, tmp_path, capsys
):
    def rates(steps, **options):
        torch.manual_seed(0)
        net = nn.Linear(4, 3).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options |= {"scheduler_interval": interval, "val_every": val_every, "max_steps": steps, "progress": "lines"}
        held_out = batches_of(labelled(8), 4, 4)
        result = fit(net, optimizer, scheduler, val_loader=held_out, **options)
        return optimizer.param_groups[0]["lr"], result

    whole, _ = rates(6)
    rates(ended, checkpoint=tmp_path)
    capsys.readouterr()

    rate, result = rates(6, checkpoint=tmp_path)

    said = capsys.readouterr().err
    assert ("the resume is not exact: the run before ended after step 3, within epoch 2" in said) == is_said
    assert len(result.warnings) == is_said
    assert is_said or rate == whole


@pytest.mark.parametrize(("then", "is_said"), [(2, True), (4, False), ("auto", False)])
def test_resume_says_that_micro_batches_have_another_size(then, is_said, model, optimizer, tmp_path):
    fit(model, optimizer, None, checkpoint=tmp_path, epochs=1)

    result = fit(model, optimizer, None, checkpoint=tmp_path, epochs=2, micro_batch=then)

    words = "micro-batches are of 2 samples, of 4 at the checkpoint, so sums are rounded otherwise"
    assert result.warnings == ((words,) if is_said else ())
