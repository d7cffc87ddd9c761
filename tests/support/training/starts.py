"""Starts of one job, by a loop of one's own and by each framework, with autoaccum's adapters.

    python tests/support/training/starts.py HOW

trains under a real limit of the host's memory, by HOW a framework, "loop", or "plain" for a loop without autoaccum.
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum._memory.available_devices import backend_for  # a limit around a framework's own loop
from support.frameworks.jobs import alone

LIMIT, LAYERS, BATCH = 64 << 20, 56, 64


class Wide(nn.Module):
    """A sample takes about a megabyte, with one layer."""

    def __init__(self, layers=1):
        super().__init__()
        torch.manual_seed(0)
        hidden = [one for _ in range(layers) for one in (nn.Linear(64, 64), nn.ReLU())]
        self.body = nn.Sequential(*hidden, nn.Linear(64, 8))

    def forward(self, inputs, targets=None):
        outputs = self.body(inputs.repeat(1, 1, 1)).mean(1)
        return outputs if targets is None else {"loss": functional.mse_loss(outputs, targets)}


def rows(samples):
    return torch.randn(samples, 1024, 64), torch.randn(samples, 8)


def started(how, batches=4, layers=1, **options):
    """The micro-batches of a job's batches."""
    model, data = Wide(layers), TensorDataset(*rows(BATCH * batches))
    if how != "loop":
        job = {"body": model, "rows": data, "batch": BATCH, "loss": functional.mse_loss}
        return alone(how, **job, ours={"device": None} | options)["cuts"]
    accumulator = autoaccum.Accumulator(model, closure=lambda part: model(*part)["loss"], **options)
    found = []
    for batch in DataLoader(data, batch_size=BATCH):
        found.append(accumulator.backward(batch).micro_batches)
        model.zero_grad()
    return found


def main(how):
    torch.set_num_threads(1)
    if how == "plain":
        with backend_for(torch.device("cpu")).limited(LIMIT):
            Wide(LAYERS)(*rows(BATCH))["loss"].backward()
    sys.stdout.write(f"{len(started(how, layers=LAYERS, memory_limit=LIMIT))} batches\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
