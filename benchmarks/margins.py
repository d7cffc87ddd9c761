"""Prints by how much published trainings exceeded their prediction: the margins of `_estimate/uncertainty.py`.

    python benchmarks/margins.py

It reads results/published.json (the segments of a process on its GPU, by `published.py`) and results/allocated.csv
(what tensors hold at most, or the allocator's segments; predicted at the commit that docs/dev/estimates.md names), and
prints the table of the latter. A margin is the share by which 95% of the trainings of one kind and precision exceed
their prediction at most. Segments and tensors count apart, since segments include what the allocator leaves unused, and
the larger share counts. Where fewer than 20 trainings have one precision, those of all precisions count together.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path

from published_jobs import IMAGE_MODELS

RESULTS = Path(__file__).parent / "results"
SHARE_OF_RUNS = 0.95
LEAST_RUNS = 20
FAR = 0.05
KINDS = ("convolutions", "others")
HALF = ("amp", "fp16", "bf16")
# Sources by what they trained: language models, mostly in bf16, and otherwise models with convolutions, but for the
# families named.
SOURCES = {
    "images": "images (mmsegmentation)",
    "videos": "videos (mmaction2)",
    "text": "text (Transformers)",
    "litgpt": "LitGPT",
    "adapters": "adapters (peft)",
    "bert": "BERT-large",
}
# Models with which the rules for Winograd's algorithm and for softmax's backward pass were found.
FITTED_ON = ("pspnet", "upernet", "apcnet", "danet", "nonlocal_net")
IN_BF16 = ("text", "litgpt", "adapters")
WITHOUT_CONVOLUTIONS = (*IN_BF16, "bert", "timesformer")


def allocated():
    """Return the rows of trainings whose tensors' peak is published, with the share above the prediction."""
    with (RESULTS / "allocated.csv").open() as lines:
        return [row | {"excess": excess(row)} for row in csv.DictReader(lines)]


def excess(row):
    return int(row["real_bytes"]) / int(row["ours_bytes"]) - 1


def runs():
    """Yield each published training that ended: source, kind of model, precision, share above its prediction."""
    for row in json.loads((RESULTS / "published.json").read_text())["rows"]:
        if not row["ran_out"]:
            kind = "convolutions" if row["model"] in IMAGE_MODELS else "others"
            yield "segments", kind, "fp32", excess(row)
    for row in allocated():
        # A configuration's name says whether images were in half precision.
        is_half = row["kind"] in IN_BF16 or any(word in row["run"] for word in HALF)
        kind = "others" if {row["kind"], row["of"]} & {*WITHOUT_CONVOLUTIONS} else "convolutions"
        yield row["number"], kind, "half" if is_half else "fp32", row["excess"]


def quantile(shares):
    """Return the share that 95% of the runs do not exceed, rounded up to a tenth of a per cent, and at least 0."""
    at_most = sorted(shares)[math.ceil(SHARE_OF_RUNS * len(shares)) - 1]
    return max(0.0, math.ceil(round(at_most * 1000, 6)) / 1000)


def margins():
    """Return the share and the number of runs it comes from, by kind and precision."""
    found = defaultdict(list)
    for source, kind, precision, share in runs():
        found[source, kind, precision].append(share)
    told = {}
    for kind in KINDS:
        alike = {
            precision: [found[of, kind, precision] for of in ("segments", "tensors")] for precision in ("fp32", "half")
        }
        pooled = [one + other for one, other in zip(*alike.values(), strict=True)]
        for precision, of_sources in alike.items():
            known = [shares for shares in of_sources if len(shares) >= LEAST_RUNS]
            known = known or [shares for shares in pooled if len(shares) >= LEAST_RUNS]
            told[kind, precision] = max((quantile(shares), len(shares)) for shares in known)
    return told


def table():
    """Return the table of docs/dev/estimates.md."""
    rows = allocated()
    titles = ("trainings", "number", "median error", "within 5%", "more than 5% under")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    kinds = {"all": rows, "of these, a rule was fitted on them": [row for row in rows if row["of"] in FITTED_ON]}
    kinds["of these, no rule was"] = [row for row in rows if row["of"] not in FITTED_ON]
    kinds |= {title: [row for row in rows if row["kind"] == kind] for kind, title in SOURCES.items()}
    for title, of_kind in kinds.items():
        errors = [1 / (1 + row["excess"]) - 1 for row in of_kind]
        near, under = sum(abs(error) <= FAR for error in errors) / len(errors), sum(error < -FAR for error in errors)
        lines.append(f"| {title} | {len(errors)} | {statistics.median(map(abs, errors)):.2%} | {near:.1%} | {under} |")
    return "\n".join(lines)


def main():
    print(table(), "", "margins:", sep="\n")
    for (kind, precision), (share, number) in margins().items():
        print(f"{kind}, {precision}: {share:.3f} of {number} runs")


if __name__ == "__main__":
    main()
