"""Compares autoaccum with its peers in one run: answers of finders, speed of training, time to the first update.

    python benchmarks/bench.py [--quick] [--only finders throughput first-update] [--workloads gpt mlp]

`finders.py`, `throughput.py` and `first_update.py` describe what is measured. Results go to one JSON file, in which a
repeated part replaces its old results; the tables between the markers of docs/benchmarks.md and README.md are made
from it. `--quick` runs less of everything, and writes nothing without `--out`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

import finders
import first_update
import isolated
import psutil
import throughput
from workloads import WORKLOADS

import report

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("finders", "throughput", "first-update")
# The workloads whose training is timed; the others would add little.
THREE = ("resnet18", "gpt", "encoder")
DISTRIBUTIONS = ("autoaccum", "torch", "torchvision", "lightning", "accelerate")


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {"Python": platform.python_version(), "glibc": platform.libc_ver()[1]}
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "os": f"{platform.system()} {platform.release()}",
        "load": os.getloadavg()[0],
        "versions": versions | {name: importlib.metadata.version(name) for name in DISTRIBUTIONS},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two workloads, one turn, few windows")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS))
    parser.add_argument("--finders", nargs="+", choices=tuple(finders.FINDERS), default=tuple(finders.FINDERS))
    parser.add_argument("--repeats", type=int, default=3, help="turns in which the seconds of finders are compared")
    parser.add_argument(
        "--peers",
        choices=("plain", "settled"),
        default="settled",
        help="the allocator of the other finders: glibc's defaults, or settled as by autoaccum",
    )
    parser.add_argument("--settle", type=int, default=60, help="updates of fit before timing starts")
    parser.add_argument("--rounds", type=int, default=12, help="turns in which updates are timed")
    parser.add_argument("--first-updates", type=int, default=5, help="turns in which the first update is timed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--report-only", action="store_true", help="write the pages from existing results")
    options = parser.parse_args()
    out = options.out or (None if options.quick else ROOT / f"benchmarks/results/bench-{os.cpu_count()}-cores.json")
    page = options.page or (None if options.quick else ROOT / "docs/benchmarks.md")
    results = json.loads(out.read_text()) if out is not None and out.exists() else {}
    if not options.report_only:
        began_s = time.monotonic()

        def say(text):
            print(f"{time.monotonic() - began_s:6.0f} s  {text}", file=sys.stderr, flush=True)

        results["machine"] = machine()
        isolated.prepare()
        run(options, results, say, lambda: keep(out, results))
        say("done")
    text = report.markdown(results)
    print(report.goals_table(results), text, sep="\n\n")
    if page is not None:
        report.write_into(page, text)
        if options.page is None and "finders" in results:
            report.write_into(ROOT / "README.md", report.readme_table(results["finders"]), "finders")


def run(options, results, say, keep_results):
    """Run the requested parts, workload by workload; store the results after each."""
    quick = options.quick
    chosen = options.workloads or (["gpt", "mlp"] if quick else list(WORKLOADS))
    smaller = [name for name in options.workloads or (["gpt"] if quick else THREE) if name in throughput.SMALLER]
    parts = {
        "finders": (
            chosen,
            lambda name: finders.measure(name, options.finders, 1 if quick else options.repeats, options.peers, say),
        ),
        "throughput": (
            smaller,
            lambda name: throughput.measure(
                name, settle=10 if quick else options.settle, block=1, rounds=4 if quick else options.rounds, say=say
            ),
        ),
        "first-update": (
            chosen,
            lambda name: first_update.measure(name, repeats=2 if quick else options.first_updates, say=say),
        ),
    }
    for part in options.only:
        names, measure = parts[part]
        for name in names:
            row = measure(name)
            others = [old for old in results.get(part, ()) if old["workload"] != name]
            results[part] = sorted([*others, row], key=lambda kept: list(WORKLOADS).index(kept["workload"]))
            keep_results()


def keep(path, results):
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(results, indent=1) + "\n")
        temporary.replace(path)


if __name__ == "__main__":
    main()
