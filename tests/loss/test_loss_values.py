"""What a loss may not return; what is trained on and what is reported of a mapping, forms of losses show."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoaccum.errors import InvalidInputError
from support.models.small import runner_of

BATCH = torch.randn(8, 3), torch.arange(8) % 4


def step(loss):
    runner_of(nn.Linear(3, 4), loss=loss).step(BATCH)


def test_mapping_without_a_graph_is_refused():
    def loss(outputs, targets):
        return {"ce": functional.cross_entropy(outputs, targets).detach(), "accuracy": torch.ones(())}

    with pytest.raises(InvalidInputError, match=r"loss 'ce\+accuracy' has no gradient"):
        step(loss)


@pytest.mark.parametrize("wrap", [lambda value: {"aux": value}, lambda value: [value, value], lambda value: (value,)])
def test_losses_in_a_container_are_refused_and_never_left_out(wrap):
    def loss(outputs, targets):
        return {"ce": functional.cross_entropy(outputs, targets), "size": wrap(outputs.square().mean())}

    with pytest.raises(InvalidInputError, match="loss 'size' is a "):
        step(loss)
