"""Measures loops over texts of unlike length, side by side on a device near its limit.

For three spreads of length (log-normal, of mean 80), five loops train a small Llama on the same texts, in optimizer
steps of 64 texts (by hand: of as many batches as make 64 or more), with the same seed and rate, on a simulated device
that holds 6 of the longest texts at once:

* lists of samples in `fit`, and padded batches of 8 in `fit`: nothing is set;
* a fixed batch: so many rows at once, padded as they come;
* sorted buckets: the same with batches by Transformers' `LengthGroupedSampler`;
* online-dynamic-batching (0.1.2, its own environment groups the texts): a token budget.

The rows, and the budget, are the most with which the first 4 steps run through, as people find such numbers. Later
batches that do not fit count as failures, of which a loop by hand leaves the texts out, where a run would have ended.
`fit` makes such a step again.

Prints the tokens of texts per second against the fixed batch (the median of the steps with its quartiles), the tokens
computed for one of a text in these steps, the failures of all steps, and the loss on other texts at the end. The first
8 steps, in which `fit` searches, are left out of the former two. Seconds are those of the processor, on one thread, so
that other work on the machine counts little; counting memory is included. With fewer than 40 steps `fit` does not
compare sizes by the clock.

    python benchmarks/tokens.py [--steps 20] [--page docs/batches.md] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from measuring import keep, machine, quartiles, told, write_into
from torch import nn

import autoaccum

SPREADS = (0.29, 0.6, 1.0)
MEAN, SHORTEST, LONGEST = 80, 8, 512
SAMPLES, SURVIVED, WARM_UP = 64, 4, 8
OF_LOADER = 8
HELD_AT_ONCE = 6
VOCABULARY, PAD = 256, 0
ODB = Path(__file__).parent.parent / ".venv-odb/bin/python"
HELD_OUT = 64
COLUMNS = {"computed_per_token_later": 2, "failures": 0, "left_out": 0, "loss": 2}  # with digits


def texts(spread, count, seed=0):
    """Return texts of log-normal length in which each token is one of three that may follow the last."""
    chance = random.Random(f"{spread} {seed}")  # noqa: S311 - no secret
    deviation = math.sqrt(math.log(1 + spread**2))
    found = []
    for _ in range(count):
        drawn = int(chance.lognormvariate(math.log(MEAN) - deviation**2 / 2, deviation))
        walk = [chance.randrange(VOCABULARY)]
        for _ in range(min(max(drawn, SHORTEST), LONGEST) - 1):
            walk.append((walk[-1] + chance.choice((1, 5, 11))) % VOCABULARY)
        found.append(torch.tensor(walk).clamp_(min=1))
    return found


def padded(some):
    ids = nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=PAD)
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def llama(vocabulary=VOCABULARY, width=96, layers=2):
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - takes seconds

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, use_cache=False,
        )
    )  # fmt: skip


def capacity():
    """Return the bytes of a device that holds the training and so many of the longest texts."""
    model, memory = llama(), autoaccum.Simulated("16GiB")
    with memory.limited(None):
        batch = padded([torch.ones(LONGEST, dtype=torch.int64)])
        model(**batch).loss.backward()
        held = memory.reading().used_bytes
        memory.reset_peak()
        model(**batch).loss.backward()
        each = memory.peak_bytes() - held
    return 3 * held + HELD_AT_ONCE * each  # gradients, and AdamW's state


class Counted:
    """A model, and what it has computed, step by step.

    Attributes:
        computed: Tokens that the model has computed in training.
        later: Those of the steps that are timed.
        ended: When each step ended.
        real: The tokens of its texts.
        failures: How often memory ran out.
        left_out: Texts that were left out.
    """

    def __init__(self):
        self.model = llama()
        self.computed, self.later, self.failures, self.left_out = 0, 0, 0, 0
        self.ended, self.real = [], []
        self.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _, __, named):
        if self.model.training:
            self.computed += named["input_ids"].numel()
            self.later += named["input_ids"].numel() * (len(self.ended) > WARM_UP)

    def note(self, real):
        """Note that a step of so many tokens of text has ended."""
        self.ended.append(time.process_time())
        self.real.append(real)


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=2e-3)


def by_hand(every, batches, room):
    """Train on batches, each some places of texts, in optimizer steps of as many batches as make 64 texts."""
    found, memory = Counted(), autoaccum.Simulated(room)
    optimizer = optimizer_of(found.model.parameters())
    with memory.limited(None):
        for step in steps_of(batches):
            counted = sum(len(every[place]) - 1 for places in step for place in places)
            done = 0  # tokens of texts whose batch did not fail
            for places in step:
                try:
                    found.model(
                        **padded([every[place] for place in places]), num_items_in_batch=counted
                    ).loss.backward()
                except torch.OutOfMemoryError:
                    found.failures, found.left_out = found.failures + 1, found.left_out + len(places)
                else:
                    done += sum(len(every[place]) for place in places)
            optimizer.step()
            optimizer.zero_grad()
            found.note(done)
    return found


def steps_of(batches):
    """Return batches by optimizer step."""
    steps, held = [[]], 0
    for places in batches:
        if held >= SAMPLES:
            steps, held = [*steps, []], 0
        steps[-1].append(places)
        held += len(places)
    return steps


class Clock(autoaccum.Callback):
    """Notes when steps end, which take the texts in turn."""

    def __init__(self, found, every):
        self.found, self.every = found, every

    def on_step(self, *_, **__):
        """Note the time."""
        at = len(self.found.ended) * SAMPLES
        self.found.note(sum(map(len, self.every[at : at + SAMPLES])))


def by_fit(every, room, *, as_lists):
    """Train by `fit`, with nothing set."""
    found = Counted()
    loader = torch.utils.data.DataLoader(every, batch_size=OF_LOADER, collate_fn=list if as_lists else padded)
    result = autoaccum.fit(
        found.model,
        loader,
        target_batch=SAMPLES,
        optimizer=optimizer_of,
        device=autoaccum.Simulated(room),
        precision="fp32",
        split=autoaccum.ListOfSamples(padded) if as_lists else None,
        callbacks=[Clock(found, every)],
        progress=False,
    )
    found.failures = result.oom_events
    return found


# --- numbers that people set ------------------------------------------------------------------------------------------


def most_that_survives(every, numbers, batches_of, room):
    """Return the largest number whose batches fit in the first steps, by the one of most computed tokens."""
    for number in sorted(numbers, reverse=True):
        first = [places for step in steps_of(batches_of(number))[:SURVIVED] for places in step]
        widest = sorted(first, key=lambda places: len(places) * max(len(every[place]) for place in places))[-3:]
        if not by_hand(every, [*widest, *widest], room).failures:  # again, beside the optimizer's state
            return number
    raise SystemExit("not even the smallest number fits")


def fixed(every, rows):
    return [list(range(at, min(at + rows, len(every)))) for at in range(0, len(every), rows)]


def sorted_buckets(every, rows):
    from transformers.trainer_pt_utils import LengthGroupedSampler  # noqa: PLC0415 - takes seconds

    lengths = [len(one) for one in every]
    sampler = LengthGroupedSampler(rows, lengths=lengths, generator=torch.Generator().manual_seed(0))
    order = list(sampler)
    return [order[at : at + rows] for at in range(0, len(order), rows)]


def online_dynamic(every, budget):
    asked = json.dumps({"lengths": [len(one) for one in every], "token_budget": budget})
    script = str(Path(__file__).with_name("odb_groups.py"))
    done = subprocess.run([ODB, script], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"online-dynamic-batching has failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
BUDGETS = tuple(512 * one for one in (1, 2, 3, 4, 5, 6, 8, 10, 12))


def loops(every, room):
    """Return the loops, each with the number that was set for it; None for none."""
    of_rows = {"fixed batch": fixed, "sorted buckets": sorted_buckets}
    found = {
        "lists of samples in fit": (None, lambda: by_fit(every, room, as_lists=True)),
        "padded batches in fit": (None, lambda: by_fit(every, room, as_lists=False)),
    }
    for name, batches_of in of_rows.items():
        rows = most_that_survives(every, ROWS, lambda number, of=batches_of: of(every, number), room)
        found[name] = str(rows), lambda of=batches_of, rows=rows: by_hand(every, of(every, rows), room)
    groups = {}

    def grouped(budget):
        if budget not in groups:
            groups[budget] = online_dynamic(every, budget)
        return groups[budget]

    if ODB.exists():
        budget = most_that_survives(every, BUDGETS, grouped, room)
        found["online-dynamic-batching"] = str(budget), lambda: by_hand(every, grouped(budget), room)
    return found


# --- the comparison ---------------------------------------------------------------------------------------------------


def loss_of(model, held_out):
    model.eval()
    with torch.no_grad():
        return float(model(**padded(held_out)).loss)


def speeds_of(found):
    """Return the tokens of texts per second in each step after the first ones."""
    seconds = [end - begin for begin, end in itertools.pairwise(found.ended)]
    return [real / each for real, each in zip(found.real[1:], seconds, strict=True)][WARM_UP:]


def compared(spread, steps, room):
    """Return what each loop has done, in words and numbers."""
    torch.set_num_threads(1)
    every, held_out = texts(spread, SAMPLES * steps), texts(spread, HELD_OUT, seed=1)
    rows = []
    for name, (by_hand_set, train) in loops(every, room).items():
        found = train()
        row = {
            "spread": spread,
            "loop": name,
            "set": by_hand_set,
            "tokens_a_second": quartiles(speeds_of(found)),
            "computed_per_token": found.computed / sum(map(len, every)),
            "computed_per_token_later": found.later / sum(found.real[WARM_UP + 1 :]),
            "failures": found.failures,
            "left_out": found.left_out,
            "loss": loss_of(found.model, held_out),
        }
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    (base,) = (row["tokens_a_second"][1] for row in rows if row["loop"] == "fixed batch")
    return [row | {"ratio": [one / base for one in row["tokens_a_second"]]} for row in rows]


def table(rows):
    """Return a row for each loop, with what it has for each spread."""
    lines = [
        "| loop | set by hand | tokens/s (quartiles) | computed per token | failures | texts lost | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for loop in dict.fromkeys(row["loop"] for row in rows):
        own = [row for row in rows if row["loop"] == loop]
        cells = (
            [told(row["ratio"]) for row in own],
            *([f"{row[name]:.{digits}f}" for row in own] for name, digits in COLUMNS.items()),
        )
        by_hand = " / ".join(row["set"] for row in own) if own[0]["set"] else "nothing"
        lines.append("| " + " | ".join([loop, by_hand, *map(" / ".join, cells)]) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--page", type=Path, default=None, help="write the table between the markers of this page")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    os.environ["AUTOACCUM_CACHE_DIR"] = ""  # each run searches anew
    torch.set_num_threads(1)
    room = capacity()
    print(f"a device of {room / 2**20:.1f} MiB", file=sys.stderr)
    with ProcessPoolExecutor(len(SPREADS), get_context("spawn")) as pool:  # a process for each spread
        found = pool.map(compared, SPREADS, [options.steps] * len(SPREADS), [room] * len(SPREADS))
        rows = list(itertools.chain.from_iterable(found))
    text = table(rows)
    print(text)
    if options.page is not None:
        write_into(options.page, text, "tokens")
    keep(
        options.out,
        {
            "machine": machine(("transformers",)),
            "capacity": room,
            "steps": options.steps,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
