"""Sends SIGKILL at random moments until a run is complete, which must end bit for bit like an undisturbed one.

The tests' script kills one process; this one kills one or both of two ranks. Every life of a rank is forked from a
process that has imported everything.

    python _memory/kills.py FOLDER SEED KILLS
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks.row import Row

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[2] / "tests"
OF_ONE, OF_RANKS = 70, 30
RANKS = 2
# The run of two ranks, and the most windows after which a life is ended.
WINDOWS, MOST_WINDOWS = 24, 5
LIMIT_S = 120.0


def attack(folder: Path, seed: int, share: float) -> list[Row]:
    """Kill runs until each is complete.

    Args:
        folder: Where they write.
        seed: Seed of the moments at which they are killed.
        share: Share of the kills to make.
    """
    kills = {name: max(1, round(number * share)) for name, number in (("one", OF_ONE), ("ranks", OF_RANKS))}
    for name in kills:
        (folder / name).mkdir()
    return [_one_process(folder / "one", seed, kills["one"]), _two_ranks(folder / "ranks", seed, kills["ranks"])]


def _one_process(folder: Path, seed: int, kills: int) -> Row:
    name = "SIGKILL of one process"
    failed = _failure_of([str(TESTS / "kill_often.py"), str(folder), str(kills), "0", str(seed)])
    if failed:
        return Row(name, kills, (failed,))
    seen = json.loads((folder / "seen.json").read_text())["SIGKILL"]
    runs = sorted(folder.glob("SIGKILL-*"))
    undisturbed = _bytes_of_end(folder / "undisturbed" / "end")
    losses = [f"{run.name} ended elsewhere" for run in runs if _bytes_of_end(run / "end") != undisturbed]
    in_writing = sum(number for _, number in seen)
    note = f"{len(runs)} runs; {in_writing} kills while a checkpoint was written"
    return Row(name, sum(done for done, _ in seen), tuple(losses), note)


def _two_ranks(folder: Path, seed: int, kills: int) -> Row:
    name = "SIGKILL of one or both of two ranks"
    failed = _failure_of([__file__, str(folder), str(seed), str(kills)])
    if failed:
        return Row(name, kills, (failed,))
    found = json.loads((folder / "found.json").read_text())
    note = f"{found['runs']} runs; {found['both']} times both, else the other ended by itself"
    return Row(name, found["kills"], tuple(found["losses"]), note)


def _failure_of(arguments: list[str]) -> str:
    """Run a script of this or the tests' folder; return its error, or ""."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AUTOACCUM_RANK_TIMEOUT_S": "20", "AUTOACCUM_CACHE_DIR": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), str(TESTS)])
    ran = subprocess.run(  # noqa: S603 - fixed
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    return "" if ran.returncode == 0 else ran.stderr.strip()[-2000:] or f"exit code {ran.returncode}"


def _bytes_of_end(path: Path) -> Any:
    import torch  # noqa: PLC0415 - only here

    return torch.load(path, weights_only=True)


# --- two ranks, in their own process ----------------------------------------------------------------------------------


def live(folder: Path, rank: int, meeting: Path) -> None:
    """Run one life of a rank; at the end of the run, write its result."""
    import torch  # noqa: PLC0415 - as above

    import autoaccum  # noqa: PLC0415 - not in the process that only starts this one
    import rank_training  # noqa: PLC0415 - as above
    from long_runs import bits  # noqa: PLC0415 - as above

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=20)
    )
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    class Log(autoaccum.Callback):
        def on_step(self, report: autoaccum.records.StepReport, *, epoch: int) -> None:  # noqa: ARG002 - the protocol's
            os.write(log, b"%d\n" % report.step)

    chance = torch.Generator().manual_seed(7)
    loader = torch.utils.data.DataLoader(rank_training.vectors(), batch_size=5, shuffle=True, generator=chance)
    rank_training.seeded(rank)
    model = rank_training.net(seed=rank, dropout=0.3)
    made = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made.append(rank_training.adam(parameters))
        return made[0]

    autoaccum.fit(
        model,
        loader,
        16,
        optimizer=optimizer,
        micro_batch=3,
        max_steps=WINDOWS,
        shard=True,
        device="cpu",
        progress=False,
        checkpoint=folder / "checkpoints",
        checkpoint_every=1,
        callbacks=[Log()],
    )
    end = bits({"model": model.state_dict(), "optimizer": made[0].state_dict(), "torch": torch.get_rng_state()})
    (folder / f"end-{rank}.unfinished").write_text(json.dumps(end))
    (folder / f"end-{rank}.unfinished").rename(folder / f"end-{rank}")


