"""What ranks train with save_memory="auto", on devices of different size."""

import torch

from support.models.memory_heavy import Wide


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
