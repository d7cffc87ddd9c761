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


def test_window_that_begins_again_for_lack_of_memory_is_not_tried_again():
    torch.manual_seed(0)
    model, sizes = nn.Linear(4, 5).double(), []

    def lacks_once(_, inputs):
        sizes.append(len(inputs[0]))
        if sizes.count(16) == 1 == sizes[-1] // 16:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_pre_hook(lacks_once)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runner = autoaccum.Runner(
        model,
        optimizer,
        autoaccum.plan(32, 16),
        loss=lambda outputs, targets: 2 * functional.cross_entropy(outputs, targets),
        device="cpu",
        precision="fp32",
    )

    runner.step((torch.randn(32, 4).double(), torch.randint(0, 5, (32,))))

    tried, failed = sizes[:3], sizes.index(16)
    assert sum(tried[1:]) == tried[0]
    assert failed == 3
    assert sum(sizes[4:]) == 32


def test_pair_beside_a_number_is_weighted_as_such_where_the_number_is_said_to_be_a_mean():
    torch.manual_seed(0)
    model, mask = nn.Linear(4, 5).double(), torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1]).double()
    inputs = torch.randn(8, 4).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def loss(outputs, mask):
        return {"pair": ((outputs.square().sum(1) * mask).sum(), mask.sum()), "mean": outputs.exp().mean()}

    outputs = model(inputs)
    total = (outputs.square().sum(1) * mask).sum() / mask.sum() + outputs.exp().mean()
    expected = torch.autograd.grad(total, list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = autoaccum.Plan(8, (3, 1, 4))

    autoaccum.Runner(model, optimizer, plan, loss=loss, loss_reduction="mean", device="cpu", precision="fp32").step(
        (inputs, mask)
    )

    for was, now, gradient in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(was - now, gradient, rtol=1e-12, atol=1e-14)


def test_loss_chosen_by_the_targets_is_not_tried_in_parts():
    model, sizes = nn.Linear(4, 5), []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(32, 16), device="cpu", precision="fp32")
    window = torch.randn(32, 4), torch.randint(0, 5, (32,))

    runner.step(window)
    runner.step(window)

    assert sizes == [8, 16, 16, 16, 16]
