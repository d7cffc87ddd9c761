"""A pair that is no sum and its weight is refused, with what is wrong with it."""

import pytest
import torch
from torch import nn

from autoaccum.errors import InvalidInputError
from helpers import runner_of


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (
            lambda losses, mask: ((losses * mask).sum(), mask.mean()),
            "the weights of loss 'loss' do not add up: .* a pair means",
        ),
        (
            lambda losses, mask: ((losses * mask).sum() / mask.sum(), mask.sum()),
            "loss 'loss' is a pair whose first half is a mean; a pair means",
        ),
        (
            lambda losses, mask: ((losses * mask).sum(), mask.sum().clamp(min=8)),
            "the weights of loss 'loss' do not add up",
        ),
    ],
    ids=["accuracy", "mean", "clamped"],
)
def test_pair_that_is_no_sum_and_weight_is_refused(pair, said):
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 0])

    runner = runner_of(
        nn.Linear(3, 2), samples=8, micro_batch=4, loss=lambda outputs, mask: pair(outputs.square().sum(1), mask)
    )

    with pytest.raises(InvalidInputError, match=said):
        runner.step((torch.arange(24.0).view(8, 3), mask))
