"""Measures what computing a loss in chunks of tokens costs, by the tokens of a chunk.

A head and its cross entropy run forward and backward, whole and in chunks, in turn. Prints and writes the
median ratio of their times to that of the whole, with its quartiles.

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
# Classes and width.
HEADS = ((8_000, 256), (32_000, 256))


def seconds(head, hidden, classes, wait):
    """Return the seconds of one forward and backward pass."""
    started = time.perf_counter()
    functional.cross_entropy(head(hidden), classes).backward()
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
    seconds(head, hidden, targets, wait)  # warms up
    for _ in range(rounds):
        whole = seconds(head, hidden, targets, wait)
        for size, found in ratios.items():
            with forward_replaced(head, functools.partial(logits_of, print, size, head)):
                found.append(seconds(head, hidden, targets, wait) / whole)
    return ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    print("| head | " + " | ".join(f"{size} tokens" for size in CHUNKS) + " |")
    print("|---|" + "---|" * len(CHUNKS))
    results = {}
    for classes, width in HEADS:
        ratios = measure(classes, width, options.rounds, device)
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
