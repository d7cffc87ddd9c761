"""Measures what a memory limit on the host costs, and whether training survives one.

* The time of an update under `memory_limit` over that of the same update without, for a convolutional net, ResNet-18 at
  96 px and a small GPT: the median of pairs. Each kind has a process of its own; the two answer in turn, in changing
  order, so that the machine's drift affects both.
* How trainings of the convolutional net end under limits that few of its samples fit into, each in a process of its
  own, and how far their windows were above the limit.

    python benchmarks/host_limit.py [--rounds 40] [--out benchmarks/results/host_limit-NAME.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import autoaccum

MIB = 2**20
TASKS = ("convolutional", "resnet18", "gpt")
# Samples of a micro-batch, of which a window has two, and a limit that they stay well below.
SIZES = {"convolutional": 64, "resnet18": 16, "gpt": 8}
LIMIT_BYTES = 4096 * MIB
SMALL_LIMITS_MIB = (10, 15, 20, 25, 30, 35, 40)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        n, t, c = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(n, t, self.heads, c // self.heads).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A small GPT: 2 layers of width 128 over 128 tokens."""

    def __init__(self, vocabulary: int = 2000, width: int = 128, layers: int = 2, length: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the network."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


def model_and_batch(name: str, samples: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    if name == "gpt":
        tokens = torch.randint(2000, (samples, 128))
        return Gpt(), (tokens, tokens.roll(-1, 1))
    targets = torch.randint(10, (samples,))
    if name == "resnet18":
        from torchvision.models import resnet18  # noqa: PLC0415 - only this task needs it

        return resnet18(num_classes=10), (torch.randn(samples, 3, 96, 96), targets)
    body = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    model = nn.Sequential(*body, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 10))
    return model, (torch.randn(samples, 1, 16, 16), targets)


# --- children -------------------------------------------------------------------------------------------------------


def time_child(name: str, limit_bytes: str) -> None:
    """Answer each line on stdin with the seconds of one update."""
    size = SIZES[name]
    model, batch = model_and_batch(name, 2 * size)
    runner = autoaccum.Runner(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        autoaccum.plan(2 * size, size),
        loss=nn.CrossEntropyLoss(),
        device="cpu",
        memory_limit=int(limit_bytes) or None,
    )
    for _ in range(5):  # windows 1, 2 and 4 take the careful path
        runner.step(batch)
    print("ready", flush=True)
    for _ in sys.stdin:
        began_s = time.perf_counter()
        runner.step(batch)
        print(time.perf_counter() - began_s, flush=True)


def train_child(limit_mib: str) -> None:
    """Train the convolutional net for 8 windows of 256; print the sizes and peaks of the last."""
    model, batch = model_and_batch("convolutional", 256)
    options = {"loss": nn.CrossEntropyLoss(), "device": "cpu", "memory_limit": f"{limit_mib}MiB", "progress": False}
    result = autoaccum.fit(model, [batch] * 8, 256, **options)
    last = result.history[-1]
    peak = (last.peak_bytes or 0) / MIB
    print(json.dumps({"micro_batch": max(last.micro_batches), "peak_mib": peak, "oom_events": result.oom_events}))


# --- parent ---------------------------------------------------------------------------------------------------------


def child(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, "--child", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"AUTOACCUM_CACHE_DIR": ""},
    )


def run_timing(name: str, rounds: int) -> dict:
    processes = {which: child("time", name, limit) for which, limit in (("limited", LIMIT_BYTES), ("free", 0))}
    for process in processes.values():
        process.stdout.readline()

    def ask(which: str) -> float:
        processes[which].stdin.write("\n")
        processes[which].stdin.flush()
        return float(processes[which].stdout.readline())

    ratios = []
    for turn in range(rounds):
        order = ("limited", "free") if turn % 2 else ("free", "limited")
        took = {which: ask(which) for which in order}
        ratios.append(took["limited"] / took["free"])
    for process in processes.values():
        process.communicate()
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"task": name, "rounds": rounds, "ratio": middle, "ratio_quartiles": [low, high]}


def run_training(limit_mib: int) -> dict:
    process = child("train", limit_mib)
    out, err = process.communicate()
    if process.returncode == 0:
        return {"limit_mib": limit_mib, "ended": "trained", **json.loads(out.splitlines()[-1])}
    said = err.strip().splitlines()[-1][:200] if err.strip() else ""
    ended = signal.Signals(-process.returncode).name if process.returncode < 0 else said
    return {"limit_mib": limit_mib, "ended": ended}


def table(results: dict) -> str:
    lines = ["| model | update under a limit / without | quartiles |", "|---|---|---|"]
    for row in results["cost"]:
        low, high = row["ratio_quartiles"]
        lines.append(f"| {row['task']} | {row['ratio']:.3f} | {low:.3f} to {high:.3f} |")
    lines += ["", "| limit, MiB | ended | micro-batch | peak, MiB | ran out |", "|---|---|---|---|---|"]
    for row in results["trainings"]:
        peak = f"{row['peak_mib']:.1f}" if "peak_mib" in row else "-"
        more = row.get("micro_batch", "-"), peak, row.get("oom_events", "-")
        lines.append(f"| {row['limit_mib']} | {row['ended']} | {' | '.join(map(str, more))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *rest = arguments.child
        (time_child if kind == "time" else train_child)(*rest)
        return
    results = {
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "glibc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "cost": [run_timing(name, arguments.rounds) for name in arguments.tasks],
        "trainings": [run_training(limit_mib) for limit_mib in SMALL_LIMITS_MIB],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
