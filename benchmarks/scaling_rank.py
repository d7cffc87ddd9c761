"""Runs one part of `scaling.py` on each rank, under torchrun; rank 0 writes the results.

torchrun --nproc-per-node=2 benchmarks/scaling_rank.py agreement --windows 500 --out row.json
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from workloads import Transformer

import autoaccum
from autoaccum._distributed.buckets import Buckets
from autoaccum._distributed.process_group import Ranks
from autoaccum._engine import devices
from autoaccum._system.notices import Notices

VOCABULARY, LENGTH = 2000, 32
WARM_UP = 50
# Windows of a call of `fit` in which shares by speed are still settling.
SETTLING = 12
# Arguments of every call of `fit` here.
ALWAYS = {
    "loss": nn.CrossEntropyLoss(),
    "shard": True,
    "cache": False,
    "progress": False,
    "device": "cpu",
    "precision": "fp32",
}


# --- what is trained --------------------------------------------------------------------------------------------------


def gpt(width=256, layers=6):
    return Transformer(vocabulary=VOCABULARY, width=width, layers=layers, length=LENGTH)


def convolutional():
    """Six convolutions with BatchNorm, for 32 x 32 images."""
    layers, channels = [], 3
    for width, stride in ((64, 2), (128, 2), (256, 2), (512, 1), (512, 1), (512, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def texts(samples):
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def images(samples):
    chance = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 3, 32, 32, generator=chance), torch.randint(10, (samples,), generator=chance)
    )


# Title, model, data, target batch, micro-batch.
MODELS = {
    "gpt": ("GPT, {parameters:.1f} M parameters", gpt, texts, 16, 2),
    "conv": ("convolutional net with BatchNorm, {parameters:.1f} M parameters", convolutional, images, 32, 4),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def the_host():
    return devices.resolve("cpu", nn.Identity(), Notices(silent=True))


def millions(model):
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


# --- the parts, each run on every rank; rank 0's result is used -------------------------------------------------------


def agreement(options):
    """Time the messages between ranks in a window that reduces only one loss."""
    ranks = Ranks(the_host())
    said = (16, 16.0, b"12345678", 2**12 - 1, 0, 0.1, 0, 3)  # as joint.Part packs it
    loss = torch.zeros(1)
    took = {"first_us": [], "loss_us": [], "second_us": [], "all_us": []}
    for window in range(options.windows + WARM_UP):
        stamps = [time.perf_counter()]
        for speak in (
            lambda: ranks.exchange("window", said),
            lambda: ranks.add_up(loss),
            lambda: ranks.exchange("update", False),
        ):
            speak()
            stamps.append(time.perf_counter())
        if window >= WARM_UP:
            pairs = [*itertools.pairwise(stamps), (stamps[0], stamps[-1])]
            for name, (begin, end) in zip(took, pairs, strict=True):
                took[name].append((end - begin) * 1e6)
    return {name: summary(values) for name, values in took.items()} | {
        "window_of_fit_us": tiny_windows(options.windows)
    }


def exchange(options):
    """Time, in turns, the parts of an exchange and their alternatives; each alone, without computation.

    Each is waited for as in `_distributed/process_group.py` (polled, with pauses) and in gloo's own code (which ignores
    signals). Times are those of the slowest rank; messages have the size of those in
    `_distributed/process_group.py`.
    """
    size, rank = distributed.get_world_size(), distributed.get_rank()
    ranks = Ranks(the_host())
    message, numbers = torch.zeros(512, dtype=torch.uint8), torch.zeros(16, dtype=torch.float64)
    received = [torch.zeros_like(message) for _ in range(size)]
    at_root = received if rank == 0 else None
    ways = {
        "all_gather": [lambda: distributed.all_gather(received, message, async_op=True)],
        "all_reduce": [lambda: distributed.all_reduce(numbers, async_op=True)],
        "gather_broadcast": [
            lambda: distributed.gather(message, at_root, dst=0, async_op=True),
            lambda: distributed.broadcast(message, 0, async_op=True),
        ],
    }
    waits = {"asked": ranks._wait, "native": lambda work: work.wait()}
    took = {(way, wait): [] for wait in waits for way in ways}
    for turn in range(options.windows + WARM_UP):
        # In a different order each turn, so that none always follows the same other one.
        order = list(took)[turn % len(took) :] + list(took)[: turn % len(took)]
        for way, wait in order:
            distributed.barrier()
            began = time.perf_counter()
            for start in ways[way]:
                waits[wait](start())
            if turn >= WARM_UP:
                took[way, wait].append((time.perf_counter() - began) * 1e6)
    said = [None] * size
    distributed.all_gather_object(said, took)
    took = {key: [max(each) for each in zip(*(one[key] for one in said), strict=True)] for key in took}
    row = {}
    for wait in waits:
        for way in ways:
            row[f"{way}_{wait}_us"] = summary(took[way, wait])
            pairs = zip(took[way, wait], took["all_gather", wait], strict=True)
            row[f"{way}_{wait}_ratio"] = summary([one / gathered for one, gathered in pairs])
    return row


class Stamps(autoaccum.Callback):
    """Records the time of each update, and the last cut."""

    def __init__(self):
        self.times, self.last_cut = [], []

    def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
        """Note them."""
        self.times.append(time.perf_counter())
        self.last_cut = list(report.micro_batches)

    def took_ms(self, since):
        """Return the time of each update, from number `since` on."""
        return [(end - begin) * 1e3 for begin, end in itertools.pairwise(self.times[since - 1 :])]


def tiny_windows(windows):
    """Return the microseconds of a whole window of `fit` with a model of 10 parameters."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8192, 4), torch.randint(2, (8192,)))
    stamps = Stamps()
    autoaccum.fit(
        nn.Linear(4, 2),
        DataLoader(data, batch_size=8),
        8,
        optimizer=sgd,
        max_steps=windows + WARM_UP,
        micro_batch=8,
        callbacks=[stamps],
        **ALWAYS,
    )
    return summary([1e3 * one for one in stamps.took_ms(WARM_UP)])


