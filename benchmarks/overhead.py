"""Measures what `Runner` and `Accumulator` add to a loop written by hand: one large batch in micro-batches, with SGD.

All train the same networks (few or many parameter tensors, or many BatchNorms) on the same windows, in turn in one
process, so that a slow moment of the machine affects all. Prints and writes the median ratio of a window's time with
its quartiles, and the microseconds that each adds to a micro-batch. On a GPU `gpu.py` measures the same.

    python benchmarks/overhead.py [--windows 400] [--micro-batches 1 4 16] [--out benchmarks/results/overhead.json]

Windows of 1 and of 16 micro-batches tell what belongs to a window from what belongs to each micro-batch.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
from pathlib import Path

import torch
from measuring import in_turn, processor, quartiles, spread
from torch import nn

import autoaccum

MICRO_BATCHES = 4
# Hidden layers, their width, whether each has a BatchNorm, and samples per micro-batch. Those of 6 tensors are chosen
# so that a micro-batch takes about 0.1, 1 and 10 ms on one core.
MODELS = {
    "6 tensors, 0.1 ms": (1, 16, False, 8),
    "6 tensors, 1 ms": (1, 256, False, 96),
    "6 tensors, 10 ms": (1, 1024, False, 144),
    "150 tensors": (73, 64, False, 32),
    "1,000 tensors": (498, 16, False, 8),
    "25 BatchNorms": (25, 64, True, 32),
}
LONG = ("6 tensors, 10 ms", "1,000 tensors")  # of which a tenth of the windows is tried


def network(layers, width, normalises=False, features=64, classes=10):
    hidden = []
    for _ in range(layers):
        hidden += [nn.Linear(width, width), *([nn.BatchNorm1d(width)] if normalises else []), nn.ReLU()]
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), *hidden, nn.Linear(width, classes))


def loops(model, batch, samples, device="cpu"):
    """Return `Runner`, `Accumulator` and the loop by hand, each a function that trains a copy on one window."""
    loss, (inputs, targets) = nn.CrossEntropyLoss(), batch
    models = [copy.deepcopy(model).to(device) for _ in range(3)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-4) for one in models]
    options = {"loss": loss, "device": device, "precision": "fp32"}
    runner = autoaccum.Runner(models[0], optimizers[0], autoaccum.plan(len(targets), samples), **options)
    accumulator = autoaccum.Accumulator(models[1], micro_batch=samples, **options)

    def accumulate():
        optimizers[1].zero_grad()
        accumulator.backward(batch)
        optimizers[1].step()

    def by_hand():
        optimizers[2].zero_grad()
        for start in range(0, len(targets), samples):
            part = slice(start, start + samples)
            outputs = models[2](inputs[part].to(device, non_blocking=True))
            (loss(outputs, targets[part].to(device, non_blocking=True)) * samples / len(targets)).backward()
        optimizers[2].step()

    return {"Runner": lambda: runner.step(batch), "Accumulator": accumulate, "by hand": by_hand}


def compared(times, ours, micro_batches):
    """Return milliseconds of a micro-batch by hand, the ratio, and the microseconds that ours adds, of each round."""
    pairs = list(zip(times[ours], times["by hand"], strict=True))
    return {
        "by_hand_ms": [1e3 * hand / micro_batches for _, hand in pairs],
        "ratio": [one / hand for one, hand in pairs],
        "added_us": [1e6 * (one - hand) / micro_batches for one, hand in pairs],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[MICRO_BATCHES], help="in a window")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)  # small operators on several threads measure the threads
    results = {}
    print("| | model | micro-batches | by hand, ms | ratio (quartiles) | added, µs a micro-batch (quartiles) |")
    print("|---|---|---|---|---|---|")
    for (name, (*model, samples)), micro_batches in itertools.product(MODELS.items(), options.micro_batches):
        windows = max(40, options.windows * MICRO_BATCHES // micro_batches // (10 if name in LONG else 1))
        torch.manual_seed(0)
        batch = torch.randn(micro_batches * samples, 64), torch.randint(0, 10, (micro_batches * samples,))
        times = in_turn(loops(network(*model), batch, samples), windows, warm_up=windows // 10)
        for ours in ("Runner", "Accumulator"):
            found = compared(times, ours, micro_batches)
            results[f"{ours}, {name}, {micro_batches}"] = {key: quartiles(values) for key, values in found.items()}
            ratio, added = spread(found["ratio"], digits=3), spread(found["added_us"], digits=1)
            by_hand = quartiles(found["by_hand_ms"])[1]
            print(f"| {ours} | {name} | {micro_batches} | {by_hand:.3f} | {ratio} | {added} |")
    record = {"machine": f"{processor()}, 1 thread", "torch": torch.__version__, "python": platform.python_version()}
    print(f"\n{record['machine']}, torch {record['torch']}, Python {record['python']}")
    if options.out is not None:
        options.out.write_text(json.dumps(record | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
