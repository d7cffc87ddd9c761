"""Hooks on gradients run for each micro-batch, which is said once where a window has several."""

import pytest
import torch
from torch import nn

import autoaccum
from support.models.small import CPU, logged

BATCH = torch.randn(8, 4), torch.arange(8) % 3


def run(model, micro_batch, optimizer=None):
    with logged() as lines:
        runner = autoaccum.Runner(
            model, optimizer, autoaccum.plan(8, micro_batch), loss=nn.CrossEntropyLoss(), device=CPU
        )
        for _ in range(2):
            runner.step(BATCH)
    return [line for line in lines if "gradient hooks" in line]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_are_told_of_once_where_a_window_is_cut(register):
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        getattr(parameter, register)(lambda given: None)

    (text,) = run(model, 4)

    assert text.startswith("2 parameters have gradient hooks")
    assert run(model, 8) == []


def test_optimizer_that_steps_in_the_backward_pass_is_named():
    model = nn.Linear(4, 3)

    def step(parameter):
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)

    with pytest.raises(autoaccum.InvalidInputError, match="post-accumulate-grad hook takes them"):
        run(model, 4, torch.optim.SGD(model.parameters(), lr=0.1))
