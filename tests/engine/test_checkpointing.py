"""Blocks that are computed once more: which they are, what they may do, and that nothing stays behind."""

import pytest
import torch
import torchvision
import transformers
from torch import nn

import autoaccum
from autoaccum._engine.checkpointing import all_blocks, checkpointed, repeated_blocks
from fallback_models import Stack, a_step
from helpers import CPU


@pytest.mark.parametrize("change", ["input", "list"])
def test_block_that_changes_what_it_is_given_is_refused(change):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, inputs, seen):
            if change == "input":
                inputs.add_(1.0)
            else:
                seen.append(inputs)
            return self.linear(inputs) * len(seen)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Changing(), Changing()])

        def forward(self, inputs):
            seen = [1]
            for block in self.blocks:
                inputs = block(inputs * 1.0, seen)
            return inputs

    model = Model()

    with (
        checkpointed([model], CPU),
        pytest.raises(autoaccum.InvalidInputError, match="a Changing changes its inputs in place"),
    ):
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("make", "name", "count"),
    [
        (lambda: torchvision.models.resnet50(weights=None), "Bottleneck", 16),
        (lambda: torchvision.models.vit_b_32(weights=None), "EncoderBlock", 12),
        (lambda: torchvision.models.mobilenet_v3_small(weights=None), "InvertedResidual", 11),
        (lambda: torchvision.models.swin_t(weights=None), "SwinTransformerBlock", 12),
        (lambda: nn.Transformer(32, 2, 3, 3, 64, batch_first=True), "TransformerEncoderLayer", 3),
        (Stack, "Block", 6),
        (lambda: nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]), "Sequential", 3),
    ],
)
def test_blocks_are_what_a_model_is_a_stack_of(make, name, count):
    with torch.device("meta"):
        blocks = repeated_blocks(make())

    assert [type(block).__name__ for block in blocks].count(name) == count


def test_model_without_repeated_blocks_has_none():
    assert repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []


def test_transformers_models_checkpoint_themselves_and_no_more_afterwards():
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)

    with checkpointed([model], CPU) as said:
        assert any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        assert said == "GPT2LMHeadModel by its own"
    assert not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def test_first_blocks_alone_are_checkpointed_and_gradients_stay_bitwise():
    plain, changed = Stack(), Stack()

    with checkpointed([changed], CPU, "2") as said:
        assert said == "2 of 6 Block blocks"
        assert ["forward" in vars(block) for block in changed.blocks] == [True, True, False, False, False, False]
        for expected, found in zip(a_step(plain), a_step(changed), strict=True):
            assert torch.equal(expected, found)
    assert not any("forward" in vars(block) for block in changed.blocks)
    assert len(all_blocks([changed])) == 6


@pytest.mark.parametrize("hooks_inputs", [False, True])
def test_model_that_checkpoints_itself_is_left_as_it_was(hooks_inputs):
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    if hooks_inputs:
        model.enable_input_require_grads()
    before = [dict(vars(part)) for part in model.modules()]
    hooks = dict(model.transformer.wte._forward_hooks)

    with checkpointed([model], torch.device("cpu")):
        assert dict(model.transformer.wte._forward_hooks) == hooks

    assert [dict(vars(part)) for part in model.modules()] == before
    assert dict(model.transformer.wte._forward_hooks) == hooks


def test_first_blocks_of_transformers_models_checkpoint_themselves_and_no_more_afterwards():
    config = transformers.GPT2Config(n_layer=4, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(50, (2, 8))

    def gradients():
        torch.manual_seed(3)
        model(input_ids=tokens, labels=tokens).loss.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    model.config.use_cache = False  # a cache moves keys and values, which rounds otherwise
    expected = gradients()
    model.config.use_cache = True
    with checkpointed([model], CPU, "3") as said:
        assert said == "3 of 4 blocks of GPT2LMHeadModel by its own"
        assert [layer.gradient_checkpointing for layer in model.transformer.h] == [True, True, True, False]
        found = gradients()

    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert len(all_blocks([model])) == 4
    assert not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    assert model.config.use_cache


def test_more_blocks_than_there_are_is_all_of_them():
    model = Stack()

    with checkpointed([model], CPU, "100") as said:
        assert said == "6 Block blocks"
