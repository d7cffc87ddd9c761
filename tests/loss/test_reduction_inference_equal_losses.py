"""Losses that are equal for all samples, as of a head that is zero, are weighted by their gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._system.notices import Notices
from helpers import CPU

VOCABULARY, HIDDEN = 20, 6
CHANCE = torch.Generator().manual_seed(0)


def sentences(samples, length, *, padded=False):
    batch = {"tokens": torch.randint(1, VOCABULARY, (samples, length), generator=CHANCE)}
    if padded:
        batch["attention_mask"] = (torch.arange(length) < torch.arange(1, samples + 1)[:, None]).long()
    return batch


class Scorer(nn.Module):
    """A model with a loss of its own, whose head is zero, as that of a reward model may be."""

    def __init__(self, reduction):
        torch.manual_seed(0)
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN).double(), nn.Linear(HIDDEN, 1).double()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.reduction = reduction

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        losses = -functional.logsigmoid(self.head(self.embedding(tokens)).squeeze(-1)) * mask
        return {"loss": self.reduction(losses, mask)}


def over_tokens(losses, mask):
    return losses.sum() / mask.sum()


def over_samples(losses, mask):
    return (losses.sum(1) / mask.sum(1)).mean()


def accumulated(model, window, micro_batch):
    """The gradients of a window, and what was said."""
    notices = Notices(silent=True)
    accumulator = autoaccum.Accumulator(
        model, loss=None, micro_batch=micro_batch, precision="fp32", device=CPU, notices=notices
    )
    accumulator.backward(window)
    return [parameter.grad for parameter in model.parameters()], notices.texts


def assert_equal_gradients(mine, theirs):
    torch.testing.assert_close(mine, [parameter.grad for parameter in theirs.parameters()], rtol=0, atol=1e-15)


@pytest.mark.parametrize("reduction", [over_tokens, over_samples])
def test_first_window_of_a_head_that_is_zero_has_the_gradient_of_the_whole_batch(reduction):
    batch, model = sentences(12, 15, padded=True), Scorer(reduction)
    whole = copy.deepcopy(model)
    whole(**batch)["loss"].backward()

    gradients, said = accumulated(model, batch, 5)

    assert_equal_gradients(gradients, whole)
    assert not any("off" in text for text in said)


@pytest.mark.parametrize("is_zero", [True, False])
def test_samples_whose_tokens_are_no_targets_weigh_the_same_whatever_their_length(is_zero):
    pieces, model = [sentences(4, length) for length in (3, 9, 5)], Scorer(over_samples)
    if not is_zero:
        nn.init.normal_(model.head.weight)
    whole = copy.deepcopy(model)
    (sum(whole(**piece)["loss"] for piece in pieces) / 3).backward()

    gradients, said = accumulated(model, autoaccum.Window(pieces), 3)

    assert_equal_gradients(gradients, whole)
    (text,) = [text for text in said if "do not determine" in text]
    assert "assumed to be a mean over the samples" in text


@pytest.mark.parametrize("seed", [9, 19, 24])
def test_values_of_few_lengths_that_fit_the_first_gradients_are_ruled_out_by_further_ones(seed):
    batch = sentences(16, 7)
    batch["lengths"] = torch.randint(1, 8, (16,), generator=torch.Generator().manual_seed(seed))

    def loss(model, batch):
        outputs = model.head(model.embedding(batch["tokens"])).squeeze(-1)
        counts = torch.arange(7) < batch["lengths"][:, None]
        return -(functional.logsigmoid(outputs) * counts).sum() / batch["lengths"].sum()

    model, notices = Scorer(over_tokens), Notices(silent=True)
    whole = copy.deepcopy(model)
    loss(whole, batch).backward()

    autoaccum.Accumulator(model, loss=[loss], micro_batch=5, precision="fp32", device=CPU, notices=notices).backward(
        batch
    )

    assert_equal_gradients([parameter.grad for parameter in model.parameters()], whole)
    assert not any("off" in text for text in notices.texts)
