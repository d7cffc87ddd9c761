"""Times an estimate for all sizes of ResNet-101 in fresh processes: the first call and later ones.

    python benchmarks/estimate_speed.py [--rounds 5] [--out FILE]

The CPU's kernels in fp32 and a card's in bf16 alternate, each in its own process. A call makes the model on the meta
device and traces its step at the sizes from 1 to 64 that `estimate_step` chooses. A cost that every training pays once
is reported separately: PyTorch imports its compiler when the first optimizer (or fake tensor) is made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import machine

KINDS = ("cpu", "cuda")
LATER = 3
GOAL_S = 2.0
PARTS = ("imports_s", "first_s", "later_s")


def child(kind):
    """Measure in this fresh process."""
    import torch  # noqa: PLC0415 - not of the parent

    from autoaccum._estimate.estimate import estimate_step  # noqa: PLC0415
    from autoaccum._estimate.gpus import card_named  # noqa: PLC0415

    began_s = time.perf_counter()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    imports_s = time.perf_counter() - began_s
    from torchvision.models import resnet101  # noqa: PLC0415 - it imports the compiler too

    batch = torch.randn(4, 3, 224, 224), torch.randint(1000, (4,))
    card, precision = (card_named("h100-80gb"), "bf16") if kind == "cuda" else (None, "fp32")
    calls_s = []
    for _ in range(1 + LATER):
        began_s = time.perf_counter()
        estimate_step(resnet101, batch, card=card, precision=precision, most=64)
        calls_s.append(time.perf_counter() - began_s)
    print(json.dumps({"imports_s": imports_s, "first_s": calls_s[0], "later_s": statistics.median(calls_s[1:])}))


def measured(kind):
    done = subprocess.run(
        [sys.executable, __file__, "--child", kind], capture_output=True, text=True, check=True, timeout=600
    )
    return json.loads(done.stdout.splitlines()[-1])


def markdown(rows):
    lines = ["| kernels | | median s | least | most |", "|---|---|---|---|---|"]
    for kind, runs in rows.items():
        for part in PARTS:
            seconds = [run[part] for run in runs]
            name = {"imports_s": "PyTorch's imports", "first_s": "first call", "later_s": "later calls"}[part]
            lines.append(
                f"| {kind} | {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |"
            )
    firsts = [statistics.median(run["first_s"] for run in runs) for runs in rows.values()]
    lines.append(f"\nGoal: {GOAL_S:.0f} s a call; {'met' if max(firsts) < GOAL_S else 'not met'} by the first calls.")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.child)
        return
    rows = {kind: [] for kind in KINDS}
    for number in range(options.rounds):
        for kind in KINDS:
            run = measured(kind)
            rows[kind].append(run)
            told = ", ".join(f"{part.removesuffix('_s')} {run[part]:.2f}" for part in PARTS)
            print(f"{number + 1} {kind}: {told}", file=sys.stderr, flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