def forked(function: Callable[[], None], said: Path) -> int:
    """Run a function in a child process that skips this one's clean-up; return its id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            function()
            code = 0
        except BaseException as error:  # noqa: BLE001 - the child must not go on as the parent
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(code)
    return process


class Lives:
    """The lives of one run of two ranks.

    Args:
        folder: Where it writes.
        chance: Draws the moments.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder = folder
        self._chance = chance
        self._lives = 0
        folder.mkdir()

    @property
    def is_through(self) -> bool:
        """Whether both ranks have finished."""
        return all((self._folder / f"end-{rank}").exists() for rank in range(RANKS))

    def end(self) -> list[Any]:
        """Return the result of each rank."""
        return [json.loads((self._folder / f"end-{rank}").read_text()) for rank in range(RANKS)]

    def next(self, *, is_to_be_killed: bool) -> int:
        """Run one life; return how many ranks were killed.

        Raises:
            RuntimeError: A rank hangs, or ended unexpectedly.
        """
        self._lives += 1
        meeting = self._folder / f"meeting-{self._lives}"
        lines = self._lines() + self._chance.randint(0, MOST_WINDOWS)
        processes = [
            forked(lambda rank=rank: live(self._folder, rank, meeting), self._folder / f"stderr-{rank}")  # type: ignore[misc]
            for rank in range(RANKS)
        ]
        codes: dict[int, int] = {}
        killed: list[int] = []
        if is_to_be_killed:
            self._until(codes, processes, lambda: self._lines() >= lines)
            time.sleep(self._chance.uniform(0.0, 0.03))
            killed = self._chance.choice([[0], [1], [0, 1]])
            for rank in killed:
                if rank not in codes:
                    os.kill(processes[rank], signal.SIGKILL)
        self._until(codes, processes, lambda: False)
        done = sum(codes[rank] == -signal.SIGKILL for rank in range(RANKS))
        # If the other rank was killed, a rank ends by itself, with an error that says so.
        if any(code not in (0, -signal.SIGKILL) for code in codes.values()) and not done:
            raise RuntimeError(f"life {self._lives} ended with {codes}: {self._said()}")
        return done

    def _until(self, codes: dict[int, int], processes: list[int], is_time: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_time() and len(codes) < RANKS:
            for rank, process in enumerate(processes):
                if rank not in codes:
                    ended, status = os.waitpid(process, os.WNOHANG)
                    if ended:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                for rank in range(RANKS):
                    if rank not in codes:
                        os.kill(processes[rank], signal.SIGKILL)
                        os.waitpid(processes[rank], 0)
                raise RuntimeError(f"life {self._lives} hangs: {self._said()}")
            time.sleep(0.001)

    def _lines(self) -> int:
        log = self._folder / "log-0"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def _said(self) -> str:
        return " | ".join((self._folder / f"stderr-{rank}").read_text()[-500:] for rank in range(RANKS))


def main(folder: Path, seed: int, kills: int) -> None:
    """Kill runs of two ranks, and write the findings."""
    import torch  # noqa: PLC0415 - not in the process that only starts this one

    from long_runs import Run  # noqa: PLC0415 - as above

    torch.set_num_threads(1)
    Run()  # imports the rest of torch, which takes seconds; computes nothing, or autograd could not be forked
    gc.collect()
    gc.freeze()  # otherwise every life would traverse, and so copy, all imported objects
    chance = random.Random(seed)  # noqa: S311
    alone = Lives(folder / "undisturbed", chance)
    alone.next(is_to_be_killed=False)
    undisturbed = alone.end()
    found: dict[str, Any] = {"kills": 0, "both": 0, "runs": 0, "losses": []}
    while found["kills"] < kills:
        run = Lives(folder / str(found["runs"]), chance)
        found["runs"] += 1
        try:
            while not run.is_through:
                done = run.next(is_to_be_killed=found["kills"] < kills)
                found["kills"] += done
                found["both"] += done == RANKS
            if run.end() != undisturbed:
                found["losses"].append(f"run {found['runs'] - 1} ended elsewhere")
        except RuntimeError as error:
            found["losses"].append(str(error))
            found["kills"] += 1
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
