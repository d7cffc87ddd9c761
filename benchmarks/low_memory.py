"""Measures what the options that change the mathematics keep in memory, and what they do to the loss.

A small GPT-2 learns to predict random walks over 64 tokens, whose next token depends on the last one. Each way trains
from the same initial weights on the same windows, in bf16 autocast, with as many updates as the others. Prints and
writes the bytes that weights and the optimizer's state take for each number of a weight, read after the last update,
and the loss on held-out tokens against that of float32 weights with AdamW: the mean over the seeds, and its range. As a
control, the last row is what people do by hand: `model.bfloat16()`, whose updates are rounded to the nearest number.

    python benchmarks/low_memory.py [--updates 600] [--seeds 3] [--out benchmarks/results/low_memory.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch
from overhead import processor

import autoaccum

CLASSES, LENGTH, SAMPLES, MICRO_BATCH = 64, 24, 16, 8
HELD_OUT = 256
LEARNING_RATE = 1e-3

WAYS = {
    "float32, AdamW": {},
    '`optimizer="adamw8bit"`': {"optimizer": autoaccum.adamw8bit},
    '`weights="bf16"`': {"weights": "bf16"},
    "both": {"optimizer": autoaccum.adamw8bit, "weights": "bf16"},
    '`weights="bf16-master"`': {"weights": "bf16-master"},
    "by hand: `model.bfloat16()`, AdamW": {"casts": True},
}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - takes seconds

    config = GPT2Config(vocab_size=CLASSES, n_embd=64, n_layer=1, n_head=2, n_positions=LENGTH)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config)


def walks(samples, seed):
    """Return tokens of shape (samples, LENGTH): each token has four likely successors."""
    table = torch.randint(CLASSES, (CLASSES, 4), generator=torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(seed)
    found = torch.randint(CLASSES, (samples, LENGTH), generator=chance)
    for at in range(1, LENGTH):
        likely = table[found[:, at - 1]].gather(1, torch.randint(4, (samples, 1), generator=chance))[:, 0]
        found[:, at] = torch.where(torch.rand(samples, generator=chance) < 0.9, likely, found[:, at])
    return found


def held_out_loss(model):
    """Return the mean loss over the held-out tokens."""
    tokens = walks(HELD_OUT, seed=10_000)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens).logits[:, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def trained(way, updates, seed):
    """Train one way; return the held-out loss, and the bytes kept for each number of a weight."""
    options = dict(WAYS[way])
    torch.manual_seed(seed)
    model = gpt2()
    if options.pop("casts", False):
        model = model.bfloat16()
    make, made = options.pop("optimizer", torch.optim.AdamW), []

    def optimizer(parameters):
        made.append(make(parameters, lr=LEARNING_RATE))
        return made[0]

    tokens = walks(updates * SAMPLES, seed=1 + seed)
    autoaccum.fit(
        model,
        [{"input_ids": part, "labels": part} for part in tokens.split(SAMPLES)],
        SAMPLES,
        micro_batch=MICRO_BATCH,
        optimizer=optimizer,
        device="cpu",
        precision="bf16",
        cache=False,
        progress=False,
        **options,
    )
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    numbers = sum(parameter.numel() for parameter in matrices)
    state = sum(
        value.numel() * value.element_size()
        for parameter in matrices
        for value in made[0].state[parameter].values()
        if isinstance(value, torch.Tensor)
    )
    weights = sum(parameter.numel() * parameter.element_size() for parameter in matrices)
    return held_out_loss(model), (weights / numbers, state / numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    first, results = next(iter(WAYS)), {}
    for way in WAYS:
        losses, bytes_each = zip(*(trained(way, options.updates, seed) for seed in range(options.seeds)), strict=True)
        weights, state = bytes_each[0]
        more = [
            loss - other for loss, other in zip(losses, results.get(first, {"losses": losses})["losses"], strict=True)
        ]
        results[way] = {"losses": losses, "more": more, "weights": weights, "state": state}
        print(f"{way}: {losses}", flush=True)
    print(
        f"\n| {options.updates} updates | weights | optimizer's state | held-out loss | more than the first (range) |"
    )
    print("|---|---|---|---|---|")
    for way, found in results.items():
        mean, more = statistics.mean(found["losses"]), found["more"]
        gap = "" if way == first else f"{statistics.mean(more):+.4f} ({min(more):+.4f} to {max(more):+.4f})"
        print(f"| {way} | {found['weights']:.2f} | {found['state']:.2f} | {mean:.3f} | {gap} |")
    machine = processor()
    print(f"\n{machine}, torch {torch.__version__}, Python {platform.python_version()}, {options.seeds} seeds")
    if options.out is not None:
        record = {"machine": machine, "torch": torch.__version__, "updates": options.updates, "results": results}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
