"""Measures the effect of a real limit on the host on a process that repeatedly exceeds it.

For a convolutional net (ResNet-18 at 96 px) and a small GPT, each case in its own process:

* `--failures` training steps of random sizes that do not fit (fewer if the time is up), in three ways to meet the
  limit: `default` (RLIMIT_DATA alone, the allocator as glibc leaves it), `settled` (the host backend, but
  every step starts and fails inside native code) and `asked` (the host backend with `ensure` before each step, by a
  line through two small sizes, so that most are rejected before they start, as in the library);
* then whether the process lives, what memory stays allocated, and whether the largest size found first still fits;
* and the extra time of a step in a settled process over an unsettled one, with two processes in turn.

    python benchmarks/host_limit.py [--failures 300] [--out benchmarks/results/host_limit-NAME.json]

A child that dies is reported with its signal.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoaccum._memory import Host, format_bytes
from autoaccum._oom import first_line, is_oom, let_go
from autoaccum.errors import DeviceLostError

MIB = 2**20
# Small, so that 300 failing steps take minutes: a step fails after it has filled the limit.
LIMIT_BYTES = {"resnet18": 300 * MIB, "gpt": 200 * MIB}
CEILING = {"resnet18": 200, "gpt": 150}
STEP_SIZE = {"resnet18": 24, "gpt": 16}
# Seconds after which a way ends with its failures so far.
MODES = {"default": 40, "settled": 120, "asked": 240}
# The library's margin on a prediction: the line is fitted to resident memory, and the limit counts address space.
MARGIN = 1.05
MARGIN_BYTES = 16 * MIB
EXIT_LOST = 75


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the network."""
        n, t, c = x.shape
        q, k, v = (
            part.view(n, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
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


class Task:
    """A model and one real training step of any size, gradients included."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        if name == "resnet18":
            from torchvision.models import resnet18  # noqa: PLC0415 - only this task needs it

            self.model = resnet18(num_classes=10)
        else:
            self.model = Gpt()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self, size: int) -> None:
        """Forward, backward and update with this many samples."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.name == "resnet18":
            inputs, targets = torch.randn(size, 3, 96, 96), torch.randint(10, (size,))
        else:
            inputs = torch.randint(2000, (size, 128))
            targets = inputs.roll(-1, 1)
        nn.functional.cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()


# --- children -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited_by_default(host: Host, limit_bytes: int):
    """Set RLIMIT_DATA like the host backend, with threads started, but leave the allocator alone."""
    with host.limited(None):
        held = vm_data()
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (held + limit_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def vm_data() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmData in /proc/self/status")


def attempt(task: Task, host: Host, size: int, extra_bytes: int = 0) -> str | None:
    """Make one step; return None if it fits, otherwise the first line of the error."""
    said = None
    started = False
    try:
        host.ensure(extra_bytes)
        started = True
        task.step(size)
    except Exception as exception:
        if not is_oom(exception):
            raise
        said = first_line(exception)
        let_go(exception)
    task.optimizer.zero_grad(set_to_none=True)
    if said is not None and started:
        host.release()
    return said


def fail_child(name: str, mode: str, failures: int, seed: int) -> None:
    task, host = Task(name), Host()
    limit = LIMIT_BYTES[name]
    context = limited_by_default(host, limit) if mode == "default" else host.limited(limit)
    with context:
        peaks = {}
        for size in (4, 16):
            attempt(task, host, size)
            host.release()
            host.reset_peak()
            attempt(task, host, size)
            peaks[size] = host.peak_bytes()
        slope = (peaks[16] - peaks[4]) / 12

        def extra(size: int) -> int:
            if mode != "asked":
                return 0
            now = host.reading().used_bytes
            return int(max(0, peaks[4] + slope * (size - 4)) * MARGIN + MARGIN_BYTES) - now

        host.release()
        # Measured before the search for the largest size, whose failures may also leave memory allocated.
        held_before = vm_data()
        largest, refused = 16, CEILING[name]
        while refused - largest > 1:
            middle = (largest + refused) // 2
            if attempt(task, host, middle, extra(middle)) is None:
                largest = middle
            else:
                refused = middle
        host.release()
        rng = random.Random(seed)  # noqa: S311 - sizes, not secrets
        said: dict[str, int] = {}
        failed = fitted = 0
        began_s = time.monotonic()
        while failed < failures and time.monotonic() - began_s < MODES[mode]:
            # Every 25th step fits, as after a re-plan.
            size = largest // 2 if (failed + fitted) % 25 == 24 else rng.randint(largest + 1, 4 * largest)
            message = attempt(task, host, size, extra(size))
            if message is None:
                fitted += 1
            else:
                failed += 1
                kind = re.sub(r"[\d.]+", "#", message)[:80]
                said[kind] = said.get(kind, 0) + 1
            print(json.dumps({"failed": failed, "fitted": fitted}), flush=True)
        gc.collect()
        host.release()
        left = vm_data() - held_before
        again = attempt(task, host, largest, extra(largest))
        print(
            json.dumps(
                {
                    "failed": failed,
                    "fitted": fitted,
                    "largest": largest,
                    "largest_still_fits": again is None,
                    "left_bytes": left,
                    "left_share": left / limit,
                    "messages": said,
                    "elapsed_s": time.monotonic() - began_s,
                }
            ),
            flush=True,
        )


def time_child(name: str, settled: str) -> None:
    """Answer each line on stdin with the seconds of one step."""
    task, host = Task(name), Host()
    context = host.limited(8 * 2**30) if settled == "settled" else host.limited(None)
    with context:
        for _ in range(3):
            task.step(STEP_SIZE[name])
        print("ready", flush=True)
        for _ in sys.stdin:
            began_s = time.perf_counter()
            task.step(STEP_SIZE[name])
            print(time.perf_counter() - began_s, flush=True)


# --- parent ---------------------------------------------------------------------------------------------------------


def child(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, "--child", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_failures(name: str, mode: str, failures: int, seed: int) -> dict:
    process = child("fail", name, mode, failures, seed)
    out, err = process.communicate()
    last = json.loads(out.strip().splitlines()[-1]) if out.strip() else {}
    code = process.returncode
    ended = (
        "lives"
        if code == 0
        else "oneDNN lost"
        if code == EXIT_LOST
        else signal.Signals(-code).name
        if code < 0
        else f"exit code {code}"
    )
    tail = "" if code == 0 else "\n".join(err.strip().splitlines()[-3:])
    return {"task": name, "mode": mode, "limit_bytes": LIMIT_BYTES[name], "ended": ended, "stderr": tail, **last}


def run_timing(name: str, rounds: int) -> dict:
    """Time steps of both processes in turn and in changing order, so that the machine's drift affects both."""
    processes = {which: child("time", name, which) for which in ("settled", "unsettled")}
    for process in processes.values():
        process.stdout.readline()

    def ask(which: str) -> float:
        processes[which].stdin.write("\n")
        processes[which].stdin.flush()
        return float(processes[which].stdout.readline())

    ratios = []
    for turn in range(rounds):
        order = ("settled", "unsettled") if turn % 2 else ("unsettled", "settled")
        took = {which: ask(which) for which in order}
        ratios.append(took["settled"] / took["unsettled"])
    for process in processes.values():
        process.communicate()
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"task": name, "rounds": rounds, "ratio": middle, "ratio_quartiles": [low, high]}


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def table(results: dict) -> str:
    lines = [
        "| model | limit | way | failures | process | left behind | largest size | still fits | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["failures"]:
        done = "left_bytes" in row
        left = f"{format_bytes(row['left_bytes'])} ({row['left_share']:.1%})" if done else "-"
        lines.append(
            f"| {row['task']} | {format_bytes(row['limit_bytes'])} | {row['mode']} | {row.get('failed', 0)} | "
            f"{row['ended']} | {left} | {row.get('largest', '-')} | "
            f"{('yes' if row['largest_still_fits'] else 'no') if done else '-'} | {row.get('elapsed_s', 0):.0f} |"
        )
    lines += ["", "| model | settled step / unsettled step | quartiles |", "|---|---|---|"]
    for row in results["cost"]:
        low, high = row["ratio_quartiles"]
        lines.append(f"| {row['task']} | {row['ratio']:.3f} | {low:.3f} to {high:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=tuple(MODES), choices=tuple(MODES))
    parser.add_argument("--tasks", nargs="+", default=tuple(LIMIT_BYTES), choices=tuple(LIMIT_BYTES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *rest = arguments.child
        if kind == "fail":
            try:
                fail_child(rest[0], rest[1], int(rest[2]), int(rest[3]))
            except DeviceLostError:
                sys.exit(EXIT_LOST)
        else:
            time_child(*rest)
        return
    results: dict = {
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "glibc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "failures": [],
        "cost": [],
    }
    for name in arguments.tasks:
        for mode in arguments.modes:
            results["failures"].append(run_failures(name, mode, arguments.failures, arguments.seed))
            print(json.dumps(results["failures"][-1]), file=sys.stderr)
        if arguments.rounds:
            results["cost"].append(run_timing(name, arguments.rounds))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
