"""Measures what `memory="chunked_loss"` saves and costs: GPT-2 with 32,000 and with 128,000 classes.

Two runners make the same window in turn, one with the logits whole and one in chunks. Prints and writes the peak of
each, counted by the simulated device, and the median ratio of their seconds, with its quartiles.

    python benchmarks/chunked_loss.py [--rounds 7] [--out benchmarks/results/chunked_loss.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from overhead import processor

import autoaccum

CLASSES = (32_000, 128_000)
LAYERS, WIDTH, TOKENS, SAMPLES = 2, 128, 256, 4


def runner_of(classes, memory, device):
    """Return a runner of micro-batches of all samples."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=classes, n_embd=WIDTH, n_layer=LAYERS, n_head=4, use_cache=False)
    return autoaccum.Runner(
        transformers.GPT2LMHeadModel(config),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        autoaccum.plan(SAMPLES, SAMPLES),
        device=autoaccum.Simulated(2**36) if device == "cpu" else device,
        precision="fp32" if device == "cpu" else "bf16",
        memory=memory,
    )


def measure(classes, rounds, device):
    """Return the peaks without and with chunks, in bytes, and the ratios of seconds."""
    runners = [runner_of(classes, memory, device) for memory in (None, "chunked_loss")]
    tokens = torch.randint(classes, (SAMPLES, TOKENS))
    window, peaks, ratios = {"input_ids": tokens, "labels": tokens}, [], []
    for runner in runners:
        for _ in range(3):  # the first windows make checks
            runner.step(window)
    for _ in range(rounds):
        seconds = []
        for runner in runners:
            started = time.perf_counter()
            report = runner.step(window)
            report.loss  # noqa: B018 - waits for the device
            seconds.append(time.perf_counter() - started)
            peaks.append(report.peak_bytes)
        ratios.append(seconds[1] / seconds[0])
    return peaks[-2], peaks[-1], ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    results = {}
    print("| classes | peak, logits whole | in chunks | seconds, against whole |\n|---|---|---|---|")
    for classes in CLASSES:
        whole, chunks, ratios = measure(classes, options.rounds, options.device)
        median, quartiles = statistics.median(ratios), statistics.quantiles(ratios, n=4)[::2]
        results[classes] = {"whole_bytes": whole, "chunks_bytes": chunks, "median": median, "quartiles": quartiles}
        times = f"{median:.2f} ({quartiles[0]:.2f} to {quartiles[1]:.2f})"
        print(f"| {classes:,} | {whole / 2**20:.0f} MiB | {chunks / 2**20:.0f} MiB | {times} |", flush=True)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    print(f"\n{machine}, torch {torch.__version__}, Python {platform.python_version()}, {SAMPLES} samples of {TOKENS}")
    if options.out is not None:
        record = {"machine": machine, "torch": torch.__version__, "tokens": SAMPLES * TOKENS, "results": results}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