class Beside(autoaccum.Callback):
    """After each update of `fit`, makes and times one with DistributedDataParallel in a hand-written loop."""

    def __init__(self, model, data, target, micro_batch):
        self.took = []
        self.model = nn.parallel.DistributedDataParallel(model) if distributed.get_world_size() > 1 else model
        self._optimizer = sgd(self.model.parameters())
        self._micro_batch = micro_batch
        self._steps = target // distributed.get_world_size() // micro_batch
        sampler = DistributedSampler(data, shuffle=False) if distributed.get_world_size() > 1 else None
        self._loader = DataLoader(data, batch_size=micro_batch, sampler=sampler)
        self._batches = iter(self._loader)
        self._began = None

    def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
        """Make one more update by hand."""
        ended = time.perf_counter()
        distributed.barrier()
        began = time.perf_counter()
        self._update()
        by_hand = time.perf_counter() - began
        if self._began is not None:
            self.took.append((by_hand, ended - self._began))
        distributed.barrier()
        self._began = time.perf_counter()

    def _next(self):
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        return batch

    def _update(self):
        self._optimizer.zero_grad()
        for number in range(self._steps):
            inputs, targets = self._next()
            if number < self._steps - 1 and distributed.get_world_size() > 1:
                with self.model.no_sync():
                    self._backward(inputs, targets)
            else:
                self._backward(inputs, targets)
        self._optimizer.step()

    def _backward(self, inputs, targets):
        (nn.functional.cross_entropy(self.model(inputs), targets) / self._steps).backward()


