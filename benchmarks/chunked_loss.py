"""Measures what computing a loss in chunks of tokens costs, by the tokens of a chunk.

A head and its cross entropy run forward and backward, whole, in chunks, and by PyTorch's own `linear_cross_entropy`
(from 2.15 on, with its own choice of chunks, and sums as exact as these), in turn. Prints and writes the median ratio
of their times to that of the whole, with its quartiles.

    python benchmarks/chunked_loss.py [--rounds 7] [--out benchmarks/results/chunked_loss.json]
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from overhead import processor
from torch import nn
from torch.nn import functional

from autoaccum._engine.chunked_logits import logits_of
from autoaccum._engine.replaced_forward import forward_replaced

CHUNKS = (64, 256, 512, 1024, 2048)
TOKENS = 4096
OF_TORCH = "torch's own"
# Classes and width.
HEADS = ((8_000, 256), (32_000, 256))


def in_two(head, hidden, classes):
    """Return the loss as models write it."""
    return functional.cross_entropy(head(hidden), classes)


def of_torch(head, hidden, classes):
    """Return the loss that PyTorch computes in chunks, with the gradients already in the forward pass."""
    options = torch.nn.LinearCrossEntropyOptions(acc_policy="accurate")
    return functional.linear_cross_entropy(hidden, head.weight, classes, options=options)


def seconds(head, hidden, classes, wait, loss=in_two):
    """Return the seconds of one forward and backward pass."""
    started = time.perf_counter()
    loss(head, hidden, classes).backward()
    wait()
    head.zero_grad()
    hidden.grad = None
    return time.perf_counter() - started


def measure(classes, width, rounds, device):
    """Return the ratios of each chunk size to the whole, by round."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.manual_seed(0)
    head = nn.Linear(width, classes, bias=False, device=device)
    hidden = torch.randn(TOKENS, width, device=device, requires_grad=True)
    targets = torch.randint(classes, (TOKENS,), device=device)
    ratios = {size: [] for size in CHUNKS}
    own = {OF_TORCH: []} if hasattr(functional, "linear_cross_entropy") else {}
    seconds(head, hidden, targets, wait)  # warms up
    for _ in range(rounds):
        whole = seconds(head, hidden, targets, wait)
        for size, found in ratios.items():
            with forward_replaced(head, functools.partial(logits_of, print, size, head)):
                found.append(seconds(head, hidden, targets, wait) / whole)
        for found in own.values():
            found.append(seconds(head, hidden, targets, wait, of_torch) / whole)
    return ratios | own


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    results = {}
    for classes, width in HEADS:
        ratios = measure(classes, width, options.rounds, device)
        if not results:
            print("| head | " + " | ".join(map(str, ratios)) + " |")
            print("|---|" + "---|" * len(ratios))
        name = f"{classes:,} classes, width {width}"
        results[name] = {
            size: {"median": statistics.median(found), "quartiles": statistics.quantiles(found, n=4)[::2]}
            for size, found in ratios.items()
        }
        cells = [
            f"{one['median']:.2f} ({one['quartiles'][0]:.2f} to {one['quartiles'][1]:.2f})"
            for one in results[name].values()
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    print(f"\n{machine}, torch {torch.__version__}, Python {platform.python_version()}, {TOKENS} tokens")
    if options.out is not None:
        record = {"machine": machine, "torch": torch.__version__, "tokens": TOKENS, "results": results}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
