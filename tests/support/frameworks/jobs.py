"""A job that every framework can train, and what is recorded of its training."""

import contextlib
import importlib
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import autoaccum
from support.data import small_samples
from support.data.small_samples import BATCH, CLASSES, WORDS
from support.faults.modes import FailAt
from support.ranks.sharded import whole

# For `parametrize`; a framework that is not there is skipped.
FRAMEWORKS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}"))
    for name, package in {"accelerate": "accelerate", "lightning": "lightning", "trainer": "transformers"}.items()
]
TASKS = ("vectors", "ignored", "words")


class EndedError(Exception):
    """The job was told to end; of several ranks, each is killed instead."""


@dataclass(frozen=True)
class Job:
    """What is trained, with a learning rate that falls; gradients are clipped.

    Attributes:
        folder: Where the framework saves its state after each step (Lightning: each epoch).
        ours: Arguments of the adapter; None trains as the framework does by itself.
        task: "vectors" and "words" of `small_samples`; "ignored" are vectors of which some do not count. Trainers
            have more.
        batch: Samples of a batch, of all ranks together.
        accumulates: Batches that the framework accumulates for an update.
        evaluates: Whether it evaluates after each epoch.
        most: Samples that fit at once, or by rank; None if all do.
        fails: By place ("training", "evaluation"), the operators at which the last rank lacks memory.
        half: "bf16" or "fp16", whose first scale overflows.
        compiles: The network "inside", or by the "framework".
        shards: FSDP2 spreads the model; says how the state is saved, "full" or "sharded".
        strategy: Further arguments of the framework's own for that.
        ends_at: The step at which it ends, before anything of it is done.
        resumes: Whether it goes on from the last state in the folder.
        loss: Of outputs and labels.
        body: Another network than the task's.
        rows: Other data.
        further: Arguments of `by_NAME.train`.
    """

    rank: int = 0
    size: int = 1
    folder: str | None = None
    ours: dict | None = field(default_factory=dict)
    task: str = "vectors"
    samples: int = small_samples.SAMPLES
    batch: int = BATCH
    epochs: int = 1
    accumulates: int = 1
    evaluates: bool = False
    most: int | dict | None = None
    fails: dict = field(default_factory=dict)
    half: str | None = None
    compiles: str | None = None
    shards: str | None = None
    strategy: dict = field(default_factory=dict)
    ends_at: int | None = None
    resumes: bool = False
    loss: Callable | None = None
    body: nn.Module | None = None
    rows: TensorDataset | None = None
    further: dict = field(default_factory=dict)
    types: set = field(default_factory=set)  # of what the network computes

    @property
    def options(self):
        given = {"micro_batch": 4} if self.shards else {"device": autoaccum.Simulated("1GiB")}
        return given | self.ours

    @property
    def own_batch(self):
        return self.batch // self.size

    def network(self):
        most = self.most.get(self.rank) if isinstance(self.most, dict) else self.most
        network = Net(self.task, most, self.body)
        if self.compiles == "inside":
            network.compile(backend="eager")
        if self.half:
            network.float().body[-1].register_forward_hook(lambda *called: self.types.add(called[2].dtype))
        return network

    def data(self):
        if self.rows is not None:
            return self.rows
        inputs, labels = (small_samples.words_and_labels if self.task == "words" else small_samples.vectors)().tensors
        if self.task == "ignored":  # as many of each rank's part do not count as chance has it
            labels = labels.masked_fill(torch.rand(len(labels), generator=torch.Generator().manual_seed(0)) < 0.4, -100)
        inputs = inputs.float() if self.half else inputs
        return TensorDataset(inputs[: self.samples], labels[: self.samples])

    def loss_of(self, outputs, labels):
        return (self.loss or cross_entropy)(outputs, labels)

    @property
    def is_by_sgd(self):
        """Adam makes steps of gradients that are nothing but rounding, as those of the keys' biases in attention."""
        return self.half or self.task == "words"

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1) if self.is_by_sgd else torch.optim.Adam(parameters, lr=0.01)

    def scaler(self):
        """As on GPUs, where alone frameworks make one."""
        if self.half != "fp16":
            return None
        return torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-16, growth_interval=2)

    def begin_step(self, number):
        if number != self.ends_at:
            return
        if self.size > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise EndedError

    def record(self, model, **found):
        return {"parameters": [whole(one).clone() for one in model.parameters()], "types": self.types, **found}


class Still(nn.BatchNorm1d):
    """Keeps its statistics."""

    def train(self, _=True):
        return super().train(mode=False)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.layer(self.words(words), src_mask=mask, is_causal=True))


class Net(nn.Module):
    """Lacks memory for more samples at once than `most`, in training and in evaluation."""

    def __init__(self, task="vectors", most=None, body=None):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(5, 7), Still(7), nn.Tanh(), nn.Linear(7, CLASSES)]
        self.body = body or (Words() if task == "words" else nn.Sequential(*layers)).double()
        self.most = most
        self.train()

    def run_out(self, inputs):
        if self.most is not None and len(inputs) > self.most:
            raise torch.OutOfMemoryError("told to")

    def forward(self, inputs):
        outputs = self.body(inputs)
        self.run_out(inputs)
        return outputs


def cross_entropy(outputs, labels):
    return functional.cross_entropy(*flat(outputs, labels))


def flat(outputs, labels):
    return (outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) if outputs.dim() > 2 else (outputs, labels)


# --- training ---------------------------------------------------------------------------------------------------------


def train(rank, size, framework, **asked):
    """Train by a framework; return parameters, the log, and what else is recorded: "steps", "cuts", "scaler"."""
    job = Job(rank, size, **asked)
    with contextlib.ExitStack() as within:
        if size > 1:
            warnings.simplefilter("ignore")
        by = importlib.import_module(f"support.frameworks.by_{framework}")
        modes = {place: FailAt(*points) for place, points in job.fails.items() if rank == size - 1}
        for place, mode in modes.items():
            within.enter_context(failing(*by.PLACES[place], mode))
        found = by.train(job, **job.further)
    return found | {"operators": {place: mode.count for place, mode in modes.items()}, "hits": count_hits(modes)}


def count_hits(modes):
    return sum(mode.hits for mode in modes.values())


def failing(owner, method, mode):
    """Let operators fail within a method; they are counted over all its calls."""
    plain = getattr(owner, method)

    def with_faults(*args, **kwargs):
        with mode:
            return plain(*args, **kwargs)

    return mock.patch.object(owner, method, with_faults)


def alone(framework, **asked):
    return train(0, 1, framework, **asked)


def on_ranks(answers, framework, *, size=2, **asked):
    """What each of some ranks has found; `answers` is a pool's `run` or `answers`."""
    return answers("support.frameworks.jobs:train", framework, size=size, **asked)
