"""Memory that runs out while losses are tried on a few samples: they are tried again, and the gradient is right."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from faults import FailAt
from helpers import CPU

V, D, POINTS = 40, 8, 12


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.double()

    def forward(self, tokens, **_):
        return self.head(self.embed(tokens).tanh())


def smoothed(outputs, batch, **options):
    """Predicts the next token."""
    outputs, labels = outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return functional.cross_entropy(outputs, labels, label_smoothing=0.1, **options)


def batch(lengths, seed):
    is_text = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(3, V, is_text.shape, generator=torch.Generator().manual_seed(seed)).where(is_text, 0)
    labels = tokens.where(is_text, -100)
    labels[0] = -100
    return {"tokens": tokens, "attention_mask": is_text.long(), "labels": labels}


WINDOW = [batch([3, 9, 5, 7], 1), batch([14, 4, 6, 8], 2)]


def gradients(faults):
    """Return one window's gradients while faults happen."""
    model = Tagger()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 3), loss=smoothed, device=CPU)
    with faults:
        report = runner.step(autoaccum.Window(WINDOW))
    assert faults.hits == report.oom_events
    return [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]


def gradients_of_the_window():
    model = Tagger()
    total = sum(smoothed(model(**part), part, reduction="sum") for part in WINDOW)
    targets = sum(int((part["labels"][:, 1:] != -100).sum()) for part in WINDOW)
    return list(torch.autograd.grad(total / targets, list(model.parameters())))


def test_lack_of_memory_at_any_operator_leaves_the_gradient_of_the_whole_window():
    counter = FailAt()
    gradients(counter)
    expected = gradients_of_the_window()

    for point in range(1, counter.count, counter.count // POINTS):
        try:
            found = gradients(FailAt(point))
        except autoaccum.StateDamagedError as error:
            pytest.fail(f"operator {point}: {error}")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
