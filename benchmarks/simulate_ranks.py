"""Models the cost of updates on up to 1,000 ranks: agreement, reduction, and waiting for the slowest.

    python benchmarks/simulate_ranks.py [--ranks 8 64 1000] [--bandwidth-gb-s 25] [...] [--page docs/scaling.md]

It prints a table for assumptions about network, model and ranks; `World` has the defaults and their sources. No process
is started and nothing is measured: the table shows which cost is the largest, not a promise.

With P ranks, latency a (s), bandwidth B (bytes/s) and messages of m bytes:

- all_gather of m bytes per rank, by a ring, as in gloo: (P - 1) (a + m / B). By a tree (recursive doubling, where
  the amount doubles in each round): ceil(log2 P) a + (P - 1) m / B.
- all_reduce of m bytes, by a ring: 2 (P - 1) a + 2 (P - 1) / P m / B. By a tree (up, then down):
  2 ceil(log2 P) (a + m / B).
- agreement: two all_gathers of 512 bytes per rank and an all_reduce of a loss.
- reduction: an all_reduce by a ring for each bucket of the gradient, one after another.
- work of a rank: its samples times its seconds per sample, and a fixed cost per micro-step. Seconds per sample are
  lognormal over ranks (lasting: what kind of card, how cooled) times lognormal over windows (passing), both with
  mean 1. A rank with less memory uses smaller micro-batches, so more micro-steps.
- update: the time of the slowest rank, the agreement and the reduction. Its efficiency is the time that all samples
  would take without waiting, messages and micro-steps, divided by its time.

Costs of rings and trees: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005), without the time to add numbers.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from autoaccum._distributed.load_balance import cut

from autoaccum._distributed.buckets import BUCKET_BYTES

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- simulation: begin -->", "<!-- simulation: end -->"
MESSAGE_BYTES = 512  # the message of a rank in an exchange, ranks._MESSAGE_BYTES


@dataclass(frozen=True)
class World:
    """The assumptions; each is an argument of the command line.

    Attributes:
        host_latency_us: Of one message between hosts. 20: TCP on Ethernet, as used by gloo (an assumption).
        host_bandwidth_gb_s: Of one rank to the next, in 10^9 bytes a second. 1.25: 10 Gbit/s Ethernet.
        latency_us: Of one message between devices. 5: a network that cards write to directly (an assumption).
        bandwidth_gb_s: Of one device to the next. 25: 200 Gbit/s for each card.
        bucket_mb: Reduced at once, in 10^6 bytes. The default is that of `_distributed/buckets.py`, 25 MiB.
        gradient_mb: Bytes of the gradient in 10^6. 400: 100 million parameters in float32.
        samples: Samples per window and rank, with equal shares.
        micro_batch: Samples at once on a rank.
        small_micro_batch: The same on a rank with less memory.
        small_share: The share of ranks with less memory, 0 to 1.
        sample_ms: The time of a sample, on average.
        micro_step_ms: The time of each micro-step in addition to its samples. 1: bookkeeping (docs/overhead.md: 0.1 to
            0.4 ms) and starting kernels.
        lasting: Spread of speed over ranks, as the standard deviation of its logarithm. 0.05: cards of one kind (an
            assumption; 0.3 for mixed kinds).
        passing: The same over the windows of a rank. 0.02: other work, clocks that move (an assumption).
        windows: The number of windows to average.
    """

    host_latency_us: float = 20.0
    host_bandwidth_gb_s: float = 1.25
    latency_us: float = 5.0
    bandwidth_gb_s: float = 25.0
    bucket_mb: float = BUCKET_BYTES / 1e6
    gradient_mb: float = 400.0
    samples: int = 32
    micro_batch: int = 8
    small_micro_batch: int = 4
    small_share: float = 0.1
    sample_ms: float = 10.0
    micro_step_ms: float = 1.0
    lasting: float = 0.05
    passing: float = 0.02
    windows: int = 200


@dataclass(frozen=True)
class Found:
    """The result for one world, in seconds per update.

    Attributes:
        agreement_s: Exchanges and losses.
        reduction_s: Reducing gradients.
        work_s: The work of a rank, on average.
        waiting_s: The wait of a rank for the slowest, on average.
        efficiency: The time of the work, divided and cut without loss, over that of an update.
    """

    agreement_s: float
    reduction_s: float
    work_s: float
    waiting_s: float
    efficiency: float


def all_gather_s(ranks: int, size: float, latency_s: float, bytes_per_s: float, *, tree: bool = False) -> float:
    """Return the time until every rank has every message."""
    rounds = math.ceil(math.log2(ranks)) if tree else ranks - 1
    return rounds * latency_s + (ranks - 1) * size / bytes_per_s


def all_reduce_s(ranks: int, size: float, latency_s: float, bytes_per_s: float, *, tree: bool = False) -> float:
    """Return the time until every rank has the sum."""
    if tree:
        return 2 * math.ceil(math.log2(ranks)) * (latency_s + size / bytes_per_s)
    return 2 * (ranks - 1) * latency_s + 2 * (ranks - 1) / ranks * size / bytes_per_s


def agreement_s(ranks: int, world: World, *, tree: bool = False) -> float:
    """Return the time of two exchanges and the sum of a loss."""
    latency_s, bytes_per_s = world.host_latency_us * 1e-6, world.host_bandwidth_gb_s * 1e9
    exchange = all_gather_s(ranks, MESSAGE_BYTES, latency_s, bytes_per_s, tree=tree)
    return 2 * exchange + all_reduce_s(ranks, 4, latency_s, bytes_per_s, tree=tree)


def agreement_by_sums_s(ranks: int, world: World) -> float:
    """Return the time of two all_reduces of 64 bytes, by trees, in place of the exchanges."""
    latency_s, bytes_per_s = world.host_latency_us * 1e-6, world.host_bandwidth_gb_s * 1e9
    return 2 * all_reduce_s(ranks, 64, latency_s, bytes_per_s, tree=True)


def reduction_s(ranks: int, world: World) -> float:
    """Return the time to reduce the gradients, bucket by bucket."""
    buckets = math.ceil(world.gradient_mb / world.bucket_mb)
    # By a ring, the bytes of all buckets take as long as in one; each bucket has its own messages.
    size = world.gradient_mb * 1e6 / buckets
    return buckets * all_reduce_s(ranks, size, world.latency_us * 1e-6, world.bandwidth_gb_s * 1e9)


def work_s(samples: np.ndarray, micro_batches: np.ndarray, sample_s: np.ndarray, micro_step_s: float) -> np.ndarray:
    """Return the time that each rank works on its share of a window."""
    return samples * sample_s + np.ceil(samples / micro_batches) * micro_step_s


def lognormal(chance: np.random.Generator, spread: float, size: tuple[int, ...] | int) -> np.ndarray:
    """Return numbers with mean 1."""
    return np.exp(chance.normal(-(spread**2) / 2, spread, size))


def simulate(ranks: int, world: World, *, by_speed: bool, seed: int = 0) -> Found:
    """Simulate updates and return their cost.

    Args:
        ranks: The number of ranks.
        world: The assumptions.
        by_speed: Whether windows are divided by the lasting speed of ranks, including micro-steps.
        seed: Seed of the random draws.
    """
    chance = np.random.default_rng(seed)
    lasting = lognormal(chance, world.lasting, ranks) * world.sample_ms * 1e-3
    small = chance.permutation(ranks) < round(world.small_share * ranks)
    micro_batches = np.where(small, world.small_micro_batch, world.micro_batch)
    micro_step_s = world.micro_step_ms * 1e-3
    weights = 1.0 / (lasting + micro_step_s / micro_batches) if by_speed else np.ones(ranks)
    samples = np.diff(cut(world.samples * ranks, weights.tolist()))
    took = np.stack(
        [
            work_s(samples, micro_batches, lasting * lognormal(chance, world.passing, ranks), micro_step_s)
            for _ in range(world.windows)
        ]
    )
    agreement, reduction = agreement_s(ranks, world), reduction_s(ranks, world)
    slowest = took.max(1).mean()
    update = slowest + agreement + reduction
    # Samples per second of all ranks together without waiting.
    ideal = world.samples * ranks / float((1.0 / lasting).sum())
    return Found(agreement, reduction, float(took.mean()), float(slowest - took.mean()), ideal / float(update))


def table(world: World, sizes: list[int]) -> str:
    """Return the table of docs/scaling.md."""
    columns = ("ranks", "agreement, ms", "by trees, ms", "by sums, ms", "heard in an exchange", "reduction, ms")
    columns += ("waiting, equal shares, ms", "by speed, ms", "efficiency, equal shares", "by speed")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for ranks in sizes:
        equal, by_speed = (simulate(ranks, world, by_speed=one) for one in (False, True))
        said_s = [equal.agreement_s, agreement_s(ranks, world, tree=True), agreement_by_sums_s(ranks, world)]
        cells = [f"{1e3 * one:.2f}" for one in said_s] + [f"{ranks * MESSAGE_BYTES / 1024:.0f} KiB"]
        cells += [f"{1e3 * one:.0f}" for one in (equal.reduction_s, equal.waiting_s, by_speed.waiting_s)]
        cells += [f"{one.efficiency:.1%}" for one in (equal, by_speed)]
        lines.append(f"| {ranks:,} | {' | '.join(cells)} |")
    assumed = ", ".join(f"{field.name} {getattr(world, field.name):.4g}" for field in fields(world))
    return "\n".join([*lines, "", f"Assumed: {assumed}."])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--page", type=Path, help="a page whose table to replace, such as docs/scaling.md")
    for field in fields(World):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args()
    world = replace(World(), **{field.name: getattr(options, field.name) for field in fields(World)})
    found = table(world, options.ranks)
    print(found)
    if options.page is not None:
        before, rest = options.page.read_text().split(BEGIN)
        options.page.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
