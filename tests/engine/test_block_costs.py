"""What checkpointing a block saves is measured without a trace; the blocks that save most for their time come first."""

import pytest
import torch
import torchvision
import transformers
from torch import nn

from autoaccum import Simulated
from autoaccum._data.batches import as_window
from autoaccum._engine.block_costs import BlockCost, measured, partial_levels
from autoaccum._memory import backend_for
from fallback_models import Stack
from helpers import live_tensors
from put_together import training_step
from rung_training import is_plain

CPU = backend_for(torch.device("cpu"))
CLASSES = torch.tensor([0, 1, 2, 3])


def costs_of(model, batch, *, memory=CPU, loss=None, precision="fp32"):
    step = training_step(
        model, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), memory=memory, precision=precision
    )
    return measured(step, as_window(batch, None))


class Square(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))

    def forward(self, inputs):
        return inputs + self.inner(inputs)


def test_bytes_are_those_that_blocks_keep_besides_inputs_and_parameters():
    model = nn.Sequential(Square(16), Square(64), Square(16))

    costs = costs_of(model, (torch.randn(4, 8), torch.randn(4, 8)))

    # Two samples: what tanh returns, which the last layer needs too.
    assert [one.kept_bytes for one in costs] == [2 * width * 4 for width in (16, 64, 16)]
    assert all(one.seconds > 0 for one in costs)
    assert costs[0] == costs[2]


@pytest.mark.parametrize("memory", [CPU, Simulated("1GiB")], ids=["cpu", "simulated"])
def test_measuring_leaves_no_trace(memory):
    model, batch = Stack(), (torch.randn(4, 32), CLASSES)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()

    assert len(costs_of(model, batch, memory=memory)) == 6

    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [block.times for block in model.blocks] == [0] * 6
    assert all(parameter.grad is None for parameter in model.parameters())
    assert is_plain(model)


def test_measuring_keeps_no_tensor():
    model, batch = nn.Sequential(Square(16), Square(64)), (torch.randn(4, 8), torch.randn(4, 8))
    costs_of(model, batch)
    before = live_tensors()

    costs_of(model, batch)

    assert live_tensors() == before


def test_early_blocks_of_a_convolutional_network_keep_most():
    costs = costs_of(torchvision.models.resnet18(), (torch.randn(2, 3, 64, 64), CLASSES[:2]))

    kept = [one.kept_bytes for one in costs]
    assert kept[0] > kept[2] > kept[4] > kept[6]


def test_models_of_transformers_are_measured_by_layer_without_their_cache():
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    model, tokens = transformers.LlamaForCausalLM(config), torch.randint(50, (4, 8))

    costs = costs_of(model, {"input_ids": tokens, "labels": tokens})

    assert len(set(costs)) == 1
    assert len(costs) == 3
    assert model.config.use_cache


def test_inputs_that_a_block_changes_are_no_hindrance():
    class InPlace(Square):
        def forward(self, inputs):
            return inputs.mul_(2) + self.inner(inputs)

    costs = costs_of(nn.Sequential(InPlace(8), InPlace(8)), (torch.randn(4, 8), torch.randn(4, 8)))

    assert len(costs) == 2


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(Square(8)),
        nn.Linear(8, 8),
        nn.Sequential(Square(8), Square(8), nn.Linear(9, 9)),
    ],
    ids=["one block", "none", "raises"],
)
def test_what_cannot_be_measured_is_none(model):
    assert costs_of(model, (torch.randn(4, 8), torch.randn(4, 8))) is None


def test_lack_of_memory_is_none_and_leaves_no_trace():
    class Full(Square):
        def forward(self, inputs):
            torch.randn(3)
            raise torch.OutOfMemoryError("told to")

    model, batch = nn.Sequential(Square(8), Full(8), Full(8)), (torch.randn(4, 8), torch.randn(4, 8))
    random = torch.get_rng_state()

    assert costs_of(model, batch) is None

    assert is_plain(model)
    assert torch.equal(torch.get_rng_state(), random)


def test_blocks_that_save_most_for_their_time_come_first():
    costs = [BlockCost(10, 1.0), BlockCost(40, 1.0), BlockCost(40, 8.0), BlockCost(10, 0.1)]

    assert partial_levels(costs, 4) == ["1-1,3-3"]
    assert partial_levels([BlockCost(30, 1.0), BlockCost(40, 1.0), BlockCost(40, 8.0)], 3) == ["1-1", "2"]
    assert partial_levels([BlockCost(5, 1.0)] * 8, 8) == ["2", "4", "6"]
    assert partial_levels(None, 4) == ["1", "2", "3"]
    assert partial_levels(None, 2) == ["1"]
    assert partial_levels(None, 1) == partial_levels(None, 0) == []


def test_blocks_that_save_nothing_are_no_levels():
    assert partial_levels([BlockCost(0, 1.0), BlockCost(8, 1.0)], 2) == ["1-1"]
    assert partial_levels([BlockCost(0, 1.0)] * 3, 3) == []
