"""Measures what each rung of `memory=` gives and takes: the largest micro-batch and samples per second under a limit.

A GPT-2, a Llama and a vision transformer train on the CPU under a limit of the process, with nothing saved, with each
rung by name. Each training has a process of its own. Once each has found its sizes, they make a window in turn, and
wait for each other. Prints and writes samples per second against the training that saves nothing, by the median of the
turns with their quartiles, and the largest micro-batch.

    python benchmarks/rungs.py [--turns 9] [--models gpt2 llama vit] [--out benchmarks/results/rungs.json]

A file that is there already keeps the results of models that are not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from overhead import processor

import autoaccum

# Samples of an update.
TARGET = 8
# Windows before those that are timed. Losses are asked what they run over after 1, 3, 7, 15, 31 and 63 windows.
BEFORE = 8


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - takes seconds

    config = GPT2Config(
        vocab_size=32_000, n_embd=128, n_layer=4, n_head=4, n_positions=256, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), of_tokens(32_000, 256)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - takes seconds

    config = LlamaConfig(
        vocab_size=128_000, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    return LlamaForCausalLM(config), of_tokens(128_000, 128)


def vit():
    from torchvision.models import VisionTransformer  # noqa: PLC0415 - takes seconds

    model = VisionTransformer(image_size=96, patch_size=8, num_layers=6, num_heads=3, hidden_dim=192, mlp_dim=768)
    chance = torch.Generator().manual_seed(1)
    return model, (torch.randn(TARGET, 3, 96, 96, generator=chance), torch.randint(1000, (TARGET,), generator=chance))


def of_tokens(vocabulary, length):
    tokens = torch.randint(vocabulary, (TARGET, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


# Each with its limit, in which a few samples fit with nothing saved, and its rungs.
TEXT = ("none", "chunked_loss", "checkpoint", "chunked_loss+checkpoint")
MODELS = {
    "GPT-2, 4 layers, 32,000 classes, 256 tokens": (gpt2, "280MiB", TEXT),
    "Llama, 4 layers, 128,000 classes, 128 tokens": (llama, "600MiB", TEXT),
    "ViT, 6 layers, 145 patches": (vit, "60MiB", ("none", "checkpoint")),
}


class InTurn:
    """A loader that gives the same batch again whenever it is told to on stdin, and ends with stdin."""

    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        while True:
            print("waiting", flush=True)
            if not sys.stdin.readline():
                return
            yield self.batch


class Said(autoaccum.Callback):
    """Prints what each window took."""

    def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
        """Print the window."""
        print(json.dumps({"micro_batch": max(report.micro_batches), "seconds": report.elapsed_s}), flush=True)


def train(name, rung):
    """Train one model with one rung, window by window."""
    make, limit, _ = MODELS[name]
    torch.manual_seed(0)
    model, batch = make()
    os.environ["AUTOACCUM_CACHE_DIR"] = ""  # nothing is remembered
    try:
        result = autoaccum.fit(
            model,
            InTurn(batch),
            TARGET,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            device="cpu",
            memory_limit=limit,
            memory=None if rung == "none" else rung.split("+"),
            progress=False,
            callbacks=[Said()],
        )
    except autoaccum.DoesNotFitError:
        return
    print(json.dumps({"memory": list(result.memory)}), flush=True)


class Training:
    """A training in a process of its own, which makes its windows when it is told to.

    Attributes:
        windows: What each window took; empty if not one sample fits.
    """

    def __init__(self, name, rung):
        command = [sys.executable, __file__, "--train", name, rung]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parent,
        )
        self.windows = []
        self.memory = []
        self._wait()

    def turn(self):
        """Let it make one window; return its seconds, or None if it has ended."""
        if self._process.poll() is not None:
            return None
        made = len(self.windows)
        while len(self.windows) == made:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            if not self._wait():
                return None
        return self.windows[-1]["seconds"]

    def end(self):
        """Let it end."""
        self._process.stdin.close()
        self._wait()
        self._process.wait()

    def _wait(self):
        for line in self._process.stdout:
            if line == "waiting\n":
                return True
            if line.startswith('{"memory"'):
                self.memory = json.loads(line)["memory"]
            elif line.startswith("{"):
                self.windows.append(json.loads(line))
        self._process.wait()
        return False


def measured(name, rungs, turns):
    """Return each rung's training, and the seconds of its windows by turn; those of one that does not fit are None."""
    trainings = {rung: Training(name, rung) for rung in rungs}
    for training in trainings.values():
        for _ in range(BEFORE):
            training.turn()
    seconds = [{rung: training.turn() for rung, training in trainings.items()} for _ in range(turns)]
    for training in trainings.values():
        training.end()
    return trainings, seconds


def row(rung, training, seconds):
    """Return what was found of one rung."""
    ratios = sorted(turn["none"] / turn[rung] for turn in seconds if turn["none"] and turn[rung])
    return {
        "rung": rung,
        "micro_batch": training.windows[-1]["micro_batch"] if training.windows else None,
        "ratio_median": statistics.median(ratios) if ratios else None,
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]] if ratios else None,
    }


def written(one):
    """Return a row of the table."""
    ratio = ""
    if one["ratio_median"] is not None:
        low, high = one["ratio_quartiles"]
        ratio = f"{one['ratio_median']:.2f} ({low:.2f} to {high:.2f})"
    return f"| {one['rung']} | {one['micro_batch'] or 'does not fit'} | {ratio} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    every = [make.__name__ for make, *_ in MODELS.values()]
    parser.add_argument("--models", nargs="+", choices=every, default=every)
    parser.add_argument("--train", nargs=2, metavar=("MODEL", "RUNG"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    if options.train:
        train(*options.train)
        return
    is_there = options.out is not None and options.out.exists()
    results = json.loads(options.out.read_text())["results"] if is_there else {}
    for name, (make, limit, rungs) in MODELS.items():
        if make.__name__ not in options.models:
            continue
        trainings, seconds = measured(name, rungs, options.turns)
        results[name] = [row(rung, training, seconds) for rung, training in trainings.items()]
        print(f"\n{name}, limit {limit}, {TARGET} samples an update\n")
        print("| `memory` | largest micro-batch | samples/s against nothing (quartiles) |")
        print("|---|---|---|")
        print("\n".join(map(written, results[name])), flush=True)
    machine = processor()
    print(f"\n{machine}, torch {torch.__version__}, Python {platform.python_version()}, {options.turns} turns")
    if options.out is not None:
        record = {"machine": machine, "torch": torch.__version__, "turns": options.turns, "results": results}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
