"""Models whose embeddings have sparse gradients are trained and reported on like others."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum

PAIRS = [(torch.tensor([n % 50, n % 7]), torch.tensor(n % 3)) for n in range(64)]


class Bag(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(50, 8, sparse=True, mode="sum"), nn.Linear(8, 3)

    def forward(self, words):
        return self.head(self.words(words))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_fit_finds_its_cut():
    model = Bag()

    result = autoaccum.fit(
        model,
        DataLoader(PAIRS, batch_size=32),
        32,
        loss=functional.cross_entropy,
        optimizer=sgd(model),
        epochs=2,
        device=autoaccum.Simulated("60KiB"),
    )

    assert result.steps == 4


def test_report_of_a_device_at_hand():
    model, batch = Bag(), next(iter(DataLoader(PAIRS, batch_size=32)))

    report = autoaccum.preflight(model, batch, 32, loss=functional.cross_entropy, optimizer=sgd(model), device="cpu")

    assert "gradients" in str(report)


def test_dense_gradients_are_added_to_sparse_ones():
    table = nn.Embedding(5, 3, sparse=True)
    words = torch.tensor([0, 1, 1, 4])
    table(words).sum().backward()
    expected = table.weight.grad.to_dense() + 2.0
    accumulator = autoaccum.Accumulator(
        table, closure=lambda words: (table.weight.sum() * 2.0).expand(len(words)), micro_batch=2
    )
    accumulator.backward(words)
    torch.testing.assert_close(table.weight.grad, expected)
