"""What losses of a split's samples weigh, and compiled ones, which are checked as they are written."""

import pytest
import torch
from torch.nn import functional

import autoaccum


def tokens(samples):
    return sum(len(steps) for steps in samples)


def padded(samples):
    lengths = torch.tensor([len(steps) for steps in samples])
    steps = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return steps, torch.arange(steps.shape[1]) < lengths[:, None]


def per_sample(outputs, mask):
    return (outputs.squeeze(-1).square() * mask).sum(1) / mask.sum(1)


def by_weight(outputs, mask):
    return (outputs.squeeze(-1).square() * mask).sum() / mask.sum()


def both(outputs, mask):
    return {"samples": per_sample(outputs, mask), "tokens": by_weight(outputs, mask)}


def and_its_mean(model, batch):
    each = per_sample(model(batch[0]), batch[1])
    return {"loss": each, "mean": each.mean().detach()}


@pytest.mark.parametrize(
    "loss", [per_sample, both, [and_its_mean, lambda model, batch: by_weight(model(batch[0]), batch[1])]]
)
def test_a_loss_of_each_sample_counts_by_samples_whatever_the_split_weighs(loss):
    samples = [torch.randn(length, 4, dtype=torch.float64) for length in (2, 3, 9, 4)]
    found = []
    for micro_batch in (4, 1):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1, dtype=torch.float64)
        runner = autoaccum.Runner(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            autoaccum.plan(4, micro_batch),
            loss=loss,
            forward=None if isinstance(loss, list) else lambda model, batch: model(batch[0]),
            split=autoaccum.ListOfSamples(padded, weight=tokens),
        )
        report, batches = runner.step(samples), [samples] if micro_batch > 1 else [samples[:2], samples[2:]]
        found.append([report.loss, *report.losses.values(), *model.weight[0].tolist(), runner.evaluate(batches)])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 20)

    def forward(self, inputs):
        return self.layer(inputs).view(-1, 5, 4)


class OwnLoss(Logits):
    def forward(self, inputs, labels):
        logits = super().forward(inputs)
        return {"loss": mean_of_tokens(logits, labels), "logits": logits}


def mean_of_tokens(logits, labels):
    return functional.cross_entropy(logits.transpose(1, 2), labels)


def beside_another(logits, labels):
    return mean_of_tokens(logits, labels) + 0.3 * logits.square().mean()


def compiled_in_place():
    loss = torch.nn.CrossEntropyLoss()
    loss.compile(backend="aot_eager")
    return lambda logits, labels: loss(logits.transpose(1, 2), labels)


def with_a_compiled_term():
    term = compiled(mean_of_tokens)
    return lambda logits, labels: term(logits, labels) + 0.3 * mean_of_tokens(logits, labels)


def compiled(what):
    return torch.compile(what, backend="aot_eager")


def trained(model, loss, size):
    torch.manual_seed(0)
    model = model()
    labels = torch.randint(4, (12, 5))
    labels[0], labels[1:3, 2:], labels[7, 1:] = -100, -100, -100
    inputs = torch.randn(12, 6)
    batch = {"inputs": inputs, "labels": labels} if loss is None else (inputs, labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"micro_batch": size, "optimizer": optimizer, "progress": False}
    result = autoaccum.fit(model, [batch] * 5, 12, loss=loss, val_loader=[batch], **options)  # some windows are steady
    return [*model.parameters(), *result.history[-1].losses.values()]


OF_THE_COMPILER = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@OF_THE_COMPILER
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (lambda: compiled(OwnLoss()), lambda: None),
        (Logits, lambda: compiled(mean_of_tokens)),
        (Logits, compiled_in_place),
        (Logits, with_a_compiled_term),
    ],
    ids=["model with its own loss", "function", "in place", "a compiled term"],
)
def test_compiled_mean_trains_as_the_whole_batch(model, loss):
    *parts, logged = trained(model, loss(), 5)
    *whole, expected = trained(model, loss(), 12)

    torch.testing.assert_close(parts, whole)
    assert logged == pytest.approx(expected)


@OF_THE_COMPILER
def test_compiled_loss_of_two_means_is_refused_in_words():
    with pytest.raises(autoaccum.InvalidInputError, match="had 2 terms when it was checked, and now has a graph"):
        trained(Logits, compiled(beside_another), 3)
