"""Compares autoaccum with its peers in one run: answers of finders, speed of training, time to the first step.

    python benchmarks/bench.py [--quick] [--only finders throughput first-step] [--workloads gpt mlp]

`finders.py` and `throughput.py` describe what is measured; the first step is that of `fit` with its search, over the
same call given the size that was found. Results go to one JSON file, in which a repeated part replaces its old results;
the tables between the markers of docs/benchmarks.md and README.md are made from it. `--quick` runs less of everything,
and writes nothing without `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import finders
import isolated
import throughput
from finders import FINDERS
from measuring import keep, machine, quartiles, told, write_into
from throughput import COMPARED
from workloads import MIB, WORKLOADS

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("finders", "throughput", "first-step")
ACCELERATE = "Accelerate `find_executable_batch_size`"
TRANSFORMERS = "Transformers `auto_find_batch_size`"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two workloads, one turn, few windows")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS))
    parser.add_argument("--finders", nargs="+", choices=tuple(FINDERS), default=tuple(FINDERS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report-only", action="store_true", help="write the pages from existing results")
    options = parser.parse_args()
    out = options.out or (None if options.quick else ROOT / f"benchmarks/results/bench-{os.cpu_count()}-cores.json")
    results = json.loads(out.read_text()) if out is not None and out.exists() else {}
    if not options.report_only:
        began_s = time.monotonic()

        def say(text):
            print(f"{time.monotonic() - began_s:6.0f} s  {text}", file=sys.stderr, flush=True)

        results["machine"] = machine()
        isolated.prepare()
        run(options, results, say, out)
    print(markdown(results))
    if not options.quick and options.out is None:
        write_into(ROOT / "docs/benchmarks.md", markdown(results), "bench")
        if "finders" in results:
            write_into(ROOT / "README.md", readme_table(results["finders"], results.get("throughput", ())), "finders")


def run(options, results, say, out):
    """Run the requested parts, workload by workload; store the results after each."""
    quick = options.quick
    chosen = options.workloads or (["gpt", "mlp"] if quick else list(WORKLOADS))
    timed = options.workloads or (["gpt"] if quick else throughput.SMALLER)
    rounds, repeats = (2, 2) if quick else (4, 3)
    parts = {
        "finders": (chosen, lambda name: finders.measure(name, options.finders, say)),
        "throughput": (
            [name for name in timed if name in throughput.SMALLER],
            lambda name: throughput.measure(name, rounds=rounds, say=say),
        ),
        "first-step": (chosen, lambda name: to_first_step(name, repeats, say)),
    }
    for part in options.only:
        names, measure = parts[part]
        for name in names:
            row = measure(name)
            others = [old for old in results.get(part, ()) if old["workload"] != name]
            results[part] = sorted([*others, row], key=lambda kept: list(WORKLOADS).index(kept["workload"]))
            keep(out, results)


def first_step(_connection, name, micro_batch):
    """Return the seconds of `fit` to the end of its first step, and the size."""
    workload, ended_s = WORKLOADS[name], []
    model, optimizer = workload.made()
    windows, size = [workload.batch(workload.target)], micro_batch or "auto"
    began_s = time.perf_counter()
    found = throughput.by_fit(
        workload, model, optimizer, windows, lambda: ended_s.append(time.perf_counter()), micro_batch=size, max_steps=1
    )
    return {"seconds": ended_s[0] - began_s, "micro_batch": found["micro_batch"]}


def to_first_step(name, repeats, say):
    def ask(micro_batch):
        return isolated.call(first_step, name, micro_batch, timeout_s=300)[1:]

    value, ended = ask(None)
    size, ratios = value["micro_batch"] if value else None, []
    for turn in range(repeats if value else 0):
        took = {given: ask(given) for given in ((size, None) if turn % 2 else (None, size))}
        ended = next((why for _, why in took.values() if why), None)
        if ended:
            break
        ratios.append(took[None][0]["seconds"] / took[size][0]["seconds"])
    row = {"workload": name, "micro_batch": size, "ended": ended or "answered", "ratios": {}}
    if len(ratios) > 1:
        low, median, high = quartiles(ratios)
        row["ratios"]["auto"] = {"median": median, "quartiles": [low, high]}
    say(f"{name}: {row}")
    return row


# --- tables ---------------------------------------------------------------------------------------------------------


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def ratio_of(row, which):
    if which not in row["ratios"]:
        return "failed"
    (low, high), median = row["ratios"][which]["quartiles"], row["ratios"][which]["median"]
    return told((low, median, high))


def why_none(row):
    """Return in a few words why a finder has no answer."""
    # If cleaning up after one error raised another, the first ended the search.
    said = " ".join([*row["said"], row["ended"]])
    for sign, words in (
        ("no answer within", "timed out"),
        ("one sample does not fit", "none: gave up at 1"),
        ("could not create a primitive", "none: raised “could not create a primitive”"),
        ("can't allocate memory", "none: raised “can't allocate memory”"),
    ):
        if sign in said:
            return words
    return f"none: {row['ended'][:80]}"


def finder_table(found):
    lines, lost = [], {finder: [] for finder in FINDERS}
    for of in found:
        workload, rows = WORKLOADS[of["workload"]], {row["finder"]: row for row in of["rows"]}
        line = [f"{workload.title}, {workload.limit_bytes // MIB} MiB", of["truths"]["settled"]["largest"]]
        for finder, row in ((finder, rows[finder]) for finder in FINDERS if finder in rows):
            if row["answer"] is None:
                line.append(f"{why_none(row)}, {row['steps']} steps")
            else:
                line.append(f"{row['answer']} ({row['share']:.0%}), {row['steps']} steps, {row['seconds']:.1f} s")
            lost[finder] += [part for part, same in row.get("kept", {}).items() if not same]
        lines.append(line)
    states = [f"not {', '.join(dict.fromkeys(parts))}" if parts else "all" for parts in lost.values()]
    head = ["model, limit", "largest that fits", *FINDERS.values()]
    return table(head, [*lines, ["state kept", "", *states]])


def readme_table(found, timed):
    """Return the table of the README: the finders' answers, what becomes of the training, and its speed."""

    def of(finder):
        rows = [row for model in found for row in model["rows"] if row["finder"] == finder]
        shares = [row["share"] for row in rows if row["answer"] is not None]
        none = len(rows) - len(shares)
        answers = f"{min(shares):.0%} to {max(shares):.0%}" + (
            f", none for {none} of {len(rows)} models" if none else ""
        )
        return answers, f"{min(row['steps'] for row in rows)} to {max(row['steps'] for row in rows)}"

    (ours, _), (binary, steps), (accelerate, restarts) = map(of, ("autoaccum", "lightning-binsearch", "accelerate"))
    lightning = "Lightning `BatchSizeFinder`, binsearch"
    head = ("", "autoaccum", lightning, f"{ACCELERATE}, {TRANSFORMERS}", "accumulation by hand")
    rows = (
        ("size found, of the largest that fits", ours, binary, accelerate, "a guess"),
        ("steps thrown away", "0", steps, f"{restarts}, training restarts", "0"),
        ("keeps your batch size", "yes", "no", "no", "yes"),
        ("gradient of the whole batch", "exact", "of another batch", "of another batch", "if parts are equal"),
        ("survives running out of memory later", "yes", "no", "restarts", "no"),
    )
    where = f"On a CPU under memory limits, {len(found)} models ([method](docs/benchmarks.md))."
    notes = "Sizes of `fit` may be 3% above a limit on the CPU; of the others, those above 100% run out of memory."
    if ratios := [row["ratios"]["hand-same"]["median"] for row in timed if "hand-same" in row["ratios"]]:
        share = f"{min(ratios):.0%} to {max(ratios):.0%}"
        notes += f" `fit` has {share} of the speed of a loop by hand with the same sizes."
    return f"{table(head, rows)}\n\n{where} {notes}"


