"""The optimizer is taken, made or chosen; its learning rate is scaled once."""

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._engine.optimizers import resolve, scale_learning_rate
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError
from helpers import CountingLoader, batches_of, classifier, labelled


@pytest.fixture
def notices():
    return Notices(silent=True)


@pytest.fixture
def model():
    return classifier()


def held_by(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda parameters: torch.optim.Adam(parameters, lr=0.1)])
def test_function_or_class_gets_the_trainable_parameters_each_once(make, model, notices):
    model[0].weight.requires_grad_(False)
    model.append(model[4])  # a layer that is used twice

    optimizer = resolve(make, [model], notices)

    assert list(map(id, held_by(optimizer))) == [id(p) for p in model.parameters() if p.requires_grad]


def test_adamw_is_chosen_and_said(model, notices):
    optimizer = resolve(None, [model], notices)

    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert notices.texts == ("optimizer: AdamW(lr=1e-3) (optimizer=None)",)


def test_parameters_of_a_loss_are_trained_too_and_shared_ones_once(model, notices):
    loss = nn.ModuleList([nn.Linear(2, 2), model[4]])

    held = held_by(resolve(None, [model, loss], notices))

    assert len(held) == len(set(held)) == 6 + 2
    assert set(loss.parameters()) <= set(held)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (lambda model: nn.Linear(2, 2).parameters(), "2 parameters, 2 of them not the model's, and 0 of the 6"),
        (lambda model: [*model.parameters(), *nn.Linear(2, 2).parameters()], "8 parameters, 2 of them not the model's"),
        (lambda model: model[0].requires_grad_(False).parameters(), "0 of the 4 that the model trains"),
    ],
    ids=["another model", "more than the model", "frozen alone"],
)
def test_optimizer_over_other_parameters_is_refused_with_numbers_and_remedy(parameters, text, model, notices):
    optimizer = torch.optim.SGD(parameters(model), lr=0.1)

    with pytest.raises(InvalidInputError, match=rf"{text}.*pass a function"):
        resolve(optimizer, [model], notices)


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ([nn.ReLU()], r"no parameters.*torch\.nn\.ModuleList"),
        ([nn.Linear(1, 1).requires_grad_(False)], r"needs a gradient.*requires_grad_\(True\)"),
    ],
    ids=["none", "frozen"],
)
def test_nothing_to_train_is_refused_with_the_remedy(modules, text, notices):
    with pytest.raises(InvalidInputError, match=text):
        resolve(None, modules, notices)


class SAM(torch.optim.SGD):
    def first_step(self, zero_grad=False): ...

    def second_step(self, zero_grad=False): ...


class LineSearch(torch.optim.SGD):
    def step(self, closure): ...


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.LBFGS, r"LBFGS\.step\(\) requires a closure.*first-order"),
        (LineSearch, r"LineSearch\.step\(\) requires a closure"),
        (SAM, r"SAM takes two gradients.*use the optimizer that it wraps"),
    ],
)
def test_optimizer_that_evaluates_several_times_is_refused_by_name(make, text, model, notices):
    with pytest.raises(InvalidInputError, match=text):
        resolve(make(model.parameters(), lr=0.1), [model], notices)
    with pytest.raises(InvalidInputError, match=text):
        resolve([torch.optim.SGD(model[0].parameters()), make(model[4].parameters(), lr=0.1)], [model], notices)


# --- learning rate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "expected"), [("linear", [0.4, 4.0]), ("sqrt", [0.2, 2.0])])
def test_every_group_is_scaled_and_said(rule, expected, model, notices):
    groups = [{"params": model[0].parameters()}, {"params": model[4].parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)

    scale_learning_rate(optimizer, rule, target_batch=100, base_batch=25, notices=notices)

    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected)
    assert notices.texts[0] == f"learning rate: 0.1 -> {expected[0]:g} ({rule}, 25 -> 100)"


def test_tensor_learning_rate_is_scaled_without_writing_into_it(model, notices):
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    scale_learning_rate(optimizer, "linear", target_batch=100, base_batch=25, notices=notices)

    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.4)
    assert float(rate) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=100),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
                torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
            ],
            milestones=[2],
        ),
    ],
    ids=["LambdaLR", "StepLR", "SequentialLR"],
)
@pytest.mark.parametrize("made_before", [True, False], ids=["made before", "made by fit"])
def test_scaled_rate_survives_the_scheduler(make, made_before, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer) if made_before else make

    autoaccum.fit(
        model,
        CountingLoader(batches_of(labelled(12), 4, 4, 4)),
        4,
        optimizer=optimizer,
        scheduler=scheduler,
        lr_scaling="linear",
        base_batch=2,
        micro_batch=4,
        device="cpu",
        progress=False,
    )

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
