"""Measures what a memory limit on the host costs, how exactly it is used, and whether training survives a small one.

For the tutorial's model, a convolutional net and a small GPT:

* The CPU time of a step under `memory_limit` over that of the same step without: the median of pairs. Each kind
  has a process of its own; the two answer in turn, in changing order, so that the machine's drift affects both.
* The micro-batches that `fit` finds under a limit, the memory in use with them, and the most resident memory of later
  windows, in which the heap keeps freed blocks.
* How trainings of the convolutional net end under limits that few of its samples fit into.

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
from workloads import MIB, Transformer

import autoaccum
from autoaccum._memory import _linux
from autoaccum._memory.host import Host

# Samples of a micro-batch, of which a timed window has two; of a window of `fit`; and its limit.
TASKS = {"tutorial": (64, 256, 96), "convolutional": (64, 256, 40), "gpt": (8, 64, 160)}
TIMED_LIMIT = "1GiB"  # that timed windows stay well below
SMALL_LIMITS_MIB = (10, 15, 20, 25, 30, 35, 40)
LATER = 6  # windows after those that are measured


def model_and_batch(name: str, samples: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    if name == "gpt":
        tokens = torch.randint(2000, (samples, 128))
        model = Transformer(vocabulary=2000, width=128, layers=2, length=128, dropout=0.0)
        return model, (tokens, tokens.roll(-1, 1))
    first, second, side, pool = (8, 16, 64, 8) if name == "tutorial" else (32, 64, 16, 2)
    layers = [nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.Conv2d(first, second, 3, padding=1), nn.ReLU()]
    layers.append(nn.AvgPool2d(pool))
    if name == "convolutional":
        layers += [nn.Conv2d(second, second, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(second * (side // pool) ** 2, 10))
    return model, (torch.randn(samples, 1, side, side), torch.randint(10, (samples,)))


# --- children -------------------------------------------------------------------------------------------------------


def time_child(name: str, limit: str) -> None:
    """Answer each line on stdin with the seconds of CPU time of one step."""
    size = TASKS[name][0]
    model, batch = model_and_batch(name, 2 * size)
    runner = autoaccum.Runner(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        autoaccum.plan(2 * size, size),
        loss=nn.CrossEntropyLoss(),
        device="cpu",
        memory_limit=None if limit == "none" else limit,
    )
    for _ in range(5):  # windows 1, 2 and 4 are due for all checks
        runner.step(batch)
    print("ready", flush=True)
    for _ in sys.stdin:
        began_s = time.process_time()
        runner.step(batch)
        print(time.process_time() - began_s, flush=True)


class Resident(autoaccum.Callback):
    """Keeps the most resident memory of windows, beside what was resident at the start."""

    def __init__(self) -> None:
        self.start_bytes = self.read()
        self.most_bytes = 0

    def read(self) -> int:
        """Return the peak of resident memory since the last call."""
        high, of_files, shared = _linux.status_bytes("VmHWM", "RssFile", "RssShmem")
        _linux.reset_high_water()
        return high - of_files - shared

    def on_step(self, report: autoaccum.records.StepReport, *, epoch: int) -> None:  # noqa: ARG002 - the interface
        """Take the peak of a window."""
        self.most_bytes = max(self.most_bytes, self.read() - self.start_bytes)


def train_child(name: str, limit_mib: str) -> None:
    """Train until windows are no longer measured; print the sizes and peaks."""
    window = TASKS[name][1]
    model, batch = model_and_batch(name, window)
    with Host().limited(2**30):  # loads code and starts threads, as `fit` does
        pass
    resident = Resident()
    result = autoaccum.fit(
        model,
        [batch] * (8 + LATER),
        window,
        loss=nn.CrossEntropyLoss(),
        device="cpu",
        memory_limit=f"{limit_mib}MiB",
        callbacks=[resident],
        progress=False,
    )
    last = result.history[-1]
    found = {"micro_batches": len(last.micro_batches), "micro_batch": max(last.micro_batches)}
    peak = max(report.peak_bytes or 0 for report in result.history[3:]) / MIB
    more = {"resident_mib": resident.most_bytes / MIB, "oom_events": result.oom_events}
    print(json.dumps(found | {"peak_mib": peak} | more))


# --- parent ---------------------------------------------------------------------------------------------------------


def child(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, "--child", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"AUTOACCUM_CACHE_DIR": "", "OMP_NUM_THREADS": "1"},
    )


def run_timing(name: str, rounds: int) -> dict:
    processes = {limit: child("time", name, limit) for limit in (TIMED_LIMIT, "none")}
    for process in processes.values():
        process.stdout.readline()

    def ask(limit: str) -> float:
        processes[limit].stdin.write("\n")
        processes[limit].stdin.flush()
        return float(processes[limit].stdout.readline())

    ratios = []
    for turn in range(rounds):
        order = (TIMED_LIMIT, "none") if turn % 2 else ("none", TIMED_LIMIT)
        took = {limit: ask(limit) for limit in order}
        ratios.append(took[TIMED_LIMIT] / took["none"])
    for process in processes.values():
        process.communicate()
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"task": name, "rounds": rounds, "ratio": middle, "ratio_quartiles": [low, high]}


def run_training(name: str, limit_mib: int) -> dict:
    process = child("train", name, limit_mib)
    out, err = process.communicate()
    row = {"task": name, "limit_mib": limit_mib}
    if process.returncode == 0:
        return row | {"ended": "trained", **json.loads(out.splitlines()[-1])}
    said = err.strip().splitlines()[-1][:200] if err.strip() else ""
    return row | {"ended": signal.Signals(-process.returncode).name if process.returncode < 0 else said}


def table(results: dict) -> str:
    lines = ["| model | CPU time of a step under a limit / without | quartiles |", "|---|---|---|"]
    for row in results["cost"]:
        low, high = row["ratio_quartiles"]
        lines.append(f"| {row['task']} | {row['ratio']:.3f} | {low:.3f} to {high:.3f} |")
    columns = "model", "limit, MiB", "ended", "micro-batch", "in use, MiB", "resident, MiB", "ran out"
    lines += ["", f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|---|"]
    for row in results["exactness"] + results["trainings"]:
        numbers = [f"{row[key]:.1f}" if key in row else "-" for key in ("peak_mib", "resident_mib")]
        known = row["task"], row["limit_mib"], row["ended"], row.get("micro_batch", "-"), *numbers
        lines.append(f"| {' | '.join(map(str, (*known, row.get('oom_events', '-'))))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *rest = arguments.child
        {"time": time_child, "train": train_child}[kind](*rest)
        return
    results = {
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "glibc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "cost": [run_timing(name, arguments.rounds) for name in arguments.tasks],
        "exactness": [run_training(name, TASKS[name][2]) for name in arguments.tasks],
        "trainings": [run_training("convolutional", limit_mib) for limit_mib in SMALL_LIMITS_MIB],
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
