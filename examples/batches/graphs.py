"""Graphs with PyTorch Geometric: a batch is one large graph, which a split of your own cuts between its graphs.

The loss is a mean over nodes, of which graphs have unlike numbers; `weight` says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv

import autoaccum
from autoaccum.records import FitResult


class Graphs:
    """Counts, cuts and joins batches of graphs."""

    def count(self, batch: Batch) -> int:
        """Return the number of graphs."""
        return int(batch.num_graphs)

    def cut(self, batch: Batch, sizes: Sequence[int]) -> list[Batch]:
        """Return consecutive parts, one for each size."""
        graphs = iter(batch.to_data_list())
        return [Batch.from_data_list(list(itertools.islice(graphs, size))) for size in sizes]

    def join(self, batches: Sequence[Batch]) -> Batch:
        """Return one batch of all graphs."""
        return Batch.from_data_list([graph for batch in batches for graph in batch.to_data_list()])

    def weight(self, batch: Batch) -> float:
        """Return the number of nodes, over which the loss is a mean."""
        return float(batch.num_nodes)


class Network(nn.Module):
    """Classifies nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 3)

    def forward(self, graphs: Batch) -> Tensor:
        """Return logits (nodes, 3)."""
        hidden = self.first(graphs.x, graphs.edge_index).relu()
        found: Tensor = self.second(hidden, graphs.edge_index)
        return found


def loss(outputs: Tensor, graphs: Batch) -> Tensor:
    """Return the mean over the nodes."""
    return functional.cross_entropy(outputs, graphs.y)


def graph() -> Data:
    """Return a random graph of three to eight nodes."""
    nodes = int(torch.randint(3, 9, ()))
    edges = torch.randint(nodes, (2, 3 * nodes))
    return Data(x=torch.randn(nodes, 4), edge_index=edges, y=torch.randint(3, (nodes,)))


def train(target_batch: int = 8) -> FitResult:
    """Train."""
    return autoaccum.fit(
        Network(),
        DataLoader([graph() for _ in range(16)], batch_size=4),
        target_batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        split=Graphs(),
    )


if __name__ == "__main__":
    train()
