"""What you bring: data, a model, and the batch size that the paper used."""

import resource

import torch
from torch import nn

BATCH = 256


def loader(samples=1024, seed=1):
    """Return a loader of noisy pictures of ten patterns, 64 x 64 pixels each."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 8, 8, generator=generator)
    patterns = nn.functional.interpolate(patterns, size=64, mode="bilinear")
    generator.manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    noise = torch.randn(samples, 1, 64, 64, generator=generator)
    data = torch.utils.data.TensorDataset(patterns[labels] + 4 * noise, labels)
    return torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)


def model():
    """Return a small convolutional network."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(8),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )


def accuracy(outputs, labels):
    """Return the fraction of pictures that were recognised."""
    return (outputs.argmax(dim=1) == labels).float().mean()


def limit_memory(mebibytes):
    """Limit what this process takes from now on, as a small GPU would."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    limit = (int(status["VmData"].split()[0]) + mebibytes * 1024) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
