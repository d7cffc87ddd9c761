"""Adapters beside frozen linear layers, on a copy without memory."""

import pytest
import torch
from torch import nn

from autoaccum._estimate.estimate import trace_step
from autoaccum._estimate.lora import RANK, alike, with_adapters


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def test_only_adapters_are_trained_and_the_output_layer_has_none():
    model = mlp()

    adapted = with_adapters(model)

    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert trained == RANK * (64 + 256) + RANK * (256 + 128)
    assert all(parameter.is_meta for parameter in adapted.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert type(model[0]) is nn.Linear


def test_a_model_with_one_linear_layer_gets_none():
    assert with_adapters(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))) is None


@pytest.mark.card_fakes
def test_gradients_and_state_are_those_of_the_adapters():
    optimizer = torch.optim.AdamW(mlp().parameters(), lr=0.01)
    batch = torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)

    traced = trace_step(with_adapters(mlp()), batch, optimizer=alike(optimizer), kind="cuda")

    footprint = traced.estimate().footprints[-1]
    trained = 4 * RANK * (64 + 256 + 256 + 128)
    assert (footprint.gradients_bytes, footprint.optimizer_bytes) == (trained, 2 * trained)
    assert footprint.parameters_bytes == trained + sum(parameter.nbytes for parameter in mlp().parameters())
