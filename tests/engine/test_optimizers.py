"""Which optimizers are taken, and which are refused by name."""

import pytest
import torch
from torch import nn

from autoaccum._engine.optimizers import resolve
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError
from support.models.small import classifier

NOTICES = Notices(silent=True)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (lambda model: nn.Linear(2, 2).parameters(), "2 parameters, 2 of them not the model's, and 0 of the 6"),
        (lambda model: [*model.parameters(), *nn.Linear(2, 2).parameters()], "8 parameters, 2 of them not the model's"),
        (lambda model: model[0].requires_grad_(False).parameters(), "0 of the 4 that the model trains"),
    ],
    ids=["another model", "more than the model", "frozen alone"],
)
def test_optimizer_over_other_parameters_is_refused_with_numbers_and_remedy(parameters, text):
    model = classifier()
    optimizer = torch.optim.SGD(parameters(model), lr=0.1)

    with pytest.raises(InvalidInputError, match=rf"{text}.*pass a function"):
        resolve(optimizer, [model], NOTICES)


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
def test_optimizer_that_evaluates_several_times_is_refused_by_name(make, text):
    model = classifier()
    with pytest.raises(InvalidInputError, match=text):
        resolve(make(model.parameters(), lr=0.1), [model], NOTICES)
    with pytest.raises(InvalidInputError, match=text):
        resolve([torch.optim.SGD(model[0].parameters()), make(model[4].parameters(), lr=0.1)], [model], NOTICES)
