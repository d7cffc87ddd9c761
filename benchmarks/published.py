"""Compares predictions for published training runs on real GPUs with their measurements and predictions.

    python benchmarks/published.py [--only T5 gpt2] [--first-tokens 100] [--out FILE]

published/README.md describes the runs and their sources. No GPU is needed: a run's iterations are traced on fake
tensors and replayed on the model of PyTorch's caching allocator, and its reserved memory is compared with NVML's count.
For runs that ran out of memory, it checks whether that was predicted. transformers now keeps and casts other tensors:
`pip install transformers==4.51.3` installs the version of the time.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
import warnings
from pathlib import Path

from measuring import keep, machine
from published_jobs import IMAGE_MODELS, TOKENS, served, timeline_of

from autoaccum._estimate.cuda_allocator import CapacityExceededError
from autoaccum._estimate.cuda_dispatch import cublas_bytes
from autoaccum._estimate.gpus import gpu_named

RUNS = Path(__file__).parent / "published" / "xmem.csv"
OTHERS = ("xmem", "dnnmem", "schedtune", "llmem")
NAMES = {"ours": "autoaccum", "xmem": "xMem", "dnnmem": "DNNMem", "schedtune": "SchedTune", "llmem": "LLMem"}
# A prediction this close equals the measured number, given NVML's whole MiB and segments of 2 MiB.
EXACT_BYTES = 2 * 2**20


def reserved(timeline, gpu, capacity_bytes):
    """Return the allocator's peak reserved memory over a whole run; None if it does not fit."""
    cublas = 2 * [cublas_bytes(gpu.name)]  # for the threads of forward and backward
    try:
        return served(timeline, cublas=cublas, capacity_bytes=capacity_bytes).peak_reserved_bytes
    except CapacityExceededError:
        return None


def predicted(run, first_tokens=TOKENS):
    began_s = time.perf_counter()
    gpu = gpu_named(run["gpu"])
    timeline = timeline_of(run["model"], run["optimizer"], int(run["batch"]), first_tokens)
    within = reserved(timeline, gpu, gpu.free_bytes)
    return {
        "run": run["run"],
        "gpu": gpu.name,
        "model": run["model"],
        "optimizer": run["optimizer"],
        "batch": int(run["batch"]),
        "ran_out": run["real_oom"] == "true",
        "real_bytes": int(run["nvml_bytes"]),
        "ours_bytes": within or reserved(timeline, gpu, None),
        "ours_runs_out": within is None,
        "seconds": time.perf_counter() - began_s,
        **{f"{other}_bytes": int(run[f"{other}_bytes"]) if run[f"{other}_bytes"] else None for other in OTHERS},
        "xmem_runs_out": run["xmem_oom"] == "true",
    }


def error_of(row, tool):
    said = row[f"{tool}_bytes"]
    return None if said is None else said / row["real_bytes"] - 1


def errors_of(rows, tool):
    return [error for row in rows if not row["ran_out"] and (error := error_of(row, tool)) is not None]


def foretold(rows, tool, *, ran_out):
    """Return for how many runs that ran out, or ended, a tool predicted running out; "-" if not copied."""
    asked = [row for row in rows if row["ran_out"] is ran_out]
    key = f"{tool}_runs_out"
    return f"{sum(row[key] for row in asked)} of {len(asked)}" if all(key in row for row in rows) else "-"


def markdown(rows):
    kinds = {
        "all": rows,
        "text": [row for row in rows if row["model"] not in IMAGE_MODELS],
        "images": [row for row in rows if row["model"] in IMAGE_MODELS],
    }
    titles = (
        "runs",
        "predicted by",
        "that ended",
        "median error",
        "within 5%",
        "more than 5% under",
        "most under",
        "most over",
        "ran out, and that was said",
        "ended, though said to run out",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for kind, of_kind in kinds.items():
        for tool, name in NAMES.items():
            errors = errors_of(of_kind, tool)
            if not errors:
                continue
            near = sum(abs(error) <= 0.05 for error in errors)
            under = sum(error < -0.05 for error in errors)
            lines.append(
                f"| {kind} | {name} | {len(errors)} | {statistics.median(map(abs, errors)):.2%} | "
                f"{near / len(errors):.0%} | {under} | {min(errors):+.1%} | {max(errors):+.1%} | "
                f"{foretold(of_kind, tool, ran_out=True)} | {foretold(of_kind, tool, ran_out=False)} |"
            )
    ended = [row for row in kinds["text"] if not row["ran_out"]]
    if ended:
        exact = sum(abs(row["ours_bytes"] - row["real_bytes"]) <= EXACT_BYTES for row in ended)
        told = f"Of the {len(ended)} runs with text that ended, {exact} are predicted to within 2 MiB of what was seen."
        lines += ["", told]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="models whose names contain one of these words")
    parser.add_argument("--first-tokens", type=int, default=TOKENS, help="the longest line of the first batch of text")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {"machine": machine(also=["transformers"]), "rows": []}
    with RUNS.open() as lines:
        runs = [run for run in csv.DictReader(lines) if any(word in run["model"] for word in options.only)]
    for run in runs:
        row = predicted(run, options.first_tokens)
        results["rows"].append(row)
        told = "ran out" if row["ran_out"] else f"{error_of(row, 'ours'):+.2%}, xMem {error_of(row, 'xmem'):+.2%}"
        warned = ", said to run out" if row["ours_runs_out"] else ""
        print(
            f"{row['model']} {row['optimizer']} {row['batch']} on {row['gpu']}: {told}{warned}, "
            f"{row['ours_bytes'] / 2**20:.0f} MiB",
            file=sys.stderr,
            flush=True,
        )
        keep(options.out, results)
    print(markdown(results["rows"]))


if __name__ == "__main__":
    main()
