"""Why no weighting fits a loss is told by its cause: noise, class weights, or a function of all outputs at once."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._system.notices import Notices
from gradients import assert_full_batch_gradient
from helpers import CPU

N = 12
BATCH = torch.randn(N, 4, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 3


def said(loss, *, model=None, batch=BATCH, **options):
    """Make an update and return what was said of the loss."""
    notices, plan = Notices(silent=True), autoaccum.plan(N, 4)
    settings = {"device": CPU, "precision": "fp32", "notices": notices} | options
    autoaccum.Runner(model or nn.Linear(4, 3), None, plan, loss=loss, **settings).step(batch)
    return [text for text in notices.texts if text.startswith("loss ")]


def root_of_mean(outputs, targets):
    return functional.mse_loss(outputs[:, 0], targets.to(outputs)).sqrt()


def hardest(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none").topk(len(targets) // 2).values.mean()


GENERATOR = np.random.default_rng(0)
COUNTER = itertools.count()
NOISE = {
    "torch": lambda: torch.rand(()).item(),
    "Python": random.random,
    "NumPy": np.random.random,
}


@pytest.mark.parametrize("draw", NOISE.values(), ids=NOISE)
def test_noise_is_named_as_such(draw):
    (text,) = said(lambda outputs, targets: functional.cross_entropy(outputs, targets) * (1.0 + draw()))

    assert "draws random numbers even in evaluation mode" in text
    assert "loss_reduction='mean' or 'sum'" in text
    assert "loss_scope" not in text


@pytest.mark.parametrize("draw", [GENERATOR.random, lambda: next(COUNTER)], ids=["own generator", "counter"])
def test_what_the_random_state_does_not_bring_back_is_named_as_such(draw):
    (text,) = said(lambda outputs, targets: functional.cross_entropy(outputs, targets) * (1.0 + draw()))

    assert "a generator that is not torch's, Python's or NumPy's own, or keeps state" in text
    assert "loss_scope" not in text


def test_state_in_a_buffer_is_named_as_such():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, outputs, targets):
            loss = functional.cross_entropy(outputs, targets)
            self.scale.lerp_(loss.detach(), 0.3)
            return loss / self.scale

    (text,) = said(Normalised())

    assert "writes to its own buffers" in text
    assert "loss_scope" not in text


def test_model_that_draws_in_its_own_loss_is_named_too():
    class Noisy(nn.Linear):
        def forward(self, inputs, labels):
            outputs = super().forward(inputs + torch.randn_like(inputs))
            return {"loss": functional.cross_entropy(outputs, labels)}

    texts = said(None, model=Noisy(4, 3), batch={"inputs": BATCH[0], "labels": BATCH[1]})

    assert ["draws random numbers" in text for text in texts] == [True]


def test_random_numbers_that_change_nothing_are_not_the_cause():
    def draws(outputs, targets):
        torch.rand(3)
        return root_of_mean(outputs, targets)

    (text,) = said(draws)

    assert "random" not in text
    assert "Pass loss_scope='window'" in text


@pytest.mark.parametrize(
    "loss",
    [
        root_of_mean,
        lambda outputs, targets: (
            functional.cross_entropy(outputs, targets, reduction="none").topk(len(targets) // 2)[0].mean()
        ),
        lambda outputs, targets: functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs))),
    ],
    ids=["root of a mean", "hard examples", "contrastive"],
)
def test_window_is_named_for_any_deterministic_function_of_outputs(loss):
    (text,) = said(loss)

    assert "Pass loss_scope='window', which is exact for any deterministic function of per-sample outputs" in text
    assert said(loss, loss_scope="window") == []


def test_way_of_class_weights_is_named_and_exact():
    weights = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    batch = BATCH[0].double(), BATCH[1]

    (text,) = said(
        lambda outputs, targets: functional.cross_entropy(outputs, targets, weight=weights),
        model=nn.Linear(4, 3).double(),
        batch=batch,
    )

    assert "Class weights are exact in torch.nn.CrossEntropyLoss(weight=...)" in text
    assert_full_batch_gradient(nn.Linear(4, 3).double(), nn.CrossEntropyLoss(weight=weights), batch, (4, 3, 5))


def test_window_is_not_named_for_a_loss_that_the_model_computes_itself():
    class Own(nn.Linear):
        def forward(self, inputs, labels):
            return {"loss": root_of_mean(super().forward(inputs), labels)}

    (text,) = said(None, model=Own(4, 3), batch={"inputs": BATCH[0], "labels": BATCH[1]})

    assert "loss_scope='window' cannot mend it, since the model computes this loss itself" in text


def test_of_several_losses_the_one_that_is_no_mean_is_named():
    def two(outputs, targets):
        return {"classes": functional.cross_entropy(outputs, targets), "root": root_of_mean(outputs, targets)}

    texts = [text for text in said(two) if "could not be inferred" in text]

    assert [text.startswith("loss 'root'") for text in texts] == [True]


# --- a reduction that the user names ----------------------------------------------------------------------------------

TOKENS = torch.randint(1, 9, (N, 6), generator=torch.Generator().manual_seed(1))
PADDED = TOKENS.masked_fill(torch.arange(6) >= torch.tensor([6, 3, 1, 2, 5, 6, 2, 1, 4, 3, 6, 6])[:, None], -100)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9)

    def forward(self, tokens):
        return self.head(self.embed(tokens)).transpose(1, 2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reduction_that_does_not_hold_is_told_with_the_one_found(reduction):
    texts = said(functional.cross_entropy, model=Tagger(), batch=(TOKENS, PADDED), loss_reduction=reduction)

    (text,) = texts
    assert f"loss_reduction='{reduction}' is taken at its word" in text
    assert "show a mean over the targets that count" in text
    assert "leave loss_reduction out" in text


def test_reduction_that_does_not_hold_is_told_when_it_shows():
    notices = Notices(silent=True)
    runner = autoaccum.Runner(
        Tagger(),
        None,
        autoaccum.plan(N, 4),
        loss=functional.cross_entropy,
        loss_reduction="mean",
        device=CPU,
        notices=notices,
    )
    runner.step((TOKENS, TOKENS))
    assert not any("loss_reduction" in text for text in notices.texts)

    for _ in range(3):
        runner.step((TOKENS, PADDED))

    assert sum("is taken at its word" in text for text in notices.texts) == 1


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (functional.cross_entropy, "mean"),
        (lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="sum"), "sum"),
        (lambda outputs, targets: functional.cross_entropy(outputs + torch.randn_like(outputs), targets), "mean"),
    ],
    ids=["mean", "sum", "noise"],
)
def test_nothing_is_said_of_a_reduction_that_holds_or_cannot_be_checked(loss, reduction):
    assert said(loss, loss_reduction=reduction) == []


def test_reduction_that_a_loss_of_all_samples_at_once_cannot_have_is_told():
    (text,) = said(root_of_mean, loss_reduction="mean")

    assert "show no mean or sum over its samples" in text
    assert "Pass loss_scope='window'" in text


def test_sum_that_is_divided_by_a_count_is_told():
    batches = [
        {"input": x, "labels": y, "num_items": 4} for x, y in zip(*(part.split(4) for part in BATCH), strict=True)
    ]

    (text,) = said(
        lambda outputs, batch: functional.cross_entropy(outputs, batch["labels"], reduction="sum") / batch["num_items"],
        batch=autoaccum.Window(batches),
        loss_reduction="sum",
    )

    assert "show a sum over the samples, divided by 'num_items'" in text


# --- errors of the user's own -----------------------------------------------------------------------------------------


class NoLoss(nn.Linear):
    def forward(self, inputs, labels):
        return {"logits": super().forward(inputs)}


@pytest.mark.parametrize(
    ("model", "loss", "batch", "error"),
    [
        (nn.Linear(5, 3), functional.cross_entropy, BATCH, "shapes cannot be multiplied"),
        (nn.Linear(4, 3), lambda x, y: functional.cross_entropy(x, y[:, None]), BATCH, "target"),
        (NoLoss(4, 3), None, {"inputs": BATCH[0], "labels": BATCH[1]}, "no loss: the model returned a dict"),
    ],
    ids=["model", "loss", "no loss"],
)
def test_error_of_model_or_loss_is_the_only_thing_said(model, loss, batch, error):
    notices = Notices(silent=True)
    runner = autoaccum.Runner(model, None, autoaccum.plan(N, 4), loss=loss, device=CPU, notices=notices)

    with pytest.raises(Exception, match=error):
        runner.step(batch)

    assert not any("could not be inferred" in text for text in notices.texts)


def test_loss_that_fails_in_evaluation_mode_alone_is_told_when_it_has_run():
    class Detector(nn.Linear):
        def forward(self, inputs, labels):
            outputs = super().forward(inputs)
            return {"loss": functional.cross_entropy(outputs, labels)} if self.training else outputs

    texts = Notices(silent=True)
    runner = autoaccum.Runner(Detector(4, 3), None, autoaccum.plan(N, 4), device=CPU, notices=texts)

    for _ in range(2):
        runner.step({"inputs": BATCH[0], "labels": BATCH[1]})

    assert sum("could not be inferred in evaluation mode" in text for text in texts.texts) == 1


def test_split_without_a_weight_is_told_of_it():
    def collate(samples):
        rows, lengths = zip(*samples, strict=True)
        return {"rows": torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])}

    class Mean(nn.Linear):
        def forward(self, rows):
            return super().forward(rows).square().mean()

    samples = [(torch.randn(9, 4), 1 + n % 7) for n in range(N)]
    split = autoaccum.ListOfSamples(collate)

    (text,) = said(None, model=Mean(4, 3), batch=samples, split=split)

    assert "mean over tokens, boxes or the like, give the split weight(batch), which counts them" in text
