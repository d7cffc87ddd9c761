"""The demo: a ResNet-18 learns scanned digits with batches of 100, in memory that 100 do not fit.

    python examples/digits.py

scikit-learn brings the 1,797 scans, 8 x 8 pixels each; they are scaled up to 64 x 64. A fifth of them is kept
for the evaluation after each epoch.
"""

from __future__ import annotations

import torch
import torchvision
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset, random_split

import autoaccum
from autoaccum.records import FitResult

# A step takes 150 to 162 MiB for gradients, Adam's state and scratch memory, and 1.7 MiB an image (as trials measured
# it on two cores); without AVX-512, a convolution of several images takes 72 MiB more at times. So some 30 to 75 fit,
# and 100 do not. The limit on a GPU is an estimate: parameters, gradients and Adam's state take 171 MiB, cuBLAS 32, and
# an image in half precision about half as much as on the host.
LIMIT_ON_THE_HOST = "280MiB"
LIMIT_ON_A_GPU = "320MiB"


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the fraction of digits that were recognised."""
    return (outputs.argmax(dim=1) == targets).float().mean()


def train(memory_limit: str | None, side: int = 64, epochs: int = 2, target_batch: int = 100) -> FitResult:
    """Train; `side` is the images' in pixels."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = interpolate(images, size=(side, side), mode="bilinear").expand(-1, 3, -1, -1)
    data = TensorDataset(images, torch.tensor(digits.target))
    training, validation = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    steps = epochs * -(-len(training) // target_batch)
    return autoaccum.fit(
        torchvision.models.resnet18(num_classes=10),
        DataLoader(training, batch_size=target_batch, shuffle=True),
        target_batch,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        epochs=epochs,
        memory_limit=memory_limit,
        val_loader=DataLoader(validation, batch_size=target_batch),
        metrics={"accuracy": accuracy},
    )


def outcome(result: FitResult, limit: str) -> str:
    """Return in three lines what happened."""
    cut, last = result.plan.micro_batches, result.evaluations[-1]
    return f"""
Memory: {max(cut)} images fit at once in {limit}, so each batch of {sum(cut)} ran as {"+".join(map(str, cut))}.
Training: {result.steps} optimizer steps, each of a whole batch; memory ran out {result.oom_events} times.
Result: {last.metrics["accuracy"]:.1%} of {last.samples} digits that it had not seen are read right."""


if __name__ == "__main__":
    limit = LIMIT_ON_A_GPU if torch.cuda.is_available() else LIMIT_ON_THE_HOST
    print(
        f"The demo trains a ResNet-18 with batches of 100 images in {limit}, where 100 do not fit: "
        "half a minute on two free cores.",
        flush=True,
    )
    print(outcome(train(limit), limit))
