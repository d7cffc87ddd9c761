"""How often memory runs out within a pass of a sharded model, beside a neighbour that takes memory at random.

Two ranks by gloo, each on a simulated device of its own, train texts of unlike length with an `Accumulator`. What a
rank's allocator has taken stays its own until it gives its cache back, as before every window here. The neighbour
changes its mind at random allocations, also in the middle of passes, and gets what is free. A window that ends within
a pass ends all ranks, which start again with the next one.

    python benchmarks/fsdp_neighbour.py             # as it is
    python benchmarks/fsdp_neighbour.py --unasked   # without asking for a pass's memory before it
"""

import argparse
import contextlib
import io
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import autoaccum
from autoaccum._memory import simulated
from autoaccum._records import MemoryReading

ROOT = Path(__file__).resolve().parents[1]
CAPACITY, WISHES = 1_500_000, 900_000  # bytes of the device, and the most that the neighbour wants
CHANGES = 0.02  # the neighbour's changes for each allocation
SAMPLES, LENGTH, WIDTH, CLASSES = 12, 24, 32, 50


class Ledger(simulated._Ledger):  # type: ignore[misc, no-untyped-call]
    """Counts as a device with a cache does, which a neighbour shares."""

    def __init__(self, backend: "Shared") -> None:
        super().__init__(backend)
        self.held_bytes = self.neighbour_bytes = 0
        self._chance = backend.chance

    def change(self) -> None:
        """Let the neighbour want something else."""
        self.neighbour_bytes = min(self._chance.randrange(WISHES), CAPACITY - self.held_bytes)

    def check(self, extra_bytes: int) -> None:
        """Take `extra_bytes` from the cache or else from the device, or raise `torch.OutOfMemoryError`."""
        if self._chance.random() < CHANGES:
            self.change()
        wanted = self.live_bytes + extra_bytes
        if wanted > self.held_bytes and self.allowed_bytes <= CAPACITY:
            if wanted > CAPACITY - self.neighbour_bytes:
                raise simulated._out_of_memory("device", extra_bytes, CAPACITY - self.neighbour_bytes, self.live_bytes)
            self.held_bytes = wanted


class Shared(autoaccum.Simulated):
    """A simulated device with a cache and a neighbour."""

    def __init__(self, seed: int) -> None:
        super().__init__(CAPACITY)
        self.chance = random.Random(seed)  # noqa: S311 - no secret

    @contextlib.contextmanager
    def counted(self, limit_bytes: int | None) -> Iterator[None]:
        """Count as `Simulated`, beside the neighbour."""
        if self._ledger is None:
            self._ledger = Ledger(self)
        with super().counted(limit_bytes):
            yield

    def reading(self) -> MemoryReading:
        """Return the memory as it is beside the neighbour."""
        found, taken = super().reading(), 0 if self._ledger is None else self._ledger.neighbour_bytes
        return replace(found, free_bytes=max(0, found.free_bytes - taken))

    def release(self) -> None:
        """Give the cache back; time passes, in which the neighbour wants something else."""
        super().release()
        if self._ledger is not None:
            self._ledger.held_bytes = self._ledger.live_bytes
            self._ledger.change()


def loss(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def padded(texts):
    inputs, targets = zip(*texts, strict=True)
    targets = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
    return nn.utils.rnn.pad_sequence(inputs, batch_first=True), targets


def windows(rank, _size, seed, windows, *, is_asked):
    """Train so many windows; return how many were done, by the error that ended them, and what they were cut into."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    memory, chance = Shared(1000 * seed + rank), torch.Generator().manual_seed(10 * seed + rank)
    optimizer = torch.optim.Adam(model.parameters())
    asked = contextlib.nullcontext() if is_asked else mock.patch.object(Shared, "secure", return_value=None)
    cuts, failures = [], 0
    with contextlib.redirect_stderr(io.StringIO()), asked:
        accumulator = autoaccum.Accumulator(
            model, loss=loss, device=memory, precision="fp32", split=autoaccum.ListOfSamples(padded)
        )
        for number in range(windows):
            lengths = torch.randint(1, LENGTH, (SAMPLES,), generator=chance).tolist()
            texts = [(torch.randn(one, WIDTH), torch.randint(CLASSES, (one,))) for one in lengths]
            memory.release()
            try:
                report = accumulator.backward(texts)
            except (autoaccum.StartAgainError, autoaccum.RankFailedError, autoaccum.DoesNotFitError) as error:
                return number, type(error).__name__, cuts, failures
            cuts.append(len(report.micro_batches))
            failures += report.oom_events
            optimizer.step()
            optimizer.zero_grad()
    return windows, None, cuts, failures


def main() -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from support.ranks.pool import RankPool  # noqa: PLC0415 - each rank imports this file too

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--unasked", action="store_true", help="do not ask for a pass's memory before it")
    given = parser.parse_args()
    done = seed = within = before = 0
    ends: dict[str, int] = {}
    passes: list[int] = []
    pool = RankPool(2)
    while done < given.windows:
        seed += 1
        asked = {"is_asked": not given.unasked, "size": 2, "wait_s": 20}
        answers = pool.answers("benchmarks.fsdp_neighbour:windows", seed, given.windows - done, **asked)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        count = min(answer[0] for answer in answers)
        errors = {answer[1] for answer in answers} - {None}
        if errors:
            end = "StartAgainError" if "StartAgainError" in errors else min(errors)
            ends[end] = ends.get(end, 0) + 1
            within += 1
        done += count + bool(errors)
        before += max(answer[3] for answer in answers)
        passes += answers[0][2]
    pool.close()
    print(
        json.dumps(
            {
                "windows": done,
                "ended within a pass": within,
                "by": ends,
                "lacked memory before a pass": before,
                "mean number of passes": round(sum(passes) / max(len(passes), 1), 1),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
