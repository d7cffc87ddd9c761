"""A reduction that was inferred is compared with later windows, and inferred again where they contradict it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._system.notices import Notices
from gradients import joined
from helpers import CPU

N = 16
X = torch.randn(4 * N, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(4 * N) % 3


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def told(batches, loss, **options):
    """Step on batches with two micro-batches each; return what contradicted earlier windows."""
    notices = Notices(silent=True)
    settings = {"device": CPU, "precision": "fp32", "notices": notices} | options
    runner = autoaccum.Runner(linear(), None, autoaccum.plan(N, N // 2), loss=loss, **settings)
    for batch in batches:
        runner.step(batch)
    return [text for text in notices.texts if "contradicts" in text]


def windows(*tensors):
    return list(zip(*(tensor.split(N) for tensor in tensors), strict=True))


def weighted(outputs, batch):
    losses = functional.cross_entropy(outputs, batch["targets"], reduction="none")
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def test_weights_that_are_equal_at_first():
    weights = torch.ones(4 * N)
    weights[N + 3] = 10.0
    batches = [{"input": x, "targets": y, "weights": w} for x, y, w in windows(X, Y, weights)]

    (text,) = told(batches, weighted, forward=lambda model, batch: model(batch["input"]))

    assert "which window 2 contradicts" in text
    assert "loss_scope='window'" in text


def test_targets_that_are_missing_later():
    targets = torch.randn(4 * N, 3)
    targets[N + 2 : N + 4, 1:] = float("nan")

    def loss(outputs, targets):
        return (outputs - targets)[~targets.isnan()].square().mean()

    (text,) = told(windows(X, targets), loss)

    assert "window 2" in text


def test_sum_that_is_divided_by_what_occurs_later():
    classes = torch.zeros(4 * N, dtype=torch.long)
    classes[N + 5 : N + 9] = 1

    def loss(outputs, targets):
        wanted = functional.one_hot(targets, 3).to(outputs)
        return functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="sum") / (
            targets > 0
        ).sum().clamp(1)

    (text,) = told(windows(X, classes), loss)

    assert "earlier windows showed a sum" in text


def hard_ones(outputs, targets):
    """The mean of the losses above a threshold."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses[losses > 0.7].mean()


@pytest.mark.parametrize(("alike", "asked"), [(1, 2), (2, 4), (3, 4), (4, 8)])
def test_samples_that_come_to_be_chosen_by_their_loss(alike, asked):
    """With inputs near zero every loss is that of chance, and chosen; of the others some are not."""
    small, (first, *_) = windows(0.01 * X, Y), windows(3 * X, Y)
    assert 0 < sum(functional.cross_entropy(linear()(first[0]), first[1], reduction="none") < 0.6) < N

    (text,) = told(small[:alike] + [first] * (8 - alike), hard_ones)

    assert f"which window {asked} contradicts" in text
    assert "samples chosen by their loss" in text


def test_samples_that_are_all_chosen_are_a_mean():
    assert told(windows(0.01 * X, Y) * 2, hard_ones) == []


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_contradicts_a_mean_over_the_targets_that_count(padded):
    targets = torch.randint(3, (4 * N,), generator=torch.Generator().manual_seed(0))
    if padded:
        targets[N:][::3] = -100  # none in the first window

    assert told(windows(X, targets) * 4, functional.cross_entropy) == []


def test_mean_over_pixels_and_a_sum_are_not_contradicted():
    pixels = torch.randint(3, (4 * N,), generator=torch.Generator().manual_seed(0))
    batches = windows(X, pixels) * 2

    assert told(batches, lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="sum")) == []
    assert told(batches, lambda outputs, targets: functional.mse_loss(outputs[:, 0], targets.to(outputs))) == []


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, inputs):
        return self.head(self.memory(inputs)[0]).log_softmax(-1).transpose(0, 1)


def over_lengths(outputs, batch):
    lengths = torch.full((outputs.shape[1],), len(outputs))
    summed = functional.ctc_loss(
        outputs, batch["targets"], lengths, batch["lengths"], zero_infinity=True, reduction="sum"
    )
    return summed / batch["lengths"].sum()


@pytest.mark.parametrize("seed", range(8))
def test_unusual_weighting_needs_more_than_one_split_to_be_believed(seed):
    """Small counts agree by chance: a loss over lengths looked like one over targets that are not 1."""
    torch.manual_seed(seed)
    model = Recogniser().double()
    batch = {
        "inputs": torch.randn(16, 4 if seed % 2 else 6, 4, dtype=torch.float64),
        "targets": torch.randint(1, 5, (16, 2)),
        "lengths": torch.randint(1, 3, (16,)),
    }
    notices, seen = Notices(silent=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(joined(model)))
    runner = autoaccum.Runner(
        model,
        optimizer,
        autoaccum.plan(16, 4),
        loss=over_lengths,
        forward=lambda model, batch: model(batch["inputs"]),
        device=CPU,
        precision="fp32",
        notices=notices,
    )
    runner.step(batch)
    model.zero_grad()
    over_lengths(model(batch["inputs"]), batch).backward()

    is_exact = torch.allclose(seen[0], joined(model), rtol=1e-9, atol=1e-12)
    assert is_exact or any("loss" in text and "could not be inferred" in text for text in notices.texts)
