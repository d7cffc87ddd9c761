"""What a loss returns: a pair that is none is refused; of a mapping, entries are trained on or reported and weighed."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoaccum.errors import InvalidInputError
from support.losses.gradients import cut_gradient, distance, full_batch_gradient
from support.models.small import runner_of

SAMPLES = 12
CUTS = [(12,), (5, 4, 3)]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)

    def forward(self, tokens):
        return self.embed(tokens).transpose(1, 2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tagger().double()


@pytest.fixture
def batch():
    tokens, targets = torch.randint(0, 11, (SAMPLES, 6)), torch.randint(0, 5, (SAMPLES, 6))
    for row in range(SAMPLES):
        targets[row, 1 + row % 6 :] = -100
    return tokens, targets


def tokens(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def size(outputs):
    return outputs.square().mean()


def right(outputs, targets):
    return ((outputs.argmax(1) == targets) & (targets != -100)).double()


def accuracy(outputs, targets):
    return right(outputs, targets).sum() / (targets != -100).sum()


def total_and_parts(outputs, targets):
    total = tokens(outputs, targets)
    return {"ce": total, "loss": total, "again": 2 * total}


def total_and_metric(outputs, targets):
    return {"loss": tokens(outputs, targets), "accuracy": accuracy(outputs, targets)}


def detached_metric(outputs, targets):
    return {"ce": tokens(outputs, targets), "accuracy": accuracy(outputs, targets)}


def plain_numbers(outputs, targets):
    return {"loss": tokens(outputs, targets), "accuracy": accuracy(outputs, targets).item()}


def pair_and_metrics(outputs, targets):
    counts = (targets != -100).sum()
    return {
        "loss": (functional.cross_entropy(outputs, targets, reduction="sum"), counts),
        "accuracy": accuracy(outputs, targets),
        "as pair": (right(outputs, targets).sum(), counts),
    }


def detached_pair(outputs, targets):
    return {"ce": tokens(outputs, targets), "accuracy": (right(outputs, targets).sum(), (targets != -100).sum())}


def vector(outputs, targets):
    return {"loss": tokens(outputs, targets), "length": (targets != -100).sum(1)}


@torch.no_grad()
def exact(loss, model, batch):
    return {name: _value(value) for name, value in loss(model(batch[0]), batch[1]).items()}


def _value(value):
    value = value[0] / value[1] if isinstance(value, tuple) else value
    return float(value.double().mean()) if isinstance(value, torch.Tensor) else value


REPORTED = [total_and_parts, total_and_metric, detached_metric, plain_numbers, pair_and_metrics, detached_pair, vector]


@pytest.mark.parametrize("scope", ["micro_batch", "window"])
@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("loss", REPORTED)
def test_what_is_no_part_of_the_total_is_reported_and_not_trained_on(loss, sizes, scope, model, batch):
    expected, (wanted, _) = exact(loss, model, batch), full_batch_gradient(model, tokens, batch)

    found, report = cut_gradient(model, loss, batch, sizes, loss_scope=scope)

    assert distance(found, wanted) <= 1e-12
    assert report.loss == pytest.approx(expected.get("loss", expected.get("ce")), rel=1e-12)
    assert dict(report.losses) == pytest.approx(expected, rel=1e-12)


def test_mapping_without_a_graph_is_refused(model, batch):
    def loss(outputs, targets):
        return {"ce": tokens(outputs, targets).detach(), "accuracy": accuracy(outputs, targets)}

    with pytest.raises(InvalidInputError, match=r"loss 'ce\+accuracy' has no gradient"):
        cut_gradient(model, loss, batch, (12,))


@pytest.mark.parametrize("wrap", [lambda value: {"aux": value}, lambda value: [value, value], lambda value: (value,)])
def test_losses_in_a_container_are_refused_and_never_left_out(wrap, model, batch):
    def loss(outputs, targets):
        return {"ce": tokens(outputs, targets), "size": wrap(size(outputs))}

    with pytest.raises(InvalidInputError, match="loss 'size' is a "):
        cut_gradient(model, loss, batch, (12,))


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
