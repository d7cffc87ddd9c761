"""Predicts a training step of every architecture of transformers and torchvision for a card, on a machine without one.

    python benchmarks/architectures.py [--only mixtral resnet18] [--again not] [--out FILE] [--page docs/FILE.md]

Each model is made in a small configuration on the meta device and predicted in a process of its own, under a limit of
memory and of time. The answer is how it went: on fake tensors; by a real step, and why; in fp32 only, with what bf16
was refused for; or not at all, and why. An architecture that no small configuration could be made for is told apart:
there, the step fails on real tensors too, or the model cannot be made (`small_models.py`). What is in FILE already is
not asked again, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import importlib.metadata
import json
import re
import resource
import sys
import warnings
from pathlib import Path

import isolated
import small_models
from bench import keep

CARD = "h100-80gb"
LIMIT_BYTES, LIMIT_S, PROCESSES = 8 * 2**30, 300, 2
PRELOADED = [
    "torch._dynamo",
    "torchvision.models",
    "transformers.models.llama.modeling_llama",
    "transformers.models.vit.modeling_vit",
    "transformers.loss.loss_utils",
    "autoaccum._estimate.estimate",
]

# How it went, in the order of the tables.
FAKES, REAL, FP32, NOT, UNMADE = "on fakes", "by a real step", "in fp32 only", "not", "no small configuration"
HOWS = (FAKES, REAL, FP32, NOT, UNMADE)


def said(error):
    text = re.sub(r"\s+", " ", str(error)).strip() or repr(error)
    return f"{type(error).__name__}: {text[:300]}"


def runs_for_real(make, batch, options):
    """Whether the model makes a step on real tensors of the CPU, and if not, why."""
    from autoaccum._estimate.estimate import trace_step  # noqa: PLC0415 - as above

    def here(model, batch):
        # Its first value makes the trace go on with real tensors.
        next(value for value in model.parameters()).flatten()[0].item()
        return options["forward"](model, batch) if "forward" in options else model(**batch)

    try:
        trace_step(make, batch, kind="cpu", sizes=[2], forward=here, precision="bf16")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return said(error)
    return None


def is_predicted_in_fp32(make, batch, options):
    from autoaccum._estimate.estimate import estimate_step  # noqa: PLC0415 - as above
    from autoaccum._estimate.gpus import card_named  # noqa: PLC0415 - as above

    try:
        estimate_step(make, batch, card=card_named(CARD), precision="fp32", sizes=[2], **options)
    except Exception:  # noqa: BLE001 - as above
        return False
    return True


def ask(_connection, *one):
    """Predict one model in a process of its own."""
    import torch  # noqa: PLC0415 - as above

    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return predicted(*one)


def predicted(library, group, architecture, name):
    """Return how a model went, and why."""
    from autoaccum._estimate.estimate import estimate_step  # noqa: PLC0415 - as above
    from autoaccum._estimate.gpus import card_named  # noqa: PLC0415 - as above

    failed = {}
    ways = small_models.CONFIGURATIONS if library == "transformers" else {"as it is": None}
    for way, numbers in ways.items():
        try:
            if library == "transformers":
                make, batch, options = small_models.of_transformers(group, name, numbers)
            else:
                make, batch, options = small_models.of_torchvision(group, architecture)
        except Exception as error:  # noqa: BLE001 - as above
            failed[way] = UNMADE, said(error)
            continue
        try:
            estimate = estimate_step(make, batch, card=card_named(CARD), precision="auto", sizes=[2], **options)
        except Exception as error:  # noqa: BLE001 - as above
            if is_predicted_in_fp32(make, batch, options):
                return {"how": FP32, "why": said(error), "configuration": way}
            why = runs_for_real(make, batch, options) if way.startswith("narrow") else said(error)
            failed[way] = (NOT, said(error)) if why is None else (UNMADE, said(error))
            continue
        if estimate.real_step:
            return {"how": REAL, "why": estimate.notes[0].partition(": ")[2], "configuration": way}
        return {"how": FAKES, "peak_bytes": estimate.footprints[-1].peak_bytes, "configuration": way}
    # A step that fails on fakes only says most.
    way, (how, why) = next(((way, one) for way, one in failed.items() if one[0] == NOT), [*failed.items()][-1])
    return {"how": how if library == "transformers" else NOT, "why": why, "configuration": way}


def asked(one):
    _, answer, why = isolated.call(ask, *one, timeout_s=LIMIT_S)
    return dict(zip(("library", "group", "architecture", "class"), one, strict=True)) | (
        answer or {"how": NOT, "why": f"its process {why}"}
    )


def reason(row):
    """Return why, so that the same causes have the same words."""
    return re.sub(r"0x[0-9a-f]+|\d{3,}", "…", row.get("why", ""))


def markdown(rows):
    """Return how many went how, and which did not go through on fakes."""
    counts = collections.defaultdict(collections.Counter)
    for row in rows:
        counts[row["library"], row["group"]][row["how"]] += 1
    lines = ["| | " + " | ".join(HOWS) + " |", "|---" * (len(HOWS) + 1) + "|"]
    for (library, group), found in counts.items():
        lines.append(f"| {library}, {group} | " + " | ".join(str(found[how]) for how in HOWS) + " |")
    total = collections.Counter(row["how"] for row in rows)
    lines.append("| all | " + " | ".join(str(total[how]) for how in HOWS) + " |")
    for how in HOWS[1:]:
        of = collections.defaultdict(list)
        for row in rows:
            if row["how"] == how:
                of[reason(row)].append(row["architecture"] if row["library"] == "torchvision" else row["class"])
        if of:
            lines += ["", f"| {how}: why | which |", "|---|---|"]
            for why, which in sorted(of.items(), key=lambda item: -len(item[1])):
                lines.append(f"| {why.replace('|', '/')} | {', '.join(sorted(which))} |")
    return "\n".join(lines)


def table(rows):
    lines = ["| architecture | class | how | why |", "|---|---|---|---|"]
    lines += [f"| {row['architecture']} | {row['class']} | {row['how']} | {reason(row)} |" for row in rows]
    return "\n".join(lines)


def write(page, text):
    began, ended = "<!-- architectures: begin -->", "<!-- architectures: end -->"
    before, _, rest = page.read_text().partition(began)
    page.write_text(f"{before}{began}\n{text}\n{ended}{rest.partition(ended)[2]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="architectures or classes")
    parser.add_argument("--again", nargs="*", help="ask again what went so, such as 'not'; all without a value")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--table", action="store_true", help="print all of it")
    options = parser.parse_args()
    every = small_models.names()
    chosen = [one for one in every if not options.only or set(options.only) & set(one[2:])]
    results = {
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "torchvision", "timm")
        },
        "card": CARD,
        "rows": [],
    }
    if options.out and options.out.exists():
        results["rows"] = json.loads(options.out.read_text())["rows"]
    known = {(row["library"], row["class"], row["architecture"]): row for row in results["rows"]}
    answers = dict(known)  # the former ones stay until there are others
    if options.again is not None:
        again = {(one[0], one[3], one[2]) for one in chosen}
        known = {
            key: row
            for key, row in known.items()
            if key not in again or (options.again and row["how"] not in options.again)
        }
    missing = [one for one in chosen if (one[0], one[3], one[2]) not in known]
    isolated.PRELOADED[:] = PRELOADED
    isolated.prepare()
    order = {(one[0], one[3], one[2]): number for number, one in enumerate(every)}
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool, contextlib.suppress(KeyboardInterrupt):
        for number, row in enumerate(pool.map(asked, missing), start=1):
            answers[row["library"], row["class"], row["architecture"]] = row
            results["rows"] = [answers[key] for key in sorted(answers, key=lambda key: order.get(key, len(order)))]
            keep(options.out, results)
            what = f"{row['architecture']} {row['class']}: {row['how']} {row.get('why', '')[:150]}"
            print(f"{number}/{len(missing)} {what}", file=sys.stderr, flush=True)
    rows = [
        row for row in results["rows"] if not options.only or set(options.only) & {row["class"], row["architecture"]}
    ]
    print(table(rows) if options.table else markdown(rows))
    if options.page:
        write(options.page, markdown(results["rows"]))


if __name__ == "__main__":
    main()
