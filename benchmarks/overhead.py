"""Measures the runner's overhead over the hand-written loop of document 002: one large batch, sliced into sub-batches.

The accumulator is measured with it, in a loop with an optimizer of its own. All train the same networks (few or many
parameter tensors, or many BatchNorms, all with SGD) on the same windows, window by window in turn in one process, so
that a slow moment of the machine affects all. Prints and writes the median ratio of a window's time with its quartiles,
and the microseconds that each adds to a micro-step.

    python benchmarks/overhead.py [--windows 400] [--micro-batches 1 4 16] [--out benchmarks/results/overhead.json]

Windows of 1 and of 16 micro-batches tell what belongs to a window from what belongs to each micro-batch. On a GPU
`gpu.py` measures the overhead.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import autoaccum
from autoaccum._system.notices import Notices

MICRO_BATCHES = 4  # the documents' number of accumulation steps
# Hidden layers, their width, whether each has a BatchNorm, and samples per micro-batch. Those of 6 tensors are chosen
# so that a micro-step takes about 0.1, 1 and 10 ms on one core.
MODELS = {
    "6 tensors, 0.1 ms": (1, 16, False, 8),
    "6 tensors, 1 ms": (1, 256, False, 96),
    "6 tensors, 10 ms": (1, 1024, False, 144),
    "150 tensors": (73, 64, False, 32),
    "25 BatchNorms": (25, 64, True, 32),
}


def network(layers, width, normalises=False):
    hidden = []
    for _ in range(layers):
        hidden += [nn.Linear(width, width), *([nn.BatchNorm1d(width)] if normalises else []), nn.ReLU()]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def hand_written(model, criterion, optimizer, images, target, sub_batch_size):
    """Document 002's preferred form, with its mean corrected and transfers as written there."""
    micro_batches = len(images) // sub_batch_size
    optimizer.zero_grad()
    for step in range(micro_batches):
        part = slice(step * sub_batch_size, (step + 1) * sub_batch_size)
        outputs = model(images[part].to("cpu", non_blocking=True))
        loss = criterion(outputs, target[part].to("cpu", non_blocking=True))
        loss = loss / micro_batches
        loss.backward()
    optimizer.step()


def measure(model, sub_batch_size, micro_batches, windows):
    torch.manual_seed(0)
    by_hand = network(*model)
    ours, accumulated = copy.deepcopy(by_hand), copy.deepcopy(by_hand)
    criterion = nn.CrossEntropyLoss()
    samples = micro_batches * sub_batch_size
    images, target = torch.randn(samples, 64), torch.randint(0, 10, (samples,))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=1e-3)
    optimizer_of_accumulated = torch.optim.SGD(accumulated.parameters(), lr=1e-3)
    settings = {"loss": criterion, "device": "cpu", "precision": "fp32", "notices": Notices(silent=True)}
    plan = autoaccum.plan(samples, sub_batch_size)
    runner = autoaccum.Runner(ours, torch.optim.SGD(ours.parameters(), lr=1e-3), plan, **settings)
    accumulator = autoaccum.Accumulator(accumulated, micro_batch=sub_batch_size, **settings)

    def step_accumulated():
        optimizer_of_accumulated.zero_grad()
        accumulator.backward((images, target))
        optimizer_of_accumulated.step()

    def timed(function):
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    loops = [
        lambda: hand_written(by_hand, criterion, optimizer, images, target, sub_batch_size),
        lambda: runner.step((images, target)),
        step_accumulated,
    ]
    times = []
    for window in range(windows + windows // 10):
        first = window % len(loops)
        took = {which: timed(loops[which]) for which in (*range(first, len(loops)), *range(first))}
        if window >= windows // 10:  # the first tenth warms up
            times.append([took[which] for which in range(len(loops))])
    return times


def summary(times, which, micro_batches):
    """Of one of ours, by the number of its loop."""
    ratios = sorted(took[which] / took[0] for took in times)
    added = sorted((took[which] - took[0]) / micro_batches * 1e6 for took in times)
    return {
        "hand_written_ms_per_micro_step": statistics.median(took[0] for took in times) / micro_batches * 1e3,
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "added_us_per_micro_step_median": statistics.median(added),
        "added_us_per_micro_step_quartiles": [added[len(added) // 4], added[3 * len(added) // 4]],
    }


def processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[MICRO_BATCHES], help="in a window")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small operators on several threads measure the threads
    results = {}
    print("| | model | micro-batches | hand-written, ms | ratio (quartiles) | added, µs a micro-step (quartiles) |")
    print("|---|---|---|---|---|---|")
    for (name, (*model, sub_batch_size)), micro_batches in itertools.product(MODELS.items(), options.micro_batches):
        windows = max(40, options.windows * MICRO_BATCHES // micro_batches // (10 if name.endswith("10 ms") else 1))
        times = measure(model, sub_batch_size, micro_batches, windows)
        for which, loop in enumerate(("Runner", "Accumulator"), 1):
            found = results[f"{loop}, {name}, {micro_batches}"] = summary(times, which, micro_batches)
            low, high = found["ratio_quartiles"]
            added_low, added_high = found["added_us_per_micro_step_quartiles"]
            print(
                f"| {loop} | {name} | {micro_batches} | {found['hand_written_ms_per_micro_step']:.3f} "
                f"| {found['ratio_median']:.3f} ({low:.3f} to {high:.3f}) "
                f"| {found['added_us_per_micro_step_median']:.1f} ({added_low:.1f} to {added_high:.1f}) |"
            )
    machine = f"{processor()}, 1 thread"
    python = platform.python_version()
    print(f"\n{machine}, torch {torch.__version__}, Python {python}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine, "torch": torch.__version__, "python": python, "results": results}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
