"""Losses of torch whose type says what they run over, windows in which nothing counts, and what pairs may be."""

import pytest
import torch
from torch import nn

import autoaccum
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


# --- pairs -----------------------------------------------------------------------------------------------------------


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
