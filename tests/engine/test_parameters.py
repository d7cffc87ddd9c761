"""Which parameters there are is looked up when something has changed, and not otherwise."""

import torch
from torch import nn

import autoaccum
from autoaccum._engine.parameters import Inventory
from helpers import classifier, labelled
from put_together import training_step


def test_unchanged_model_is_taken_stock_of_once(monkeypatch):
    taken, take = [], Inventory._take_stock
    monkeypatch.setattr(Inventory, "_take_stock", lambda self, optimizer: taken.append(1) or take(self, optimizer))
    runner = autoaccum.Runner(classifier(), None, autoaccum.plan(12, 6), loss=nn.CrossEntropyLoss(), device="cpu")

    for _ in range(3):
        runner.step(labelled(12))

    assert taken == [1]


def test_parameters_that_fully_shard_exchanges_during_a_pass_are_no_change():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inventory, changing = Inventory([model], optimizer, is_fixed=True), Inventory([model], optimizer)
    model[4].weight = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))

    assert not inventory.look(optimizer)
    assert changing.look(optimizer)
    assert not changing.look(optimizer)


def test_step_knows_of_parameters_after_a_look_only():
    model = classifier()
    step = training_step(model)
    count = len(step.parameters)
    model.append(nn.Linear(3, 3).double())

    assert len(step.parameters) == count
    assert step.parameters_changed()
    assert len(step.parameters) == count + 2
