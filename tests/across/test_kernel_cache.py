"""oneDNN keeps kernels for each size of a micro-batch, some MiB each, which a limit on the host counts."""

import subprocess

import pytest

import warm

# Prints by how many KiB the process grows when a model that `fit` has trained under a limit runs with ten new sizes.
SCRIPT = """
import contextlib
import torch
from torch import nn

import autoaccum

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(12)), nn.Flatten(), nn.Linear(8 * 256, 3)
)
data = [(torch.randn(4, 8, 16, 16), torch.arange(4) % 3) for _ in range(2)]
autoaccum.fit(
    model, data, 8, micro_batch=4, val_loader=data, memory_limit="600MiB", device="cpu", progress=False
)


def data_kib():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmData"))


def run(size):
    model(torch.randn(size, 8, 16, 16)).sum().backward()


run(16)
before = data_kib()
for size in range(5, 15):
    run(size)
print(data_kib() - before)
"""


@pytest.mark.slow
def test_fit_with_validation_keeps_the_kernels_of_one_size_alone_under_a_limit():
    ended = subprocess.run([*warm.python(), "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    assert int(ended.stdout) < 4096
