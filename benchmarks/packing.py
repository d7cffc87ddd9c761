"""Measures how full packed micro-batches are, by best fit and in order of width, beside padded ones.

For three spreads of length, `fit` trains the Llama of `tokens.py` on lists of texts, on a simulated device that holds 6
of the longest at once, with nothing set: padded, packed as before in order of width, and packed by best fit. Prints the
tokens computed for one of a text, those after a failure again, the micro-batches of a step and the failures, of the
steps after the first 8.

    python benchmarks/packing.py [--steps 16] [--out benchmarks/results/packing.json]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from measuring import keep, machine
from tokens import OF_LOADER, SAMPLES, SPREADS, capacity, llama, optimizer_of, padded, texts

import autoaccum

FIRST = 8


def flattened(some):
    """Return texts in one row, whose positions say where each begins."""
    labels = [torch.cat([torch.full((1,), -100), one[1:]]) for one in some]
    positions = [torch.arange(len(one)) for one in some]
    parts = {"input_ids": some, "position_ids": positions, "labels": labels}
    return {name: torch.cat(tuple(of_texts))[None] for name, of_texts in parts.items()}


class InOrder(autoaccum.ListOfSamples):
    """Does not learn that its rows are packed."""

    packs = property(lambda _: None, lambda *_: None)


SPLITS = {
    "padded": lambda: autoaccum.ListOfSamples(padded),
    "packed, in order of width": lambda: InOrder(flattened),
    "packed, by best fit": lambda: autoaccum.ListOfSamples(flattened),
}


class Later(autoaccum.Callback):
    """Adds up the tokens that are computed after the first steps."""

    def __init__(self, model):
        self.computed, self.steps = 0, 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _, __, named):
        self.computed += named["input_ids"].numel() * (self.steps >= FIRST)

    def on_step(self, *_, **__):
        """Count it."""
        self.steps += 1


def trained(every, split, room):
    model = llama()
    later = Later(model)
    result = autoaccum.fit(
        model,
        torch.utils.data.DataLoader(every, batch_size=OF_LOADER, collate_fn=list),
        target_batch=SAMPLES,
        optimizer=optimizer_of,
        device=autoaccum.Simulated(room),
        precision="fp32",
        split=split,
        callbacks=[later],
        progress=False,
    )
    reports = result.history[FIRST:]
    return {
        "computed_per_token": later.computed / sum(map(len, every[FIRST * SAMPLES :])),
        "micro_batches": sum(len(report.micro_batches) for report in reports) / len(reports),
        "failures": sum(report.oom_events for report in reports),
        "all_failures": result.oom_events,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    os.environ["AUTOACCUM_CACHE_DIR"] = ""
    torch.set_num_threads(1)
    room, rows = capacity(), []
    print("| CV | micro-batches | computed per token | micro-batches a step | failures (in all steps) |")
    print("|---|---|---|---|---|")
    for spread in SPREADS:
        every = texts(spread, SAMPLES * options.steps)
        for name, split in SPLITS.items():
            row = {"spread": spread, "micro_batches_are": name, **trained(every, split(), room)}
            rows.append(row)
            print(
                f"| {spread} | {name} | {row['computed_per_token']:.3f} | {row['micro_batches']:.2f} | "
                f"{row['failures']} ({row['all_failures']}) |",
                flush=True,
            )
    keep(options.out, {"machine": machine(("transformers",)), "capacity": room, "steps": options.steps, "rows": rows})


if __name__ == "__main__":
    main()
