"""Compares predictions of `torch.cuda.max_memory_allocated()` with published measurements on real cards.

    python benchmarks/allocated.py [--only danet Mistral] [--sources images text] [--out FILE]
    python benchmarks/allocated.py --told FILE

The modules of `SOURCES` describe the trainings and what their numbers are: the most that tensors held
(`max_memory_allocated`), or the segments that the allocator had reserved (`memory_reserved`, of the adapters). No card
is needed: each training is traced on fake tensors and replayed on the model of PyTorch's caching allocator. New rows of
FILE replace old ones; others are kept, so that it can be filled with several versions of transformers. `--told` prints
the tables of a file and predicts nothing.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import statistics
import sys
import time
import warnings
from pathlib import Path

import allocated_adapters
import allocated_bert
import allocated_images
import allocated_litgpt
import allocated_text
import allocated_videos
from allocated_doubts import DOUBTS
from bench import keep, machine

SOURCES = {
    "images": allocated_images,
    "videos": allocated_videos,
    "text": allocated_text,
    "litgpt": allocated_litgpt,
    "adapters": allocated_adapters,
    "bert": allocated_bert,
}
NEEDED = {
    "images": "mmsegmentation",
    "videos": "mmaction2",
    "text": "transformers",
    "litgpt": "litgpt",
    "adapters": "peft",
    "bert": "transformers",
}
# Why a published training cannot run here: its operators or files are missing.
LEFT_OUT = (RuntimeError, TypeError, ValueError, ImportError, FileNotFoundError, KeyError, AttributeError)
FAR = 0.05
# The sources whose trainings are told one by one.
BY_THE_RUN = ("text", "litgpt", "bert")
# A GiB in thousands of MiB; of a family of images this many, to this share.
GIB_IN_THOUSANDS = 1.024
LEAST_OF_A_FAMILY = 4
AGREES = 0.005


def predicted(kind, run):
    began_s = time.perf_counter()
    ours_bytes = SOURCES[kind].predicted_bytes(run)
    return {
        "kind": kind,
        "number": SOURCES[kind].NUMBER,
        **{key: run[key] for key in ("source", "run", "of", "card", "real_bytes")},
        "ours_bytes": ours_bytes,
        "seconds": time.perf_counter() - began_s,
    }


def error_of(row):
    return row["ours_bytes"] / row["real_bytes"] - 1


def in_thousands(rows):
    """Return the families of images whose "GB" are thousands of MiB.

    A family counts as a whole, and only with at least four trainings: read so, all of its numbers agree with the
    predictions to half a per cent, and read as GiB, none.
    """
    families = collections.defaultdict(list)
    for row in rows:
        if row["kind"] == "images":
            families[row["of"]].append(error_of(row))
    return {
        family
        for family, errors in families.items()
        if len(errors) >= LEAST_OF_A_FAMILY
        and all(abs((1 + error) * GIB_IN_THOUSANDS - 1) <= AGREES < abs(error) for error in errors)
    }


def in_own_units(rows):
    """Return the rows, with the numbers of such families in their unit."""
    families = in_thousands(rows)
    return [
        row | {"real_bytes": row["real_bytes"] / GIB_IN_THOUSANDS}
        if row["kind"] == "images" and row["of"] in families
        else row
        for row in rows
    ]


def summary(name, rows):
    errors = {row["run"]: error_of(row) for row in rows}
    sizes = [abs(error) for error in errors.values()]
    under = [run for run, error in errors.items() if error < -FAR]
    return (
        f"| {name} | {len(sizes)} | {statistics.median(sizes):.2%} | "
        f"{sum(size <= FAR / 5 for size in sizes) / len(sizes):.0%} | "
        f"{sum(size <= FAR for size in sizes) / len(sizes):.1%} | "
        f"{len(under)} | {sum(run in DOUBTS for run in under)} | {sum(error > FAR for error in errors.values())} |"
    )


def markdown(rows):
    titles = (
        "trainings",
        "number",
        "median error",
        "within 1 %",
        "within 5 %",
        "more than 5 % under",
        "of these explained",
        "5 % over",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", summary("all", rows)]
    by_kind = {kind: [row for row in rows if row["kind"] == kind] for kind in SOURCES}
    lines += [summary(kind, of_kind) for kind, of_kind in by_kind.items() if of_kind]
    if families := in_thousands(rows):
        lines.append(summary(f"all, with {', '.join(sorted(families))} in thousands of MiB", in_own_units(rows)))
    texts = [row for row in rows if row["kind"] in BY_THE_RUN]
    if texts:
        lines += ["", "| text | measured | predicted | off by |", "|---|---|---|---|"]
        lines += [
            f"| {row['run']} | {row['real_bytes']:,} | {row['ours_bytes']:,} | {error_of(row):+.3%} |" for row in texts
        ]
    for kind in (kind for kind in SOURCES if kind not in BY_THE_RUN):
        by_family = collections.defaultdict(list)
        for row in rows:
            if row["kind"] == kind:
                by_family[row["of"]].append(error_of(row))
        if by_family:
            lines += [
                "",
                f"| {kind}: family | trainings | median of the errors | least | most |",
                "|---|---|---|---|---|",
            ]
            lines += [
                f"| {family} | {len(errors)} | {statistics.median(errors):+.1%} | {min(errors):+.1%} | "
                f"{max(errors):+.1%} |"
                for family, errors in sorted(by_family.items())
            ]
    far = sorted((row for row in rows if abs(error_of(row)) > FAR), key=error_of)
    if far:
        lines += ["", "| more than 5 % off | off by | what explains it |", "|---|---|---|"]
        lines += [f"| {row['run']} | {error_of(row):+.1%} | {DOUBTS.get(row['run'], '')} |" for row in far]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="trainings whose names contain one of these words")
    parser.add_argument("--sources", nargs="+", choices=tuple(SOURCES), default=tuple(SOURCES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--told", type=Path, help="print the tables of this file, and predict nothing")
    options = parser.parse_args()
    if options.told:
        print(markdown(json.loads(options.told.read_text())["rows"]))
        return
    warnings.simplefilter("ignore")
    about = machine()
    for source, needed in NEEDED.items():
        if source in options.sources:
            try:
                about["versions"][needed] = importlib.metadata.version(needed)
            except importlib.metadata.PackageNotFoundError:
                sys.exit(f"{needed} is not installed here; `make published` makes environments that have it")
    results = {"machine": about, "rows": [], "left_out": {}}
    if options.out and options.out.exists():
        before = json.loads(options.out.read_text())
        results |= {key: before[key] for key in ("rows", "left_out")}
    for kind in options.sources:
        asked = [run for run in SOURCES[kind].runs() if any(word in run["run"] for word in options.only)]
        if not asked:
            print(f"no {kind}: no training of that name ran in the versions that are installed here", file=sys.stderr)
        for run in asked:
            add(results, kind, run)
            keep(options.out, results)
    print(markdown(results["rows"]))
    print(
        f"\n{len(results['left_out'])} left out: {collections.Counter(results['left_out'].values())}", file=sys.stderr
    )


def add(results, kind, run):
    """Predict one training, and add it to the results, or the reason why it is left out."""
    results["rows"] = [row for row in results["rows"] if (row["kind"], row["run"]) != (kind, run["run"])]
    results["left_out"].pop(run["run"], None)
    try:
        row = predicted(kind, run)
    except LEFT_OUT as error:
        results["left_out"][run["run"]] = type(error).__name__
        print(f"{run['run']}: left out, {type(error).__name__}: {str(error)[:100]}", file=sys.stderr, flush=True)
        return
    results["rows"].append(row)
    told = f"{row['real_bytes'] / 2**30:.2f} GiB measured, {row['ours_bytes'] / 2**30:.2f} predicted"
    print(f"{run['run']}: {told}, {error_of(row):+.2%}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
