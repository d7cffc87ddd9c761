"""Writes checkpoints and a plan cache into an archive, with whatever version of autoaccum is installed.

old_files.tar.xz was written by commit 8230186, the last before the modules moved into packages:

    git worktree add ../old 8230186 && make -C ../old .venv/.for-development
    ../old/.venv/bin/python tests/old_files.py tests/old_files.tar.xz

across/test_old_files.py resumes from them and compares with a training that nothing interrupted.
"""

import os
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum

STEPS_BEFORE, STEPS = 4, 9
KINDS = {
    "adamw": (
        lambda parameters: torch.optim.AdamW(parameters, lr=0.05, amsgrad=True),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
    ),
    "sgd": (
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
    ),
    "rmsprop": (
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, centered=True),
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
    ),
}


def train(kind, max_steps, *, progress=False, **arguments):
    """Train a tiny model with BatchNorm and dropout; return it."""
    make_optimizer, make_scheduler = KINDS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3)).double()
    inputs, targets = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
    optimizer = make_optimizer(model.parameters())
    autoaccum.fit(
        model,
        loader,
        8,
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer),
        max_steps=max_steps,
        device="cpu",
        precision="fp32",
        progress=progress,
        seed=7,
        **arguments,
    )
    return model


def main(archive):
    """Write one checkpoint an optimizer, and one plan cache."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive, "w:xz") as packed:
        for kind in KINDS:
            train(kind, STEPS_BEFORE, micro_batch=4, checkpoint=f"{folder}/{kind}")
            [written] = Path(folder, kind).glob("step-*.pt")
            packed.add(written, f"{kind}.pt")
        os.environ["AUTOACCUM_CACHE_DIR"] = folder
        train("adamw", STEPS_BEFORE)
        [written] = Path(folder).glob("plan-*.json")
        packed.add(written, written.name)


if __name__ == "__main__":
    main(sys.argv[1])
