"""Prints a hash of all that each of some unlike trainings leaves, to be compared before and after a change.

    python benchmarks/same_bits.py > before    (and once more > after)

Micro-batches have fixed sizes, so each hash is the same as long as training is, bit by bit. Hashes differ between
machines. Each covers parameters, buffers, gradients, the optimizer's state, losses, and the states of generators.
"""

from __future__ import annotations

import hashlib
import random
import socket
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import distributed, multiprocessing, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autoaccum

SAMPLES, FEATURES, CLASSES, STEPS = 24, 12, 5, 9


def network(*, dropout=0.0, normalises=False):
    layers = [nn.Linear(FEATURES, 32), *([nn.BatchNorm1d(32)] if normalises else []), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(32, CLASSES))


def classes(steps=STEPS, samples=SAMPLES):
    """Pairs of inputs and classes, of which some are ignored."""
    for _ in range(steps):
        targets = torch.randint(0, CLASSES, (samples,))
        targets[torch.rand(samples) < 0.2] = -100
        yield torch.randn(samples, FEATURES), targets


def mappings():
    """Mappings of inputs, targets and a mask."""
    for _ in range(STEPS):
        mask = (torch.rand(SAMPLES) < 0.7).float()
        yield {"x": torch.randn(SAMPLES, FEATURES), "y": torch.randn(SAMPLES, CLASSES), "mask": mask}


def of_inputs(model, batch):
    return model(batch["x"])


def each(outputs, batch):
    return functional.mse_loss(outputs, batch["y"], reduction="none").mean(-1)


def masked(outputs, batch):
    return (each(outputs, batch) * batch["mask"]).sum() / batch["mask"].sum()


def by_runner(model, batches, optimizer, **options):
    """Train by `Runner` in uneven micro-batches; return the losses."""
    options = {"device": "cpu", "precision": "fp32"} | options
    runner = autoaccum.Runner(model, optimizer, autoaccum.Plan(SAMPLES, (7, 5, 8, 4)), **options)
    return [runner.step(batch).loss for batch in batches]


def by_fit(model, **options):
    """Train by `fit` on a data set that gives a short last window; return the losses."""
    data = TensorDataset(torch.randn(100, FEATURES), torch.randint(0, CLASSES, (100,)))
    loader = DataLoader(data, batch_size=10, shuffle=True)
    fixed = {"micro_batch": 6, "device": "cpu", "progress": False, "epochs": 2}
    result = autoaccum.fit(model, loader, SAMPLES, **fixed, **options)
    return [report.loss for report in result.history]


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def cross_entropy():
    model = network(dropout=0.2)
    optimizer = momentum(model)
    return model, optimizer, by_runner(model, classes(), optimizer, loss=nn.CrossEntropyLoss())


def masked_mean():
    model = network()
    optimizer = adam(model)
    return model, optimizer, by_runner(model, mappings(), optimizer, loss=masked, forward=of_inputs, clip_grad_norm=0.1)


def several_losses():
    def loss(outputs, batch):
        penalty = {"penalty": 1e-3 * outputs.abs().mean(), "accuracy": (outputs.argmax(1) == 1).float().mean()}
        return {"masked": masked(outputs, batch), **penalty, "mse": each(outputs, batch)}

    model = network(dropout=0.1)
    optimizer = adam(model)
    return model, optimizer, by_runner(model, mappings(), optimizer, loss=loss, forward=of_inputs)


def two_divisors():
    def loss(outputs, batch):
        return masked(outputs, batch) + 0.1 * outputs.square().sum(1).mean()

    model = network()
    optimizer = momentum(model)
    return model, optimizer, by_runner(model, mappings(), optimizer, loss=loss, forward=of_inputs)


def pairs_and_noise():
    def loss(outputs, batch):
        return (each(outputs, batch) * batch["mask"]).sum(), batch["mask"].sum()

    model = network(dropout=0.3)
    optimizer = momentum(model)
    return model, optimizer, by_runner(model, mappings(), optimizer, loss=loss, forward=of_inputs, noise_scale=2)


