"""Sends SIGKILL at random moments until a run is complete, which must end bit for bit like an undisturbed one.

The tests' script kills one process; here one or both of two ranks are killed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks import Row

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[2] / "tests"
OF_ONE, OF_RANKS = 70, 30
RANKS = (0, 1)
MOST_WINDOWS = 5  # after which a life is ended
LIMIT_S = 300.0
RANK = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import torch
import autoaccum
from support.ranks import training
from support.training.long_runs import bits

folder, rank, meeting = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
)

class Log(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        with (folder / f"log-{rank}").open("a") as log:
            log.write(f"{report.step}\\n")

chance, made = torch.Generator().manual_seed(7), []
loader = torch.utils.data.DataLoader(training.vectors(), batch_size=5, shuffle=True, generator=chance)
training.seeded(rank)
model = training.net(seed=rank, dropout=0.3)
autoaccum.fit(
    model, loader, 16, optimizer=lambda parameters: made.append(training.adam(parameters)) or made[0],
    micro_batch=3, max_steps=24, shard_data=True, device="cpu", progress=False,
    checkpoint=folder / "checkpoints", checkpoint_every=1, callbacks=[Log()],
)
end = bits({"model": model.state_dict(), "optimizer": made[0].state_dict(), "torch": torch.get_rng_state()})
(folder / f"end-{rank}.unfinished").write_text(json.dumps(end))
(folder / f"end-{rank}.unfinished").rename(folder / f"end-{rank}")
"""


def attack(folder: Path, seed: int, share: float) -> list[Row]:
    """Kill runs until each is complete.

    Args:
        folder: Where they write.
        seed: Seed of the moments at which they are killed.
        share: Share of the kills to make.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "AUTOACCUM_RANK_TIMEOUT_S": "20", "AUTOACCUM_CACHE_DIR": ""}
    one, ranks = (max(1, round(number * share)) for number in (OF_ONE, OF_RANKS))
    return [_one_process(folder, seed, one), _two_ranks(folder, random.Random(seed), ranks)]  # noqa: S311


def _one_process(folder: Path, seed: int, kills: int) -> Row:
    import torch  # noqa: PLC0415 - only here

    name = "SIGKILL of one process"
    command = [sys.executable, "-m", "support.faults.kills", str(folder), str(kills), "0", str(seed)]
    paths = os.environ | {"PYTHONPATH": str(TESTS)}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=paths)  # noqa: S603 - fixed
    if ran.returncode != 0:
        return Row(name, kills, (ran.stderr.strip()[-2000:] or f"exit code {ran.returncode}",))
    seen = json.loads((folder / "seen.json").read_text())["SIGKILL"]
    runs = sorted(folder.glob("SIGKILL-*"))
    undisturbed, *ends = (torch.load(run / "end", weights_only=True) for run in (folder / "undisturbed", *runs))
    losses = [f"{run.name} ended elsewhere" for run, end in zip(runs, ends, strict=True) if end != undisturbed]
    note = f"{len(runs)} runs; {sum(number for _, number in seen)} kills while a checkpoint was written"
    return Row(name, sum(done for done, _ in seen), tuple(losses), note)


def _two_ranks(folder: Path, chance: random.Random, kills: int) -> Row:
    name = "SIGKILL of one or both of two ranks"
    undisturbed = Run(folder / "ranks")
    undisturbed.live(chance, is_to_be_killed=False)
    done = both = runs = 0
    losses: list[str] = []
    while done < kills:
        run = Run(folder / f"ranks-{runs}")
        runs += 1
        try:
            while not run.end():
                killed = run.live(chance, is_to_be_killed=done < kills)
                done += killed
                both += killed == len(RANKS)
            if run.end() != undisturbed.end():
                losses.append(f"run {runs - 1} ended elsewhere")
        except RuntimeError as error:
            losses.append(str(error))
            done += 1
    return Row(name, done, tuple(losses), f"{runs} runs; {both} times both, else the other ended by itself")


class Run:
    """A run of two ranks, in as many lives as it takes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lives = folder, 0
        folder.mkdir()

    def end(self) -> list[Any]:
        """Return the result of each rank; nothing while one has none."""
        ends = [self._folder / f"end-{rank}" for rank in RANKS]
        return [json.loads(end.read_text()) for end in ends] if all(end.exists() for end in ends) else []

    def live(self, chance: random.Random, *, is_to_be_killed: bool) -> int:
        """Run one life; return how many ranks were killed.

        Raises:
            RuntimeError: A rank hangs, or ended unexpectedly.
        """
        self._lives += 1
        lines, deadline = self._lines() + chance.randint(0, MOST_WINDOWS), time.monotonic() + LIMIT_S
        processes = [self._start(rank) for rank in RANKS]

        def wait(is_time: Callable[[], bool]) -> None:
            while not is_time() and any(process.poll() is None for process in processes):
                if time.monotonic() > deadline:
                    for process in processes:
                        process.kill()
                    raise RuntimeError(f"life {self._lives} of {self._folder.name} hangs")
                time.sleep(0.001)

        if is_to_be_killed:
            wait(lambda: self._lines() >= lines)
            time.sleep(chance.uniform(0.0, 0.03))
            for rank in chance.choice([[0], [1], [0, 1]]):
                processes[rank].kill()
        wait(lambda: False)
        codes = [process.returncode for process in processes]
        killed = sum(code < 0 for code in codes)
        # If the other rank was killed, a rank ends by itself, with an error that says so.
        if any(codes) and not killed:
            said = " | ".join((self._folder / f"said-{rank}").read_text()[-500:] for rank in RANKS)
            raise RuntimeError(f"life {self._lives} of {self._folder.name} ended with {codes}: {said}")
        return killed

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", RANK, str(self._folder), str(rank), str(self._folder / f"meet-{self._lives}")]
        with (self._folder / f"said-{rank}").open("a") as said:
            return subprocess.Popen(command, stderr=said, env=os.environ | {"PYTHONPATH": str(TESTS)})  # noqa: S603

    def _lines(self) -> int:
        log = self._folder / "log-0"
        return log.read_bytes().count(b"\n") if log.exists() else 0
