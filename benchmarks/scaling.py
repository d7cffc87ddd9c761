"""Measures several ranks: agreement, updates against DistributedDataParallel, shares by speed.

    python benchmarks/scaling.py [--quick] [--only agreement exchange updates shares] [--out FILE]
        [--report-only]

Every row is a separate torchrun job with gloo on this machine, whose ranks run `scaling_rank.py`. Comparisons alternate
within one job: updates window by window (a callback of `fit` makes the update by DistributedDataParallel), shares in
successive calls of `fit`. Results go to one JSON file, in which a repeated part replaces its old results;
the tables between the markers of docs/scaling.md are made from it. `--quick` runs less of everything, and writes
nothing without `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from scaling_rank import CASES, MODELS, PARTS

ROOT = Path(__file__).resolve().parents[1]
RANK = Path(__file__).with_name("scaling_rank.py")
BEGIN, END = "<!-- scaling: begin -->", "<!-- scaling: end -->"
SIZES = (1, 2, 4)


def jobs(part, quick):
    """Yield ranks, model or case, and windows of each job of a part."""
    if part == "agreement":
        yield from ((size, "-", 100 if quick else 500) for size in SIZES[1:])
    elif part == "exchange":
        yield from ((size, "-", 200 if quick else 1000) for size in SIZES[1:])
    elif part == "updates":
        yield from ((size, model, 4 if quick else 16) for model in MODELS for size in SIZES)
    else:
        yield from ((2, case, 6 if quick else 12) for case in CASES)


def run(part, size, model, windows, *, turns):
    """Run one job with torchrun and return the result of its rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        asked = [f"--windows={windows}", f"--model={model}", f"--turns={turns}", f"--out={out}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*torchrun, str(RANK), part, *asked], check=True, env=environment)
        return {"ranks": size, **json.loads(out.read_text())}


def spread(found, digits):
    low, high = found["quartiles"]
    return f"{found['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def exchange_table(rows):
    if not rows:
        return []
    lines = [
        "",
        "| ranks | waited for | to all, 512 B, µs | sum of 16 numbers, µs | ratio | to rank 0 and back | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for wait, how in (("asked", "as `fit` does"), ("native", "in gloo")):
            names = ("all_gather", "all_reduce", "gather_broadcast")
            cells = [spread(row[f"{names[0]}_{wait}_us"], 0)]
            for name in names[1:]:
                cells += [spread(row[f"{name}_{wait}_us"], 0), spread(row[f"{name}_{wait}_ratio"], 2)]
            lines.append(f"| {row['ranks']} | {how} | {' | '.join(cells)} |")
    return lines


def tables(results):
    """Return the tables of docs/scaling.md."""
    lines = []
    if rows := results.get("agreement"):
        lines += [
            "| ranks | first exchange, µs | losses, µs | second exchange, µs | together, µs | window of `fit`, µs |",
            "|---|---|---|---|---|---|",
        ]
        names = ("first_us", "loss_us", "second_us", "all_us", "window_of_fit_us")
        lines += [f"| {row['ranks']} | " + " | ".join(spread(row[name], 0) for name in names) + " |" for row in rows]
    lines += exchange_table(results.get("exchange", ()))
    if rows := results.get("updates"):
        lines += [
            "",
            "| model | ranks | by hand, ms | `fit`, ms | ratio | reduction alone, ms |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            alone = spread(row["reduction_ms"], 0) if "reduction_ms" in row else "-"
            times = [spread(row["by_hand_ms"], 0), spread(row["fit_ms"], 0), spread(row["ratio"], 3), alone]
            lines.append(f"| {row['title']} | {row['ranks']} | {' | '.join(times)} |")
    if rows := results.get("shares"):
        lines += [
            "",
            "| two ranks | equal shares, ms | shares by speed, ms | ratio | last cuts, equal | last cuts, by speed |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            times = f"{spread(row['equal_ms'], 0)} | {spread(row['speed_ms'], 0)} | {row['ratio']:.2f}"
            cuts = [", ".join(map(in_short, row["last_cuts"][kind])) for kind in ("equal", "speed")]
            lines.append(f"| {row['title']} | {times} | {' | '.join(cuts)} |")
    lines += ["", *where(results["machines"])]
    return "\n".join(lines)


def where(machines):
    """Return where each part was measured, grouped by machine."""
    parts = {}
    for part, found in machines.items():
        about = f"{found['cpu']}, {found['cores']} cores shared with other work, torch {found['torch']}"
        parts.setdefault(f"{about}, gloo on loopback", []).append(part)
    return [f"({', '.join(names).capitalize()}: {about}.)" for about, names in parts.items()]


def in_short(cut):
    return f"{sum(cut)} as {len(cut)} x {max(cut)}" if min(cut) == max(cut) else f"{sum(cut)} in {len(cut)}"


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "os": f"{platform.system()} {platform.release()}",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=2, help="turns in which shares are compared")
    parser.add_argument("--report-only", action="store_true", help="write the page from existing results")
    options = parser.parse_args()
    page = None if options.quick else ROOT / "docs/scaling.md"
    out = options.out or (None if options.quick else ROOT / f"benchmarks/results/scaling-{os.cpu_count()}-cores.json")
    results = json.loads(out.read_text()) if out is not None and out.exists() else {}
    for part in () if options.report_only else options.only:
        results[part] = []
        results.setdefault("machines", {})[part] = machine()
        for size, model, windows in jobs(part, options.quick):
            row = run(part, size, model, windows, turns=1 if options.quick else options.turns)
            results[part].append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(results, indent=1) + "\n")
    print(tables(results))
    if page is not None:
        before, rest = page.read_text().split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
