"""Measures what lists of samples save on texts of unlike length, beside the loops that people have.

The lengths are log-normal, as in common instruction data. Three loops make the same number of steps of so many
samples each, with as many rows on the device at once: one that pads each batch as it comes, one whose batches are drawn
by Transformers' `group_by_length`, and lists of samples, which each micro-batch pads. They run in turn. Prints and
writes the texts' tokens per second against the loop that pads as it comes, by the median of the turns with its
quartiles, and how many tokens each computes for one of a text. The first eight steps, in some of which autoaccum
checks what it read of the loss, are left out.

    python benchmarks/tokens.py [--steps 7] [--out benchmarks/results/tokens.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from measuring import processor, quartiles, spread

import autoaccum

# Of the natural logarithm of a length; half of the texts have 90 tokens or fewer.
MEAN, DEVIATION, LONGEST = 4.5, 0.9, 512
SAMPLES, ROWS = 64, 8
WARM_UP = 8
VOCABULARY = 2000
PAD = 0


def texts(count):
    chance = torch.Generator().manual_seed(0)
    drawn = torch.empty(count).log_normal_(MEAN, DEVIATION, generator=chance)
    lengths = drawn.long().clamp_(8, LONGEST).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=chance) for length in lengths]


def padded(some):
    ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=PAD)
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - takes seconds

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=6,
        )
    )  # fmt: skip


class Counted:
    """A model with its optimizer, and what it has computed."""

    def __init__(self, device):
        self.device = device
        self.model = llama().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.computed = 0
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _, __, named):
        self.computed += named["input_ids"].numel()


class ByHand(Counted):
    """The loop that people write: batches of so many rows, and the mean over the tokens of the step."""

    def step(self, batches):
        """Make one step."""
        counted = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        for batch in batches:
            here = {name: tensor.to(self.device) for name, tensor in batch.items()}
            self.model(**here, num_items_in_batch=counted).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class ByList(Counted):
    """A `Runner` that takes lists of samples."""

    split = autoaccum.ListOfSamples(padded)

    def __init__(self, device):
        super().__init__(device)
        self.runner = autoaccum.Runner(
            self.model,
            self.optimizer,
            autoaccum.plan(SAMPLES, ROWS),
            device=device,
            precision="fp32",
            split=self.split,
        )

    def step(self, window):
        """Make one step."""
        self.runner.step(window)


def batches_of(some, rows=ROWS):
    return [padded(some[at : at + rows]) for at in range(0, len(some), rows)]


def real_tokens(window):
    """Return the tokens of the texts in batches."""
    batches = [window.cut(0, window.samples)] if isinstance(window, autoaccum.Window) else window
    return sum(int(batch["attention_mask"].sum()) for batch in batches)


def grouped(every):
    """The order in which Transformers' Trainer takes texts with `group_by_length`."""
    from transformers.trainer_pt_utils import LengthGroupedSampler  # noqa: PLC0415 - takes seconds

    lengths = [len(one) for one in every]
    sampler = LengthGroupedSampler(ROWS, lengths=lengths, generator=torch.Generator().manual_seed(0))
    return [every[index] for index in sampler]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    steps = options.steps + WARM_UP
    every = texts(SAMPLES * (steps + 1))
    in_turn = [every[at : at + SAMPLES] for at in range(0, len(every), SAMPLES)]
    by_group = grouped(every)
    loops = {
        "padded as it comes": (ByHand(device), [batches_of(some) for some in in_turn]),
        "group_by_length": (
            ByHand(device),
            [batches_of(by_group[at : at + SAMPLES]) for at in range(0, len(every), SAMPLES)],
        ),
        "lists of samples": (ByList(device), list(autoaccum.windows(in_turn, SAMPLES, split=ByList.split))),
    }
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    speeds = {name: [] for name in loops}
    counted = {name: [0, 0] for name in loops}
    for number in range(steps):
        for name, (loop, windows) in loops.items():
            real = real_tokens(windows[number])
            loop.computed = 0
            started = time.perf_counter()
            loop.step(windows[number])
            wait()
            if number >= WARM_UP:
                speeds[name].append(real / (time.perf_counter() - started))
                counted[name] = [counted[name][0] + real, counted[name][1] + loop.computed]
    first = next(iter(loops))
    print("| loop | tokens/s against the first (quartiles) | computed for each token of a text |")
    print("|---|---|---|")
    results = {}
    for name in loops:
        ratios = [one / other for one, other in zip(speeds[name], speeds[first], strict=True)]
        real, computed = counted[name]
        results[name] = {"ratio": quartiles(ratios), "computed_per_token": computed / real}
        print(f"| {name} | {spread(ratios)} | {computed / real:.2f} |", flush=True)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    print(f"\n{machine}, torch {torch.__version__}, Python {platform.python_version()}, {options.steps} steps")
    if options.out is not None:
        record = {"machine": machine, "torch": torch.__version__, "steps": options.steps, "results": results}
        options.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
