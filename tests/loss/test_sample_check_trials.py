"""Losses that are not there for some of the samples on which they are tried."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._data.nesting import numbers_in  # what checks read
from support.losses.gradients import assert_full_batch_gradient, cut_gradient, distance, full_batch_gradient


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
    expected, _ = full_batch_gradient(model, detection, (inputs, targets))

    found, report = cut_gradient(model, detection, (inputs, targets), (2,) * 6)

    assert distance(found, expected) <= 1e-12
    for name, value in losses.items():
        assert abs(report.losses[name] - value.item()) <= 1e-12
    assert report.warnings == ()


def test_pair_beside_a_number_is_weighted_as_such_where_the_number_is_said_to_be_a_mean():
    torch.manual_seed(0)
    mask = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1]).double()

    def loss(outputs, mask):
        return {"pair": ((outputs.square().sum(1) * mask).sum(), mask.sum()), "mean": outputs.exp().mean()}

    window = torch.randn(8, 4).double(), mask
    assert_full_batch_gradient(nn.Linear(4, 5).double(), loss, window, (3, 1, 4), loss_reduction="mean")


# --- what people write ------------------------------------------------------------------------------------------------


def updated(model, loss, batches, **options):
    """Update a copy of a model from each batch; return the runner's reports and the copy's first gradient."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(16, 4), loss=loss, device="cpu", **options)
    return [runner.step(batch) for batch in batches], model


@pytest.mark.parametrize("first", [0, 1])
def test_clamped_number_of_boxes_in_lists_of_samples_is_exact_or_told(first):
    """Of boxes over max(1, their number): the weight of a micro-batch without any is 1 where 0 is right."""
    torch.manual_seed(first)
    samples = [(torch.randn(6).double(), torch.randn(count).double()) for count in (first, 2, 0, 3, 0, 0, 0, 0) * 2]
    model = nn.Linear(6, 1).double()

    def collate(batch):
        return {"inputs": torch.stack([one for one, _ in batch]), "boxes": [boxes for _, boxes in batch]}

    def loss(outputs, batch):
        boxes = batch["boxes"]
        errors = [(output - target).square().sum() for output, target in zip(outputs, boxes, strict=True)]
        return torch.stack(errors).sum() / max(1, sum(map(len, boxes)))

    options = {"split": autoaccum.ListOfSamples(collate), "forward": lambda model, batch: model(batch["inputs"])}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, trained = updated(model, loss, [samples], **options)

    batch = collate(samples)
    loss(model(batch["inputs"]), batch).backward()
    is_exact = torch.allclose(trained.weight, model.weight - model.weight.grad, rtol=1e-9)
    assert is_exact or any(issubclass(one.category, autoaccum.LossWarning) for one in told)


@pytest.mark.parametrize("items", [1, 7])
def test_sum_divided_by_a_number_of_the_batch_is_refused_in_a_window_of_several(items):
    batches = [{"inputs": torch.randn(4, 3), "items": items} for _ in range(3)]
    model = nn.Linear(3, 1)
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        autoaccum.plan(12, 4),
        loss=lambda outputs, batch: outputs.square().sum() / batch["items"],
        forward=lambda model, batch: model(batch["inputs"]),
        device="cpu",
    )

    with pytest.raises(autoaccum.InvalidInputError, match="a sum divided by 'items'"):
        runner.step(autoaccum.Window(batches))


def test_labels_of_a_list_of_samples_are_no_numbers_of_the_batch():
    assert numbers_in([{"image": torch.zeros(2), "label": 3}, {"image": torch.zeros(2), "label": 4}]) == {}
    assert numbers_in([torch.zeros(2), torch.zeros(2), 5]) == {(2,): 5.0}