def loss_over_the_window():
    def loss(outputs, _):
        similarity = functional.normalize(outputs) @ functional.normalize(outputs).T
        return functional.cross_entropy(similarity * 5, torch.arange(len(outputs)))

    model = network(dropout=0.1)
    optimizer = momentum(model)
    given = by_runner(model, mappings(), optimizer, loss=loss, forward=of_inputs, loss_scope="window")
    return model, optimizer, given


def mixed_precision():
    model = network(normalises=True)
    optimizer = momentum(model)
    options = {"loss": nn.CrossEntropyLoss(label_smoothing=0.1), "precision": "bf16-mixed", "batchnorm": "rescale"}
    return model, optimizer, by_runner(model, classes(), optimizer, **options)


def fit_with_evaluation():
    model = network(dropout=0.2, normalises=True)
    validation = DataLoader(TensorDataset(torch.randn(33, FEATURES), torch.randint(0, CLASSES, (33,))), batch_size=8)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    options = {"val_loader": validation, "val_every": 3, "scheduler": scheduler, "precision": "fp32"}
    return model, optimizer, by_fit(model, optimizer=optimizer, loss=nn.CrossEntropyLoss(), **options)


def fit_that_saves_memory():
    model = nn.Sequential(network(), nn.Linear(CLASSES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    optimizer = adam(model)
    options = {"save_memory": "checkpoint:ReLU", "clip_grad_norm": 1.0, "precision": "bf16-mixed"}
    return model, optimizer, by_fit(model, optimizer=optimizer, loss=nn.CrossEntropyLoss(), **options)


def accumulator_with_a_scaler():
    model = network()
    optimizer = momentum(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    options = {"micro_batch": 7, "device": "cpu", "precision": "fp16", "scale": scaler}
    accumulator = autoaccum.Accumulator(model, closure=lambda batch: masked(model(batch["x"]), batch), **options)
    losses = []
    for batch in mappings():
        optimizer.zero_grad()
        losses.append(accumulator.backward(batch).loss)
        scaler.step(optimizer)
        scaler.update()
    return model, optimizer, losses


def out_of_memory():
    """Runs out of memory in the third window, at 7 samples."""
    model = network(dropout=0.2)
    optimizer, passes = momentum(model), [0]

    def forward(model, batch):
        passes[0] += 1
        if passes[0] == 2 * 4 + 20:
            raise torch.OutOfMemoryError("told to")
        return model(batch["x"])

    return model, optimizer, by_runner(model, mappings(), optimizer, loss=masked, forward=forward)


TRAININGS = (
    cross_entropy,
    masked_mean,
    several_losses,
    two_divisors,
    pairs_and_noise,
    loss_over_the_window,
    mixed_precision,
    fit_with_evaluation,
    fit_that_saves_memory,
    accumulator_with_a_scaler,
    out_of_memory,
)


def hash_of(training):
    """Run a training; return the hash of everything that it leaves."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - the state that the package saves
    model, optimizer, losses = training()
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            found.update(str(value.dtype).encode() + value.detach().numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        else:
            found.update(repr(value).encode())

    add([model.state_dict(), [parameter.grad for parameter in model.parameters()], optimizer.state_dict(), losses])
    add([torch.get_rng_state(), random.getstate(), np.random.get_state()])  # noqa: NPY002
    return found.hexdigest()[:16]


def on_rank(rank, ranks, port, queue):
    """Train with other ranks by DistributedDataParallel; hand the hash to the queue."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)

    def training():
        model = network(dropout=0.2)
        optimizer = momentum(model)
        torch.manual_seed(rank)
        return model, optimizer, by_runner(model, mappings(), optimizer, loss=masked, forward=of_inputs)

    queue.put((rank, hash_of(training)))
    distributed.destroy_process_group()


def main():
    """Print a line for each training."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"# {Path(autoaccum.__file__).parent}", file=sys.stderr)
    for training in TRAININGS:
        print(training.__name__, hash_of(training), flush=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(on_rank, (2, port, queue), nprocs=2)
    for rank, found in sorted(queue.get() for _ in range(2)):
        print(f"rank {rank} of two", found)


if __name__ == "__main__":
    main()