def updates(options):
    """Time updates of `fit` and of DistributedDataParallel in turn, and their reduction."""
    title, make, make_data, target, micro_batch = MODELS[options.model]
    torch.manual_seed(0)
    model = make().train()
    data = make_data(target * 4)
    beside = Beside(copy.deepcopy(model), data, target, micro_batch)
    autoaccum.fit(
        model,
        DataLoader(data, batch_size=micro_batch),
        target,
        optimizer=sgd,
        max_steps=options.windows + 4,
        micro_batch=micro_batch,
        callbacks=[beside],
        **ALWAYS,
    )
    pairs = beside.took[3:]
    row = {
        "model": options.model,
        "title": title.format(parameters=millions(model)),
        "target": target,
        "micro_batch": micro_batch,
        "by_hand_ms": summary([by_hand * 1e3 for by_hand, _ in pairs]),
        "fit_ms": summary([ours * 1e3 for _, ours in pairs]),
        "ratio": summary([ours / by_hand for by_hand, ours in pairs]),
    }
    if distributed.get_world_size() > 1:
        row["reduction_ms"] = reduction_alone(model, data, micro_batch, max(5, options.windows // 3))
    return row


def reduction_alone(model, data, micro_batch, times):
    """Return the milliseconds of the reduction of the gradients of one micro-batch, without computation."""
    ranks = Ranks(the_host())
    parameters = list(model.parameters())
    buckets = Buckets(parameters)
    inputs, targets = next(iter(DataLoader(data, batch_size=micro_batch)))
    took = []
    for _ in range(times):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        distributed.barrier()
        began = time.perf_counter()
        buckets.exchange([parameter.grad for parameter in parameters], ranks.add_up, factor=0.5)
        took.append((time.perf_counter() - began) * 1e3)
    return summary(took[1:])


class Slower(nn.Module):
    """Waits for each sample, to simulate a slower device."""

    def __init__(self, inner, seconds):
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, inputs):
        """Wait, and run the model."""
        time.sleep(self.seconds * len(inputs))
        return self.inner(inputs)


# By rank: threads, seconds that a sample waits, most samples at once, memory limit.
CASES = {
    "same": ("two ranks alike", [(1, 0.0, 8, None), (1, 0.0, 8, None)]),
    "slower": ("one rank waits 15 ms for each sample", [(1, 0.0, 8, None), (1, 0.015, 8, None)]),
    "threads": ("2 threads and 1, on 2 cores", [(2, 0.0, 8, None), (1, 0.0, 8, None)]),
    "limits": (
        "memory limits of 400 MiB and 48 MiB, largest cut found",
        [(1, 0.0, "auto", "400MiB"), (1, 0.0, "auto", "48MiB")],
    ),
}


def shares(options):
    """Time updates with equal shares and with shares by speed, on ranks that differ."""
    title, by_rank = CASES[options.model]
    threads, wait_s, micro_batch, limit = by_rank[distributed.get_rank()]
    torch.set_num_threads(threads)
    found = {"equal": [], "speed": []}
    cuts = {}
    for turn in range(options.turns):
        for kind in ("equal", "speed") if turn % 2 == 0 else ("speed", "equal"):
            torch.manual_seed(0)
            stamps = Stamps()
            autoaccum.fit(
                Slower(gpt(width=128, layers=4), wait_s),
                DataLoader(texts(256), batch_size=8),
                64,
                optimizer=sgd,
                max_steps=SETTLING + options.windows,
                micro_batch=micro_batch,
                memory_limit=limit,
                shares=kind,
                callbacks=[stamps],
                **ALWAYS,
            )
            found[kind] += stamps.took_ms(SETTLING)
            cuts[kind] = [None] * distributed.get_world_size()
            distributed.all_gather_object(cuts[kind], stamps.last_cut)
    return {
        "case": options.model,
        "title": title,
        "equal_ms": summary(found["equal"]),
        "speed_ms": summary(found["speed"]),
        "ratio": statistics.median(found["speed"]) / statistics.median(found["equal"]),
        "last_cuts": cuts,
    }


def summary(values):
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "quartiles": [ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]],
        "count": len(ordered),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--model", help="a model, or for shares a case")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    row = PARTS[options.part](options)
    if distributed.get_rank() == 0:
        options.out.write_text(json.dumps(row))
    distributed.destroy_process_group()


PARTS = {
    "agreement": agreement,
    "exchange": exchange,
    "updates": updates,
    "shares": shares,
}


if __name__ == "__main__":
    main()
