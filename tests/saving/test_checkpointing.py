"""Blocks that are computed once more: which they are, what they may do, and that nothing stays behind."""

import pytest
import torch
import torchvision
import transformers
from torch import nn

from autoaccum._saving.checkpointing import checkpointed, repeated_blocks
from support.models.memory_heavy import Stack, a_step
from support.models.small import fit_quietly


def test_gradients_buffers_and_random_state_are_bitwise_what_they_are_without():
    plain, changed = Stack(), Stack()

    with checkpointed([changed]) as said:
        assert said == "activation checkpointing of 6 Block blocks"
        for _ in range(2):
            for expected, found in zip(a_step(plain), a_step(changed), strict=True):
                assert torch.equal(expected, found)
    assert not any("forward" in vars(block) for block in changed.blocks)


@pytest.mark.parametrize(
    ("make", "name", "count"),
    [
        (lambda: torchvision.models.resnet50(weights=None), "Bottleneck", 16),
        (lambda: torchvision.models.vit_b_32(weights=None), "EncoderBlock", 12),
        (lambda: nn.Transformer(32, 2, 3, 3, 64, batch_first=True), "TransformerEncoderLayer", 3),
        (lambda: nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]), "Sequential", 3),
    ],
)
def test_blocks_are_what_a_model_is_a_stack_of(make, name, count):
    with torch.device("meta"):
        blocks = repeated_blocks(make())

    assert [type(block).__name__ for block in blocks].count(name) == count


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=4, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("memory", [None, "checkpoint"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_model_that_checkpoints_by_itself_trains_bit_for_bit_as_without(use_reentrant, memory):
    tokens = torch.randint(50, (8, 16), generator=torch.Generator().manual_seed(1))
    ends = []
    for enables in (False, True):
        model = gpt2()  # with dropout, which the check of its loss leaves out
        if enables:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": use_reentrant})
        torch.manual_seed(3)
        fit_quietly(
            model,
            [{"input_ids": tokens, "labels": tokens}] * 2,
            8,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            precision="fp32",
            micro_batch=4,
            save_memory=memory if enables else None,
        )
        ends.append(list(model.parameters()))

    assert all(map(torch.equal, *ends))
