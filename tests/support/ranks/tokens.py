"""Trainings of ranks on texts of unlike length, for tests of several ranks."""

import torch

import autoaccum
from support.data.ragged import Causal, lengths_of, loader_of, padded, texts


def train(rank, size, samples, batch, loader="in order", epochs=1, dropout=0.0, **options):
    result, model = run(loaders(samples, batch, rank, size)[loader](), epochs, dropout, **options)
    return {
        "parameters": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
        "samples": [report.samples for report in result.history],
        "resumed": result.resumed_from,
    }


def loaders(samples, batch, rank=0, size=1):
    """DataLoaders that keep the order or shuffle, and lists of a rank's own batches."""

    def of(each, shuffle):
        return torch.utils.data.DataLoader(each, batch, shuffle=shuffle, collate_fn=padded)

    return {
        "in order": lambda: of(texts(*lengths_of(samples)), shuffle=False),
        "shuffling": lambda: of(texts(*lengths_of(samples)), shuffle=True),
        "own": lambda: loader_of(samples, batch)[rank::size],
        "own, of unlike number": lambda: loader_of(samples, batch)[: 2 + rank],
    }


def run(loader, epochs=1, dropout=0.0, **options):
    model = Causal(dropout=dropout)
    torch.manual_seed(3)
    result = autoaccum.fit(
        model,
        loader,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        precision="fp32",
        epochs=epochs,
        **{"device": "cpu", "shard_data": True, "progress": False} | options,
    )
    return result, model
