"""Losses that are not there for some of the samples on which they are tried."""

import torch
from torch import nn
from torch.nn import functional

import autoaccum


def detection(outputs, targets):
    """The boxes' loss is 0, without a graph, where no sample has a box."""
    classes, has = targets
    boxes = (outputs.square().mean(1) * has).sum() / has.sum() if has.any() else torch.zeros(())
    return {"classes": functional.cross_entropy(outputs, classes), "boxes": boxes}


def test_loss_without_a_graph_where_nothing_counts_has_the_gradient_of_the_window():
    torch.manual_seed(0)
    model = nn.Linear(4, 5).double()
    inputs, classes = torch.randn(12, 4).double(), torch.randint(0, 5, (12,))
    targets = classes, torch.tensor([0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1]).double()
    losses = detection(model(inputs), targets)
    expected = torch.autograd.grad(sum(losses.values()), list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = autoaccum.Plan(12, (2,) * 6)
    runner = autoaccum.Runner(model, optimizer, plan, loss=detection, device="cpu", precision="fp32")

    report = runner.step((inputs, targets))

    for was, now, gradient in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(was - now, gradient, rtol=1e-12, atol=1e-14)
    for name, value in losses.items():
        assert abs(report.losses[name] - value.item()) <= 1e-12
    assert report.warnings == ()
