"""A training by several ranks with memory="auto", on devices of different size."""

import torch

import autoaccum
from fallback_models import Wide, seed


def data(windows):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 32, generator=generator, dtype=torch.float64), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(windows)
    ]


def train(rank, size, *, capacities, windows=60, memory="auto", **options):
    """Train; return parameters in bytes, what saved memory, what was tried and the cuts."""
    model = Wide().double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # else each cut draws other numbers
    seed()
    result = autoaccum.fit(
        model,
        data(windows),
        8,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
        device=autoaccum.Simulated(capacities[rank]),
        memory=memory,
        cache=False,
        progress=False,
        **options,
    )
    return {
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "losses": [report.loss for report in result.history],
        "memory": result.memory,
        "trials": result.memory_trials,
        "cuts": [report.micro_batches for report in result.history],
        "is plain": all("forward" not in vars(module) for module in model.modules()),
    }


def accumulate(rank, size, *, capacities, batches=52, **options):
    """Train with an accumulator, each rank with its part of every batch; return what it found."""
    model = Wide().double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    accumulator = autoaccum.Accumulator(
        model,
        loss=torch.nn.functional.cross_entropy,
        device=autoaccum.Simulated(capacities[rank]),
        cache=False,
        **options,
    )
    losses = []
    for inputs, targets in data(batches):
        part = slice(rank * 8 // size, (rank + 1) * 8 // size)
        losses.append(accumulator.backward((inputs[part], targets[part])).loss)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "losses": losses,
        "memory": accumulator.memory,
        "trials": accumulator.memory_trials,
    }


class Tagger(torch.nn.Module):
    """Has a head over many classes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(3000, 16), torch.nn.Linear(16, 3000)
        self.double()

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def refuse(rank, size, *, capacity, **options):
    """Train with a loss that chunks do not bear; return parameters in bytes, what saved memory and what was tried."""
    tokens = torch.randint(3000, (4, 512), generator=torch.Generator().manual_seed(3))
    model = Tagger()
    result = autoaccum.fit(
        model,
        [{"tokens": tokens, "labels": tokens}] * 12,
        4,
        loss=lambda outputs, batch: torch.nn.functional.cross_entropy(
            outputs.add_(1.0).flatten(0, 1), batch["labels"].flatten()
        ),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
        device=autoaccum.Simulated(capacity),
        cache=False,
        progress=False,
        **options,
    )
    return {
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "memory": result.memory,
        "refused": [trial.memory for trial in result.memory_trials if trial.is_refused],
    }
