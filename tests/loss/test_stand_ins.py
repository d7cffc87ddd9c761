"""What a loss runs over is asked in float32, whatever half precision the model's weights are in."""

import pytest
import torch
from autoaccum._loss.stand_ins import standing_in
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._system.notices import Notices
from faults import FailAt
from helpers import CPU, assert_bitwise, needs_grad_dtype

N, T, V, WIDTH = 16, 32, 2000, 64


class LanguageModel(nn.Module):
    """Computes the loss itself, of the targets that count."""

    shift = 0

    def __init__(self, *, balance=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.balance = balance
        self.embed = nn.Embedding(V, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, V, bias=False)

    def logits(self, tokens):
        return self.head(self.layer(self.embed(tokens)))

    def forward(self, tokens, labels):
        logits = self.logits(tokens)
        kept = slice(None, -self.shift or None)
        loss = functional.cross_entropy(logits[:, kept].flatten(0, 1), labels[:, self.shift :].flatten())
        return loss + self.balance * logits.mean() ** 2


class Shifted(LanguageModel):
    """Predicts the next token."""

    shift = 1


class Outputs(LanguageModel):
    """Returns its logits."""

    def forward(self, tokens):
        return self.logits(tokens)


def batch():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (N, T), generator=generator)
    lengths = torch.randint(3, T, (N, 1), generator=generator)
    return {"tokens": tokens, "labels": tokens.where(torch.arange(T) < lengths, -100)}


def cross_entropy_of_tokens(outputs, batch):
    return functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def said_of(model, *, windows=2, **options):
    """Make updates in micro-batches of 3; return what was said of the loss."""
    notices = Notices(silent=True)
    runner = autoaccum.Runner(
        model, "adamw", autoaccum.plan(N, 3), device=CPU, precision="auto", notices=notices, **options
    )
    for _ in range(windows):
        runner.step(batch())
    return [text for text in notices.texts if text.startswith("loss ")]


WEIGHTS = [pytest.param("bf16", marks=needs_grad_dtype), pytest.param("bf16-master", marks=needs_grad_dtype), None]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (LanguageModel, {}, "a mean over the targets that count"),
        (Shifted, {}, "a mean over the targets that count, shifted by one"),
        (Outputs, {"loss": cross_entropy_of_tokens}, "a mean over the targets that count"),
    ],
)
def test_reduction_of_a_model_with_half_of_its_weights_in_bf16_is_determined(make, options, expected, weights):
    model = make()
    if weights is None:
        model.bfloat16()

    said = said_of(model, weights=weights, **options)

    assert said == [f"loss 'loss' is {expected} (inferred from a few samples)"]


@needs_grad_dtype
def test_rounding_of_large_bf16_weights_is_no_term_that_bends_the_loss(monkeypatch):
    monkeypatch.setattr("autoaccum._loss.stand_ins._COPIED", 0)  # as for a model too large for copies in float64

    said = said_of(Shifted(), weights="bf16")

    assert not [text for text in said if "not a mean or a sum" in text]


@needs_grad_dtype
def test_term_that_bends_the_loss_is_still_found_with_bf16_weights(monkeypatch):
    monkeypatch.setattr("autoaccum._loss.stand_ins._COPIED", 0)

    said = said_of(Shifted(balance=100.0), weights="bf16")

    assert [text for text in said if "not a mean or a sum" in text]


@needs_grad_dtype
def test_where_memory_lacks_for_wide_copies_the_weights_themselves_are_asked(monkeypatch):
    def standing_in_without_room(modules, *, convert, may_be_written):
        if convert is not None:
            raise torch.OutOfMemoryError("simulated")
        return standing_in(modules, convert=convert, may_be_written=may_be_written)

    monkeypatch.setattr("autoaccum._loss.observation.standing_in", standing_in_without_room)

    (said, *_) = said_of(Outputs(), weights="bf16", loss=cross_entropy_of_tokens)

    assert said == "loss 'loss' is a mean over the targets that count (inferred from a few samples)"


@needs_grad_dtype
@pytest.mark.parametrize("point", [40, 90, 140, 190])
def test_interrupt_while_wide_copies_are_asked_leaves_bf16_weights_bit_for_bit(point):
    model = Shifted()
    runner = autoaccum.Runner(
        model, "adamw", autoaccum.plan(N, 3), device=CPU, weights="bf16", notices=Notices(silent=True)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with FailAt(point, error=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        runner.step(batch())

    assert_bitwise(model.state_dict(), before)
    assert model.embed.weight.grad_dtype is torch.float32
