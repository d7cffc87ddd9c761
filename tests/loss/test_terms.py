"""Losses of torch whose type says what they run over, windows in which nothing counts, and what pairs may be."""

import numpy as np
import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._loss.terms import of_torch, weight_of_pair
from autoaccum.errors import InvalidInputError


class Outputs(nn.Module):
    """Returns its parameters' rows: the gradient of the loss is that of the outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = nn.Parameter(outputs.clone())

    def forward(self, rows):
        return self.outputs[rows]


def update(loss, outputs, targets, sizes):
    """Return the loss and the gradient of a window that is cut into these sizes."""
    model = Outputs(outputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runner = autoaccum.Runner(model, optimizer, autoaccum.Plan(len(outputs), tuple(sizes)), loss=loss, device="cpu")
    report = runner.step((torch.arange(len(outputs)), targets))
    return report.loss, outputs - model.outputs.detach()


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), torch.full((4,), -100)),
        (nn.NLLLoss(ignore_index=2), torch.full((4,), 2)),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.0])), torch.ones(4, dtype=torch.long)),
    ],
    ids=["ignored", "ignored class", "class of weight 0"],
)
@pytest.mark.parametrize("sizes", [(4,), (3, 1)])
def test_window_in_which_nothing_counts_is_refused(loss, targets, sizes):
    with pytest.raises(InvalidInputError, match=r"no target of this window counts.*leave such samples out"):
        update(loss, torch.rand(4, 2), targets, sizes)


def test_sum_over_targets_that_do_not_count_is_no_error():
    loss, gradient = update(nn.CrossEntropyLoss(reduction="sum"), torch.rand(4, 2), torch.full((4,), -100), (3, 1))

    assert loss == 0.0
    assert not gradient.any()


def hooked():
    loss = nn.MSELoss()
    loss.register_forward_hook(lambda _, __, value: value.sqrt())
    return loss


@pytest.mark.parametrize(
    "loss",
    [
        None,
        lambda outputs, targets: outputs.mean(),
        type("Weighted", (nn.CrossEntropyLoss,), {})(),
        nn.TripletMarginLoss(),
        nn.Linear(1, 1),
        hooked(),
    ],
    ids=["none", "lambda", "subclass", "another loss", "another module", "hooked"],
)
def test_loss_that_may_compute_what_it_likes_is_not_read(loss):
    assert of_torch(loss) is None


# --- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "found"),
    [
        (torch.rand(4, 3), "a tensor of shape \\(4, 3\\)"),
        (torch.ones((), requires_grad=True), "a tensor with a gradient"),
        (torch.ones(()).bool(), "a tensor of type torch.bool"),
        (True, "a bool"),
        ({"accuracy": 0.5}, "a dict"),
        (None, "a NoneType"),
        ("12", "a str"),
    ],
)
def test_what_cannot_be_a_weight_is_refused_and_it_is_said_what_a_pair_means(weight, found):
    with pytest.raises(InvalidInputError, match=f"'mine' is a pair whose second half is {found}; a pair means"):
        weight_of_pair("mine", weight)


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([3.0]), np.float32(3), np.int64(3)])
def test_any_single_number_can_be_a_weight(weight):
    assert float(weight_of_pair("mine", weight)) == 3.0


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (lambda losses, mask: ((losses * mask).sum(), mask.mean()), "second halves do not add up: .* a pair means"),
        (lambda losses, mask: ((losses * mask).sum() / mask.sum(), mask.sum()), "first half is a mean; a pair means"),
        (lambda losses, mask: ((losses * mask).sum(), mask.sum().clamp(min=8)), "second halves do not add up"),
    ],
    ids=["accuracy", "mean", "clamped"],
)
def test_pair_that_is_no_sum_and_weight_is_refused(pair, said):
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 0])

    with pytest.raises(InvalidInputError, match=f"loss 'loss' is a pair whose {said}"):
        update(lambda outputs, mask: pair(outputs.square().sum(1), mask), torch.rand(8, 2), mask, (4, 4))


def test_weight_of_a_pair_may_be_rounded():
    mask = torch.ones(8, dtype=torch.bfloat16) / 3

    update(lambda outputs, mask: ((outputs.sum(1) * mask).sum(), mask.sum()), torch.rand(8, 2), mask, (4, 4))
