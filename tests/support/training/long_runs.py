"""A training run with everything in it that a checkpoint must keep, small enough to be run many times."""

import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autoaccum

SAMPLES = 50
BATCH = 7
TARGET = 12
EPOCHS = 3
STEPS_PER_EPOCH = 5


class Noisy(Dataset):
    """Samples (inputs, target, number), to which each epoch adds noise from all three generators."""

    def __init__(self, samples=SAMPLES):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, 6, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(6) + random.random() + np.random.randn()  # noqa: NPY002, S311
        return self.inputs[index] + 0.1 * noise.float(), index % 3, index


class Model(nn.Module):
    """Has a random mask, running statistics, and a buffer that is in no state_dict and that it replaces."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, inputs):
        hidden = nn.functional.dropout(torch.relu(self.norm(self.first(inputs))), 0.3, self.training)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.last(hidden - 0.1 * self.mean)


class Samples(autoaccum.Callback):
    """Notes for each window the numbers of its samples, as the model saw them, and the evaluations."""

    def __init__(self):
        self.seen = []
        self.windows = {}
        self.evaluations = []

    def on_step(self, report, *, epoch):
        self.windows[report.step] = self.seen
        self.seen = []

    def on_evaluation(self, evaluation, *, epoch, step):
        self.evaluations.append((step, evaluation.loss))

    def on_resume(self, path, *, step, epoch):
        self.seen = []


class StopAt(autoaccum.Callback):
    """Ends the call with an error of its own after a window."""

    def __init__(self, step):
        self.step = step

    def on_step(self, report, *, epoch):
        if report.step == self.step:
            raise StoppedError


class StoppedError(Exception):
    """What ends a call early."""


def loader_of(dataset, kind=DataLoader, **options):
    return kind(dataset, **{"batch_size": BATCH, "shuffle": True} | options)


class Run:
    """One process's part of a run: everything made anew from the same seed, as a script does.

    Args:
        changes: Arguments of `fit` in place of those here.
        loader: A function that makes the loader.
        scheduler: A function of the optimizer that makes the scheduler.

    Attributes:
        end: Its state when `fit` ended.
        result: What `fit` returned.
    """

    def __init__(self, *, loader=lambda: loader_of(Noisy()), scheduler=None, optimizer=None, model=Model, **changes):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        self.model = model()
        self._own = next(self.model.parameters())
        self.loader = loader()
        make = optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=0.01))
        self.optimizer = make(list(self.model.parameters()))
        self.scheduler = (scheduler or (lambda it: torch.optim.lr_scheduler.StepLR(it, 4, gamma=0.5)))(self.optimizer)
        self.val_loader = [next(iter(DataLoader(Noisy(9), batch_size=9)))]
        self.samples = Samples()
        self.changes = changes

    def forward(self, model, batch):
        if model.training and next(model.parameters()) is self._own:  # and no copy, by which gradients are compared
            self.samples.seen += batch[2].tolist()
        return model(batch[0])

    def fit(self, *callbacks, **changes):
        arguments = {
            "loss": lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
            "loss_reduction": "mean",
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "forward": self.forward,
            "epochs": EPOCHS,
            "micro_batch": 5,
            "device": "cpu",
            "progress": False,
            "val_loader": self.val_loader,
            "callbacks": [self.samples, *callbacks],
        }
        target = None if "target_tokens" in self.changes else TARGET
        try:
            self.result = autoaccum.fit(self.model, self.loader, target, **arguments | self.changes | changes)
        finally:
            self.end = self.state()
        return self.result

    def state(self):
        """Everything that must be the same at the end, to the last bit, however often the run was interrupted."""
        state = {
            "model": dict(self.model.state_dict()),
            "buffers": dict(self.model.named_buffers()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": getattr(self.scheduler, "state_dict", dict)(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002
        }
        return {name: bits(value) for name, value in state.items()}


def stopped_at(step, folder, **options):
    """Run until after a window, or with changes by which a call ends; leave a checkpoint, and return the run."""
    run = Run(checkpoint=folder, **options)
    if isinstance(step, dict):
        run.fit(**step)
        return run
    try:
        run.fit(StopAt(step))
    except StoppedError:
        return run
    raise AssertionError(f"there was no step {step}")


def bits(value):
    """A value as something that is equal only where every bit is."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return repr(value)


def checkpoints(folder):
    """The names of what is in a folder, in order; without the lock's file."""
    return sorted(path.name for path in Path(folder).iterdir() if path.name != ".lock")


def damage(path):
    """Cut the state in a checkpoint short."""
    state = path / "state.pt"
    state.write_bytes(state.read_bytes()[:-1000])
