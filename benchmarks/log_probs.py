"""Measures log-probabilities in chunks beside those of whole logits: peak memory and time of an optimizer step.

A GPT-2 of 124 million parameters with its own vocabulary, and with one of 128,000 classes, trains on log-probabilities
of its tokens that are weighted by advantages, as in reinforcement learning, in float32 with SGD: 2 rows of 512 tokens.
Each way has a process of its own. On the CPU the peak is that of all tensors, weights and gradients included, counted
by `Simulated`; times are of the steps after the checks.

    python benchmarks/log_probs.py [--rounds 3] [--page docs/memory.md] [--out benchmarks/results/log_probs-NAME.json]
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from isolated import call, prepare
from measuring import keep, machine, quartiles, told, wait_for, write_into
from workloads import gpt2

import autoaccum

VOCABULARIES = {"GPT-2": 50_257, "128,000 classes": 128_000}
ROWS, LENGTH = 2, 512
CHECKED = 4  # the first, second and fourth window have all checks
SMALL = {"n_embd": 16, "n_layer": 1, "n_head": 2}  # for a test


def by_log_softmax(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def by_logsumexp(logits, ids):
    """As TRL computes them, row by row."""
    picked = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([row.logsumexp(-1) for row in logits])


# What is computed of the model's output, and what saves memory.
WAYS = {
    "log_softmax of whole logits": (by_log_softmax, None),
    "logsumexp of whole logits, by rows": (by_logsumexp, None),
    'the same with memory="chunked_loss"': (by_logsumexp, "chunked_loss"),
    "ChunkedLoss.log_probs": (None, None),
}


def measured(_connection, way, vocabulary, device, rounds, tiny):
    """Return seconds of some steps, the peak in bytes, and the losses."""
    compute, memory = WAYS[way]
    length, settings = (16, SMALL) if tiny else (LENGTH, {})
    make, _ = gpt2(length, vocab_size=vocabulary, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **settings)
    found = {}
    for on in (device,) if device == "cuda" else (device, autoaccum.Simulated(2**40)):
        torch.manual_seed(0)
        model, tokens = make().to(device), torch.randint(vocabulary, (ROWS, length))
        window = (tokens, torch.randn(ROWS, length))
        chunked = autoaccum.ChunkedLoss(model.lm_head)

        def forward(model, batch, chunked=chunked):
            tokens, _ = batch
            if compute is None:
                return chunked.log_probs(model.transformer(tokens).last_hidden_state[:, :-1], tokens[:, 1:])
            return compute(model(tokens).logits[:, :-1], tokens[:, 1:])

        runner = autoaccum.Runner(
            model,
            torch.optim.SGD(model.parameters(), lr=1e-3),
            autoaccum.plan(ROWS, ROWS),
            forward=forward,
            loss=lambda log_probs, advantages: -(log_probs * advantages[:, 1:]).mean(),
            device=on,
            precision="fp32",
            memory=memory,
        )
        seconds, reports = [], [runner.step(window) for _ in range(CHECKED if on == device else CHECKED // 2)]
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(rounds if on == device else 1):
            wait_for(device)
            began = time.perf_counter()
            reports.append(runner.step(window))
            wait_for(device)
            seconds.append(time.perf_counter() - began)
        found["losses"] = [report.loss for report in reports]
        found |= {"seconds": seconds} if on == device else {}
        found["peak_bytes"] = torch.cuda.max_memory_allocated() if device == "cuda" else reports[-1].peak_bytes
    return found


def table(results):
    """Return the results as a table of Markdown."""
    lines = ["| vocabulary | log-probabilities by | peak | step |", "|---|---|---|---|"]
    lines += [
        f"| {row['vocabulary']:,} | `{row['way']}` | {row['peak_bytes'] / 2**30:.2f} GiB "
        f"| {told(quartiles(row['seconds']), ' s')} |"
        for row in results
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", type=Path, help="a page that gets the table between its markers")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/log_probs-{os.cpu_count()}-cores.json"))
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    options = parser.parse_args()
    prepare(["torch", "transformers", "autoaccum"])
    results = []
    for vocabulary in VOCABULARIES.values():
        for way in WAYS:
            _, found, why = call(measured, way, vocabulary, "cpu", options.rounds, options.tiny, timeout_s=3600)
            if found is None:
                raise SystemExit(why)
            results.append({"vocabulary": vocabulary, "way": way, **found})
            first = next(row for row in results if row["vocabulary"] == vocabulary)
            assert all(abs(a - b) < 1e-5 for a, b in zip(found["losses"], first["losses"], strict=False)), results
            print(table(results[-1:]).splitlines()[-1], flush=True)
    about = machine(["transformers"])
    keep(options.out, {"machine": about, "rows": results})
    where = (
        f"({about['cpu']}, {about['cores']} cores shared with other work; torch {torch.__version__}; {ROWS} rows of "
        f"{LENGTH} tokens, float32; with weights and gradients; medians of {options.rounds} steps, quartiles in "
        "brackets.)"
    )
    if options.page is not None:
        write_into(options.page, f"{table(results)}\n\n{where}", "log-probs")


if __name__ == "__main__":
    main()
