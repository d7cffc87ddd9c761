"""Times steps of `fit` on several ranks against DistributedDataParallel in a loop by hand.

    python benchmarks/scaling.py [--models gpt conv] [--jobs 4] [--windows 8] [--sizes 1 2 4] [--out FILE]

Each row is of several torchrun jobs of this file with gloo on this machine, a thread a rank: where its tensors lie
makes one process of a convolutional net half as fast again as the next. The steps take turns window by
window in the same processes: after each of `fit`, a callback makes one by hand, with `no_sync` in all micro-batches but
the last, a DistributedSampler and the same micro-batches; with one rank, the loop alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measuring import machine, quartiles, told
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from workloads import Transformer

import autoaccum

VOCABULARY, LENGTH = 2000, 32
WARM_UP = 3


def gpt():
    return Transformer(vocabulary=VOCABULARY, width=256, layers=6, length=LENGTH)


def convolutional():
    """Six convolutions with BatchNorm, for 32 x 32 images."""
    layers, channels = [], 3
    for width, stride in ((64, 2), (128, 2), (256, 2), (512, 1), (512, 1), (512, 1)):
        layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def texts(samples):
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def images(samples):
    return TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,)))


# Title, model, data, target batch, micro-batch.
MODELS = {
    "gpt": ("GPT, 5.8 M parameters", gpt, texts, 16, 2),
    "conv": ("convolutional net with BatchNorm, 6.3 M parameters", convolutional, images, 32, 4),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


class ByHand(autoaccum.Callback):
    """After each step of `fit`, makes and times one with DistributedDataParallel."""

    def __init__(self, model, data, target, micro_batch):
        self.took = []
        ranks = distributed.get_world_size()
        self._model = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
        self._optimizer = sgd(self._model.parameters())
        self._steps = target // ranks // micro_batch
        sampler = DistributedSampler(data, shuffle=False) if ranks > 1 else None
        self._loader = DataLoader(data, batch_size=micro_batch, sampler=sampler)
        self._batches = iter(self._loader)
        self._began = None

    def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
        """Make one more step by hand."""
        ended = time.perf_counter()
        distributed.barrier()
        began = time.perf_counter()
        self._step()
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

    def _step(self):
        self._optimizer.zero_grad()
        for number in range(1, self._steps + 1):
            inputs, targets = self._next()
            if number < self._steps and distributed.get_world_size() > 1:
                with self._model.no_sync():
                    self._backward(inputs, targets)
            else:
                self._backward(inputs, targets)
        self._optimizer.step()

    def _backward(self, inputs, targets):
        (nn.functional.cross_entropy(self._model(inputs), targets) / self._steps).backward()


def measure(name, windows):
    """Return the seconds that pairs of steps of one model took on this rank, by hand and in `fit`."""
    _, make, make_data, target, micro_batch = MODELS[name]
    torch.manual_seed(0)
    model, data = make().train(), make_data(target * 4)
    by_hand = ByHand(copy.deepcopy(model), data, target, micro_batch)
    autoaccum.fit(
        model,
        DataLoader(data, batch_size=micro_batch),
        target,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        max_steps=windows + WARM_UP + 1,
        micro_batch=micro_batch,
        callbacks=[by_hand],
        shard_data=True,
        progress=False,
        device="cpu",
        precision="fp32",
    )
    return by_hand.took[WARM_UP:]


def run(name, size, jobs, windows):
    """Run jobs with torchrun, one after the other, and return the row of their rank 0."""
    pairs = []
    for _ in range(jobs):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "pairs.json"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            command = [*torchrun, __file__, "--job", name, f"--windows={windows}", f"--out={out}"]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            pairs += json.loads(out.read_text())
    return {
        "title": MODELS[name][0],
        "ranks": size,
        "by_hand_ms": quartiles([hand * 1e3 for hand, _ in pairs]),
        "fit_ms": quartiles([ours * 1e3 for _, ours in pairs]),
        "ratio": quartiles([ours / hand for hand, ours in pairs]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=tuple(MODELS), nargs="+", default=list(MODELS))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/scaling.json")
    parser.add_argument("--job", choices=tuple(MODELS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        torch.set_num_threads(1)
        distributed.init_process_group("gloo")
        pairs = measure(options.job, options.windows)
        if distributed.get_rank() == 0:
            options.out.write_text(json.dumps(pairs))
        distributed.destroy_process_group()
        return
    rows = [run(name, size, options.jobs, options.windows) for name in options.models for size in options.sizes]
    options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print("| model | ranks | by hand, ms | `fit`, ms | ratio |", "|---|---|---|---|---|", sep="\n")
    for row in rows:
        print(f"| {row['title']} | {row['ranks']} | {told(row['by_hand_ms'], digits=0)} | "
              f"{told(row['fit_ms'], digits=0)} | {told(row['ratio'], digits=3)} |")  # fmt: skip


if __name__ == "__main__":
    main()
