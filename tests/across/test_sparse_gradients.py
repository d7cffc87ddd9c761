"""Models with sparse gradients, or sparse buffers, are trained and reported on like others."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum

NODES = 6
PAIRS = [(torch.tensor([n % 50, n % 7]), torch.tensor(n % 3)) for n in range(64)]


class Bag(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(50, 8, sparse=True, mode="sum"), nn.Linear(8, 3)

    def forward(self, words):
        return self.head(self.words(words))


class Graph(nn.Module):
    def __init__(self, layout):
        torch.manual_seed(0)
        super().__init__()
        self.register_buffer("edges", torch.eye(NODES).roll(1, 0).to_sparse(layout=layout))
        self.inner, self.head = nn.Linear(NODES, 24), nn.Linear(24, NODES)

    def forward(self, nodes):
        return (self.edges @ self.head(self.inner(nodes).tanh()).T).T


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


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants", "ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("fails", [False, True])
def test_sparse_buffers_are_left_as_they_are(layout, fails, tmp_path):
    samples = [(torch.randn(NODES), torch.tensor(n % NODES)) for n in range(64)]
    expected, model = Graph(layout), Graph(layout)
    optimizer = sgd(expected)
    for inputs, targets in DataLoader(samples, batch_size=32):
        optimizer.zero_grad()
        functional.cross_entropy(expected(inputs), targets).backward()
        optimizer.step()
    device = autoaccum.Simulated("6KiB" if fails else "1MiB")
    loader, options = DataLoader(samples, batch_size=32), {"device": device, "checkpoint": tmp_path, "progress": False}

    result = autoaccum.fit(model, loader, 32, loss=functional.cross_entropy, optimizer=sgd(model), **options)

    assert (result.plan.accum_steps > 1) is fails
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))
    assert torch.equal(model.edges.to_dense(), expected.edges.to_dense())
    assert autoaccum.preflight(model, next(iter(loader)), 32, loss=functional.cross_entropy, device="cpu").fits
