"""A training by several ranks with save_memory="auto", on devices of different size."""

import torch

import autoaccum
from support.models.memory_heavy import Wide, seed


def data(windows):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 32, generator=generator, dtype=torch.float64), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(windows)
    ]


def net():
    model = Wide().double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # else each cut draws other numbers
    return model


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def train(rank, size, *, capacities, windows=8, save_memory="auto", **options):
    model = net()
    seed()
    samples = [sample for batch in data(windows) for sample in zip(*batch, strict=True)]
    result = autoaccum.fit(
        model,
        torch.utils.data.DataLoader(samples, batch_size=8),
        8,
        optimizer=sgd,
        device=autoaccum.Simulated(capacities[rank]),
        save_memory=save_memory,
        progress=False,
        **options,
    )
    return {
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "losses": [report.loss for report in result.history],
        "memory": result.savings,
        "cuts": [report.micro_batches for report in result.history],
        "is plain": all("forward" not in vars(module) for module in model.modules()),
    }


def accumulate(rank, size, *, capacities, batches=8, **options):
    model = net()
    optimizer = sgd(model.parameters())
    accumulator = autoaccum.Accumulator(
        model, loss=torch.nn.functional.cross_entropy, device=autoaccum.Simulated(capacities[rank]), **options
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
        "memory": accumulator.savings,
    }


def lacking_late(rank, size, *, lists, step=6, windows=12):
    model = net()
    batches = [(inputs[rank::size].contiguous(), targets[rank::size].contiguous()) for inputs, targets in data(windows)]
    held = []

    class Holding(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            if rank == 1 and report.step == step:
                held.append(torch.zeros(36 * 2**20, dtype=torch.uint8))

    result = autoaccum.fit(
        model,
        [list(zip(*batch, strict=True)) for batch in batches] if lists else batches,
        8,
        split=autoaccum.ListOfSamples(torch.utils.data.default_collate) if lists else None,
        optimizer=sgd,
        device=autoaccum.Simulated("40MiB"),
        micro_batch=4,
        save_memory="auto",
        progress=False,
        callbacks=[Holding()],
    )
    return {"steps": result.steps, "memory": result.savings, "parameters": [one.detach() for one in model.parameters()]}
