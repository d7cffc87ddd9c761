"""Measures how near the clock of three plans (`_sizing/autotune.py`) comes to the fastest micro-batch size.

Searches run on real windows, with `--beside` another one in turn, such as that of before. Then the sizes that were
chosen and those of even cuts are run in turn. Seconds are of the processor, one thread, so that other work disturbs
little. Prints for each model what each search chose, after how many windows, and its speed against the best.

    git show e15037d^:autoaccum/_sizing/autotune.py > /tmp/before.py
    python benchmarks/clock.py [--beside /tmp/before.py]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time

import torch
from noise_scale import gpt, perceptron, resnet
from torch.nn import functional
from torch.utils._pytree import tree_map

from autoaccum._sizing.autotune import Autotune

# Name, what makes model and windows, windows joined to one.
MODELS = (("perceptron", perceptron, 4), ("ResNet-18 at 64 px", resnet, 1), ("GPT-2, 4 layers", gpt, 1))
SEARCHES = 4
ROUNDS = 9


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", help="a file with another class Autotune")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    searches = {"three plans": Autotune}
    if arguments.beside:
        found = importlib.util.spec_from_file_location("before", arguments.beside)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        searches["before"] = module.Autotune
    for name, make, joined in MODELS:
        compare(name, searches, *training(make, joined))


def training(make, joined):
    """Return what makes an update in micro-batches of a size and returns its seconds, and the samples of one."""
    torch.manual_seed(0)
    model, window = make()
    windows = [window() for _ in range(joined)]
    whole = tree_map(lambda *parts: torch.cat(parts), *windows)
    inputs, targets = whole if isinstance(whole, tuple) else (whole["input_ids"], whole["labels"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(some, their):
        if isinstance(whole, dict):
            return model(input_ids=some, labels=their).loss
        return functional.cross_entropy(model(some), their)

    def update(size):
        start = time.process_time()
        for some, their in zip(inputs.split(size), targets.split(size), strict=True):
            (loss(some, their) * len(some) / len(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    return update, len(inputs)


def compare(name, searches, update, samples):
    update(samples)
    chosen, taken = {kind: [] for kind in searches}, {kind: [] for kind in searches}
    for _ in range(SEARCHES):
        for kind, search in searches.items():
            tried = search(samples, samples)
            count = 0
            while not tried.is_settled:
                tried.note(update(tried.size))
                count += 1
            chosen[kind].append(tried.size)
            taken[kind].append(count)
    even = {-(-samples // 2**halved) for halved in range(samples.bit_length())}
    sizes = sorted(even.union(*chosen.values()))
    times = {size: [] for size in sizes}
    for _ in range(ROUNDS):
        for size in sizes:
            times[size].append(update(size))
    typical = {size: statistics.median(times[size]) for size in sizes}
    best = min(typical, key=typical.get)
    print(f"{name}: {samples} samples; fastest {best} ({1 / typical[best]:.2f} updates a second)")
    print("  " + ", ".join(f"{size}: {typical[best] / typical[size]:.3f}" for size in sizes))
    for kind, sizes_chosen in chosen.items():
        speeds = [typical[best] / typical[size] for size in sizes_chosen]
        print(
            f"  {kind}: chose {sizes_chosen} after {statistics.median(taken[kind]):.0f} windows, speed "
            f"{statistics.median(speeds):.3f} (least {min(speeds):.3f}) of the best",
            flush=True,
        )


if __name__ == "__main__":
    main()
