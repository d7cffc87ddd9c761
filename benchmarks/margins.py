"""Prints by how much published trainings exceeded their prediction: the margins of `_estimate/uncertainty.py`.

    python benchmarks/margins.py

It reads the results of `make published` (results/published.json: the segments of a process on its card;
results/allocated.json: what tensors hold at most, or the allocator's segments), and takes, of the trainings of one kind
and precision, the share by which 95 % of them exceed the prediction at most. Segments and tensors count apart, since
segments include what the allocator leaves unused, and the larger share counts. Where fewer than 20 trainings have one
precision, those of all precisions count together.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

from published_jobs import IMAGE_MODELS

RESULTS = Path(__file__).parent / "results"
SHARE_OF_RUNS = 0.95
LEAST_RUNS = 20
KINDS = ("convolutions", "others")
HALF = ("amp", "fp16", "bf16")
# Sources of allocated.json by what they trained: language models, mostly in bf16, and otherwise models with
# convolutions, but for the families named.
IN_BF16 = ("text", "litgpt", "adapters")
LANGUAGE_MODELS = (*IN_BF16, "bert")
WITHOUT_CONVOLUTIONS = ("timesformer",)


def runs():
    """Yield each published training that ended: source, kind of model, precision, share above its prediction."""
    for row in _rows("published.json"):
        if not row["ran_out"]:
            kind = "convolutions" if row["model"] in IMAGE_MODELS else "others"
            yield "segments", kind, "fp32", excess(row)
    for row in _rows("allocated.json"):
        # A configuration's name says whether images were in half precision.
        is_half = row["kind"] in IN_BF16 or any(word in row["run"] for word in HALF)
        kind = "others" if row["kind"] in LANGUAGE_MODELS or row["of"] in WITHOUT_CONVOLUTIONS else "convolutions"
        yield row["number"], kind, "half" if is_half else "fp32", excess(row)


def excess(row):
    return row["real_bytes"] / row["ours_bytes"] - 1


def quantile(shares):
    """Return the share that 95 % of the runs do not exceed, rounded up to a tenth of a per cent, and at least 0."""
    at_most = sorted(shares)[math.ceil(SHARE_OF_RUNS * len(shares)) - 1]
    return max(0.0, math.ceil(round(at_most * 1000, 6)) / 1000)


def grouped():
    """Return the shares of all runs by source, kind and precision."""
    found = defaultdict(list)
    for source, kind, precision, share in runs():
        found[source, kind, precision].append(share)
    return found


def margins():
    """Return the share and the number of runs it comes from, by kind and precision."""
    found, told = grouped(), {}
    for kind in KINDS:
        for precision in ("fp32", "half"):
            of_sources = [found[source, kind, precision] for source in ("segments", "tensors")]
            known = [shares for shares in of_sources if len(shares) >= LEAST_RUNS]
            if not known:
                known = [
                    pooled
                    for source in ("segments", "tensors")
                    if len(pooled := found[source, kind, "fp32"] + found[source, kind, "half"]) >= LEAST_RUNS
                ]
            told[kind, precision] = max((quantile(shares), len(shares)) for shares in known)
    return told


def _rows(name):
    return json.loads((RESULTS / name).read_text())["rows"]


def main():
    for of, shares in sorted(grouped().items()):
        print(f"{', '.join(of)}: {quantile(shares):.3f} of {len(shares)} runs")
    print("margins:")
    for (kind, precision), (share, number) in margins().items():
        print(f"{kind}, {precision}: {share:.3f} of {number} runs")


if __name__ == "__main__":
    main()