def throughput_table(rows):
    def told(sizes):
        return "+".join(map(str, sizes)) if len(sizes) <= 4 else f"{len(sizes)} x {max(sizes)}"

    shown = [how for how in COMPARED if any(how in row["ratios"] or how in row.get("gone", {}) for row in rows)]
    lines = [
        [
            f"{row['workload']}, {row['limit_bytes'] // MIB} MiB, {row['target']}",
            told(row["cut"]),
            told(row["best_cut"]),
        ]
        + [ratio_of(row, how) for how in shown]
        if "cut" in row
        else [row["workload"], *["failed"] * (2 + len(shown))]
        for row in rows
    ]
    return table(
        ["model, limit, target", "sizes of `fit`", "best sizes of the sweep", *map(COMPARED.get, shown)], lines
    )


def markdown(results):
    about = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']:.0f} GiB, {about['os']}"
    texts = [f"{where}; {versions}; load at the start {about['load']:.1f}."]
    if "finders" in results:
        texts += ["### Answers", finder_table(results["finders"])]
    if "throughput" in results:
        texts += ["### Speed", "Optimizer steps a second of `fit`, over those of the other."]
        texts.append(throughput_table(results["throughput"]))
    if "first-step" in results:
        texts += ["### Time to the first optimizer step", "With the search, over that with the size given."]
        lines = [(row["workload"], row["micro_batch"], ratio_of(row, "auto")) for row in results["first-step"]]
        texts.append(table(["model", "size found", "`micro_batch='auto'`"], lines))
    return "\n\n".join(texts)


if __name__ == "__main__":
    main()
