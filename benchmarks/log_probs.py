"""Measures log-probabilities in chunks beside those of whole logits: peak memory and time of a gradient.

A GPT-2, and a model of 128,000 classes and 256 features, compute the gradient of log-probabilities of their tokens that
are weighted by advantages, as in reinforcement learning, in float32: 2 rows of 512 tokens. They have one block, since
blocks are the same in all ways. Each way has a process of its own. The peak is that of all tensors; on the CPU
`Simulated` counts them, in a step before those timed.

    python benchmarks/log_probs.py [--rounds 3] [--page docs/memory.md] [--out benchmarks/results/log_probs-NAME.json]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from pathlib import Path

import torch
from isolated import call, prepare
from measuring import keep, machine, spread, wait_for, write_into
from workloads import gpt2

import autoaccum
from autoaccum._saving.chunked_head import chunked

MODELS = {
    "GPT-2, 50,257 classes": {"vocab_size": 50_257, "n_layer": 1},
    "128,000 classes": {"vocab_size": 128_000, "n_layer": 1, "n_embd": 256, "n_head": 4},
}
ROWS, LENGTH = 2, 512
SMALL = {"vocab_size": 1000, "n_embd": 16, "n_layer": 1, "n_head": 2}  # for a test
LARGE = {"vocab_size": 128_000}  # for a GPU


def by_logsumexp(logits, ids):
    """As TRL computes them, row by row."""
    picked = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([row.logsumexp(-1) for row in logits])


WAYS = ("whole logits", 'save_memory="chunked_loss"', "ChunkedLoss.log_probs")


def measured(_connection, way, settings, device, rounds, length=LENGTH):
    """Return seconds of some gradients, the peak in bytes, and the loss, of a GPT-2 of these settings."""
    make, _ = gpt2(length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **settings)
    torch.manual_seed(0)
    memory = autoaccum.Simulated(2**40)
    tokens, weights = (
        torch.randint(settings["vocab_size"], (ROWS, length)).to(device),
        torch.randn(ROWS, length - 1).to(device),
    )

    def step():
        begun, is_here = time.perf_counter(), way == WAYS[1]
        with chunked([model]) if is_here else contextlib.nullcontext():
            if way == WAYS[2]:
                hidden = model.transformer(tokens).last_hidden_state[:, :-1]
                found = autoaccum.ChunkedLoss(model.lm_head).log_probs(hidden, tokens[:, 1:])
            else:
                found = by_logsumexp(model(tokens).logits[:, :-1], tokens[:, 1:])
            loss = -(found * weights).mean()
            loss.backward()
        model.zero_grad(set_to_none=False)
        wait_for(device)
        return time.perf_counter() - begun, loss.item()

    with memory.limited(None) if device == "cpu" else contextlib.nullcontext():
        model = make().to(device)
        steps = [step()]
        peak = memory.peak_bytes() if device == "cpu" else torch.cuda.max_memory_allocated()
    steps += [step() for _ in range(rounds)]
    return {"peak_bytes": peak, "seconds": [seconds for seconds, _ in steps[1:]], "loss": steps[0][1]}


def table(results):
    """Return the results as a table of Markdown."""
    titles = list(MODELS)
    lines = [f"| log-probabilities by | {' | '.join(titles)} |", f"|---{'|---' * len(titles)}|"]
    for way in WAYS:
        rows = [row for row in results if row["way"] == way]
        cells = [f"{row['peak_bytes'] / 2**30:.2f} GiB" for row in rows]
        lines.append(f"| {' | '.join([way, *cells])} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--page", type=Path, help="a page that gets the table between its markers")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/log_probs-{os.cpu_count()}-cores.json"))
    options = parser.parse_args()
    prepare(["torch", "transformers", "autoaccum"])
    results = []
    for name, settings in MODELS.items():
        for way in WAYS:
            _, found, why = call(measured, way, settings, "cpu", options.rounds, timeout_s=3600)
            if found is None:
                raise SystemExit(why)
            results.append({"model": name, "way": way, **found})
            first = next(row for row in results if row["model"] == name)
            assert math.isclose(found["loss"], first["loss"], rel_tol=1e-4, abs_tol=1e-5), results
            peak, seconds = found["peak_bytes"] / 2**30, spread(found["seconds"], " s")
            print(f"{name}, {way}: {peak:.2f} GiB, {seconds}", flush=True)
    about = machine(["transformers"])
    keep(options.out, {"machine": about, "rows": results})
    where = (
        f"(Peak of one gradient, with weights and gradients, of one-block models; {about['cpu']}, {about['cores']} "
        f"cores; {ROWS} rows of {LENGTH} tokens, float32.)"
    )
    if options.page is not None:
        write_into(options.page, f"{table(results)}\n\n{where}", "log-probs")


if __name__ == "__main__":
    main()
