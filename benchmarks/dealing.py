"""Measures how evenly a window's samples of unlike length are dealt out to ranks, in predicted cost.

For each spread of lengths (log-normal, of mean 200), number of ranks and of samples a rank: what the busiest rank has
to do over the least that it can have (the mean of all ranks, or the longest sample), as samples are dealt out, and as
ranks load them, in equal numbers. Means over the windows, with the worst window in brackets. 2 and 4 ranks are
processes that send each other the samples, and count those that they hold in the end; 64 ranks are simulated. The cost
of a sample is linear in its length, or has a square that is as much at 512 tokens, or is fitted to timed micro-batches
of a small Llama, as in `fit`.

    python benchmarks/dealing.py [--windows 50] [--out benchmarks/results/dealing.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from measuring import keep, machine
from tokens import VOCABULARY, llama, padded
from torch import distributed, multiprocessing

import autoaccum
from autoaccum._data.batches import Window
from autoaccum._distributed.dealing import Dealer, busiest, least, shares
from autoaccum._distributed.process_group import all_ranks
from autoaccum._memory.host import Host
from autoaccum._sizing.costs import BY_ELEMENTS, Cost, Costs, fitted
from autoaccum._system.notices import Notices

SPREADS = (0.29, 0.6, 1.0)
RANKS, SIMULATED = (2, 4), 64
EACH = (8, 16, 32)
MEAN, SHORTEST, LONGEST = 200, 8, 4096
WIDTHS = (64, 256, 1024, 2048)
TIMES = 3
WITH_SQUARE = Cost(1.0, 1 / 512)


def lengths(spread, number, chance):
    deviation = math.sqrt(math.log(1 + spread**2))
    drawn = (chance.lognormvariate(math.log(MEAN) - deviation**2 / 2, deviation) for _ in range(number))
    return [min(max(SHORTEST, int(one)), LONGEST) for one in drawn]


def windows(spread, number, count):
    chance = random.Random(f"{spread} {number}")  # noqa: S311 - no secret
    return [lengths(spread, number, chance) for _ in range(count)]


def timed():
    """Return the costs of samples of the Llama, from micro-batches that are timed."""
    torch.set_num_threads(1)
    model, costs = llama(), Costs()
    for width, tokens in [(WIDTHS[0], 2048), *itertools.product(WIDTHS * TIMES, (2048, 6144))]:
        samples = tokens // width
        batch = padded([torch.randint(1, VOCABULARY, (width,)) for _ in range(samples)])
        began = time.process_time()
        model(**batch).loss.backward()
        costs.note(samples, width, time.process_time() - began)
    return costs


def of_cost(cost):
    """Return costs that a fit finds to be this one."""
    # In hours, in place of seconds: samples are sent however little that gains.
    return Costs.of_state([[1, width, 3600 * cost.of(width)] for width in WIDTHS])


def held(rank, size, folder, asked):
    """Deal out windows on a rank, and write down which lengths it holds in the end."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    split = autoaccum.ListOfSamples(list)
    dealer = Dealer(all_ranks(Host()), split, lambda: False, lambda _: False, Notices())
    found = []
    for cost, window in asked:
        each = len(window) // size
        mine = [torch.zeros(length, dtype=torch.int64) for length in window[rank * each : (rank + 1) * each]]
        part = Window([mine], split)
        dealer.deal(part, of_cost(Cost(*cost)))
        found.append([len(one) for samples in part.raw() for one in samples])
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def on_processes(size, asked):
    """Return the lengths that each of so many processes holds, for each window."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(held, (size, folder, asked), size)
        of_ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    return list(zip(*of_ranks, strict=True))


def simulated(size, asked):
    """Return the same, of ranks that are none."""
    found = []
    for cost, window in asked:
        loaded = [at * size // len(window) for at in range(len(window))]
        owners = shares([Cost(*cost).of(length) for length in window], loaded, size)
        found.append(
            [[length for length, owner in zip(window, owners, strict=True) if owner == rank] for rank in range(size)]
        )
    return found


def measured(size, costs, count):
    """Yield a row for each cost, spread and number of samples a rank."""
    cases = list(itertools.product(costs.items(), SPREADS, EACH))
    asked = [
        (tuple(cost), window) for (_, cost), spread, each in cases for window in windows(spread, size * each, count)
    ]
    dealt = iter((simulated if size == SIMULATED else on_processes)(size, asked))
    for (name, cost), spread, each in cases:
        ratios, before = [], []
        for window in windows(spread, size * each, count):
            loads = [sum(map(cost.of, of_rank)) for of_rank in next(dealt)]
            every = [cost.of(length) for length in window]
            assert math.isclose(sum(loads), sum(every), rel_tol=1e-9), "samples are missing"
            ratios.append(max(loads) / least(every, size))
            before.append(busiest(every, [at // each for at in range(len(window))], size) / least(every, size))
        yield {
            "cost": name, "spread": spread, "ranks": size, "samples_a_rank": each, "dealt": statistics.mean(ratios),
            "dealt_worst": max(ratios), "as_loaded": statistics.mean(before), "as_loaded_worst": max(before),
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    os.environ.setdefault("AUTOACCUM_CACHE_DIR", "")
    fit = fitted(timed().measured())
    costs = {"linear": BY_ELEMENTS, "with a square": WITH_SQUARE, "fitted": fit}
    even = fit.linear / fit.quadratic if fit.quadratic else math.inf
    print(f"fitted: {fit.linear:.3g} s a token, {fit.quadratic:.3g} s a token squared (equal at {even:.0f} tokens)\n")
    print("| cost | CV of lengths | ranks | samples a rank | busiest over least (worst) | as loaded (worst) |")
    print("|---|---|---|---|---|---|")
    rows = []
    for size in (*RANKS, SIMULATED):
        for row in measured(size, costs, options.windows):
            rows.append(row)
            ranks = f"{size}, simulated" if size == SIMULATED else size
            print(
                f"| {row['cost']} | {row['spread']} | {ranks} | {row['samples_a_rank']} | {row['dealt']:.3f} "
                f"({row['dealt_worst']:.3f}) | {row['as_loaded']:.2f} ({row['as_loaded_worst']:.2f}) |",
                flush=True,
            )
    print(f"\nworst of all: {max(row['dealt_worst'] for row in rows):.3f}")
    keep(options.out, {"machine": machine(), "windows": options.windows, "fitted": list(fit), "rows": rows})


if __name__ == "__main__":
    main()
