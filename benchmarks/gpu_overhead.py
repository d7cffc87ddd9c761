"""Part of gpu.py: the runner's overhead over a hand-written loop, and whether transfers overlap with computation.

First it runs benchmarks/overhead.py. Then it times windows whose transfer takes a large part of their computation: from
pinned host memory through the runner, through a hand-written loop with non_blocking, through one that blocks, and with
the data already on the device, which equals a perfect overlap.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from gpu_common import MIB, ROOT, child_environment, in_turn, quartiles, run_part, settle, spread
from torch import nn

import autoaccum
from autoaccum._system.notices import Notices

_MICRO_BATCHES = 8


def overhead(findings, options):
    """Measure both."""
    transfer(findings, options)
    beside_by_hand(findings, options)


def beside_by_hand(findings, options):
    """Run overhead.py and read its file."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "overhead.json"
        windows = 40 if options.tiny else 300
        command = [sys.executable, str(ROOT / "benchmarks" / "overhead.py"), "--windows", str(windows)]
        command += ["--device", options.device, "--out", str(out)]
        try:
            done = subprocess.run(
                command,
                env=child_environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=max(5.0, findings.left_s() - 1),
            )
        except subprocess.TimeoutExpired:
            findings.add("overhead.py", "it took too long")
            return
        if done.returncode or not out.exists():
            findings.add("overhead.py", f"ended with {done.returncode}: {done.stderr[-400:]}", ok=False)
            return
        record = json.loads(out.read_text())
        for name, found in record["results"].items():
            low, high = found["ratio_quartiles"]
            said = (
                f"{found['hand_written_ms_per_micro_step']:.3f} ms a micro-step by hand, ratio "
                f"{found['ratio_median']:.3f} ({low:.3f} to {high:.3f})"
            )
            added = found.get("added_us_per_micro_step_median")
            said += "" if added is None else f", {added:.1f} microseconds added a micro-step"
            findings.add(f"{name} beside by hand, on one core", said, **found)


def light(side):
    """Patches and a few layers: little computation for the size of its images."""
    return nn.Sequential(
        nn.Conv2d(3, 256, 16, stride=16), nn.GELU(), nn.Conv2d(256, 256, 1), nn.Flatten(2), _Mean(), nn.Linear(256, 10)
    ), (3, side, side)


class _Mean(nn.Module):
    def forward(self, x):
        return x.mean(-1)


def heavy(side):
    """Convolutions at full size: computation takes far longer than the transfer."""
    layers = [nn.Conv2d(3, 64, 7, stride=2), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(2), _Mean(), nn.Linear(64, 10)), (3, side, side)


def transfer(findings, options):
    """Time windows from pinned host memory, alternating with those already on the device."""
    device = torch.device(options.device)
    side, samples, rounds = (32, 4, 3) if options.tiny else (224, 64, 12)
    for name, make in (("little computing", light), ("much computing", heavy)):
        torch.manual_seed(0)
        model, shape = make(side)
        images = torch.randn(_MICRO_BATCHES * samples, *shape)
        targets = torch.randint(10, (_MICRO_BATCHES * samples,))
        pageable = images, targets
        host = tuple(part.pin_memory() for part in pageable) if device.type == "cuda" else pageable
        there = tuple(part.to(device) for part in host)
        model = model.to(device)
        functions = {
            "runner, pinned": _with_runner(copy.deepcopy(model), host, device),
            "runner, pageable": _with_runner(copy.deepcopy(model), pageable, device),
            "runner, data there": _with_runner(copy.deepcopy(model), there, device),
            "by hand, non_blocking": _by_hand(copy.deepcopy(model), host, device, non_blocking=True),
            "by hand, pageable": _by_hand(copy.deepcopy(model), pageable, device, non_blocking=False),
            "by hand, data there": _by_hand(copy.deepcopy(model), there, device, non_blocking=True),
        }
        times = in_turn(device, functions, rounds, warm_up=3, left_s=lambda: findings.left_s() - 20)
        pure = quartiles(times["by hand, data there"])[1]
        size_mib = sum(part.nbytes for part in pageable) / MIB
        for way, took in times.items():
            median = quartiles(took)[1]
            ok = None
            if way == "runner, pinned" and device.type == "cuda":
                # The promise is not to be slower than the usual loop.
                ok = median <= 1.1 * quartiles(times["by hand, non_blocking"])[1]
            findings.add(
                f"{name}, {size_mib:.0f} MiB a window: {way}",
                f"{spread([t * 1e3 for t in took], ' ms')}; {median / pure:.2f} of computing alone",
                ok=ok,
                seconds=took,
            )
        del functions, there, model
        settle(device)


def _with_runner(model, window, device):
    samples = len(window[1])
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        autoaccum.plan(samples, samples // _MICRO_BATCHES),
        loss=nn.CrossEntropyLoss(),
        device=device,
        precision="fp32",
        notices=Notices(silent=True),
    )
    return lambda: runner.step(window)


def _by_hand(model, window, device, *, non_blocking):
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-4)
    images, targets = window
    size = len(targets) // _MICRO_BATCHES

    def update():
        optimizer.zero_grad()
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            outputs = model(images[part].to(device, non_blocking=non_blocking))
            loss = criterion(outputs, targets[part].to(device, non_blocking=non_blocking))
            (loss / _MICRO_BATCHES).backward()
        optimizer.step()

    return update


if __name__ == "__main__":
    run_part(overhead, __doc__)
