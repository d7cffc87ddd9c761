"""Starts the same command twice on one checkpoint folder: one must complete the run, and the other say why it did not.

Each process is forked from one that has imported everything, and runs the same script. The lease is one second here, so
that a suspended owner need not be waited for long; a contender gives up after three.

    python two_processes.py FOLDER SEED PAIRS
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks.row import Row

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parents[1]
PAIRS = 8  # of each kind
LEASE_S = 1.0
LIMIT_S = 120.0
# Windows of a run: some tenths of a second, and longer than a contender waits.
SHORT, LONG = 12, 90
# From a contender that gives way, and from an owner that wakes after its successor has ended.
WHY = ("is in use by process", "another process has taken the folder over and has ended since")
NEVER_SAID = ("FileNotFoundError", "make room")

SCRIPT = """
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum


torch.manual_seed(3)
chance = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(50, 6, generator=chance), torch.randint(3, (50,), generator=chance))
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

def slow(outputs, targets):
    time.sleep(0.02)
    return nn.functional.cross_entropy(outputs, targets)

autoaccum.fit(
    model,
    DataLoader(data, batch_size=7, shuffle=True),
    12,
    loss=slow,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    loss_reduction="mean",
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9),
    checkpoint=FOLDER,
    checkpoint_every=4,
    max_steps=WINDOWS,
    micro_batch=6,
    device="cpu",
)
"""


def attack(folder: Path, seed: int, share: float) -> list[Row]:
    """Start pairs of processes, and check the outcome of each.

    Args:
        folder: Where they write.
        seed: Seed of the moments at which they are started, suspended and killed.
        share: Share of the pairs to try.
    """
    # A separate process, because it cannot be forked after autograd has computed.
    pairs = max(1, round(PAIRS * share))
    environment = {**os.environ, "AUTOACCUM_LEASE_S": str(LEASE_S), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent / "tests")])
    command = [sys.executable, __file__, str(folder), str(seed), str(pairs)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - fixed
    if ran.returncode != 0:
        return [Row("two processes on one folder", 1, (ran.stderr.strip() or f"exit code {ran.returncode}",))]
    return [Row(**row | {"losses": tuple(row["losses"])}) for row in json.loads(ran.stdout)]


@dataclass
class Process:
    """One training and its output."""

    pid: int
    stderr: Path
    code: int | None = None

    def send(self, number: int) -> None:
        """Send it a signal, if it still exists."""
        if not self.has_ended():
            os.kill(self.pid, number)

    def has_ended(self) -> bool:
        """Whether it has ended, so that its exit code is known."""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None


class Pair:
    """Two processes on one folder.

    Args:
        folder: Where they write.
        windows: The length of the run.
        chance: Draws the moments.
    """

    def __init__(self, folder: Path, windows: int, chance: random.Random) -> None:
        self._folder = folder
        self._windows = windows
        self._chance = chance
        self.processes: list[Process] = []
        folder.mkdir()

    @property
    def checkpoints(self) -> Path:
        """The folder that both write to."""
        return self._folder / "checkpoints"

    def start(self) -> Process:
        """Start the command."""
        stderr = self._folder / f"stderr-{len(self.processes)}"
        pid = os.fork()
        if pid == 0:
            _become({"FOLDER": str(self.checkpoints), "WINDOWS": self._windows}, stderr)
        process = Process(pid, stderr)
        self.processes.append(process)
        return process

    def pause(self, most_s: float) -> None:
        """Let a random time pass."""
        time.sleep(self._chance.uniform(0.0, most_s))

    def until_held(self, owner: Process) -> None:
        """Wait until the folder has an owner."""
        _wait(lambda: owner.has_ended() or any(self.checkpoints.glob(".lease-*")))

    def ended(self) -> bool:
        """Wait for both to end; return whether they did."""
        return _wait(lambda: all(process.has_ended() for process in self.processes))

    def result(self) -> Any:
        """Return the newest checkpoint's content, in a form that is equal only if every bit is."""
        import torch  # noqa: PLC0415 - not in the process that only starts this one

        from long_runs import bits  # noqa: PLC0415 - as above

        newest = max(self.checkpoints.glob("step-*"))
        content = torch.load(newest / "state.pt", weights_only=True)
        return bits(
            {key: content[key] for key in ("windows", "samples", "modules", "optimizer", "scheduler", "random")}
        )


def _become(names: dict[str, object], stderr: Path) -> None:
    """Run the script with these names in a newly forked process; never returns."""
    code = 1
    try:
        written = os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        exec(SCRIPT, names)  # noqa: S102 - the text above
        code = 0
    except BaseException as error:  # noqa: BLE001 - the child must not go on as the parent
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def at_once(pair: Pair) -> None:
    """Both begin at the same moment."""
    pair.start()
    pair.start()


def apart(pair: Pair) -> None:
    """The second begins while the first trains."""
    pair.until_held(pair.start())
    pair.pause(1.5)
    pair.start()


def suspended(pair: Pair) -> None:
    """The first is suspended while training, and wakes while the second waits, trains, or has finished."""
    owner = pair.start()
    pair.until_held(owner)
    pair.pause(1.5)
    owner.send(signal.SIGSTOP)
    pair.start()
    pair.pause(4.0)
    owner.send(signal.SIGCONT)


def killed(pair: Pair) -> None:
    """The first is killed while the second waits for it."""
    owner = pair.start()
    pair.until_held(owner)
    pair.start()
    pair.pause(1.5)
    owner.send(signal.SIGKILL)


KINDS = {
    "the same command twice at once": at_once,
    "the same command twice, up to 1.5 s apart": apart,
    "owner suspended, and woken late": suspended,
    "owner killed while another waits": killed,
}


def losses_of(pair: Pair, expected: Any) -> list[str]:
    """Return what is wrong with the outcome of a pair."""
    codes = [process.code for process in pair.processes]
    said = [process.stderr.read_text() for process in pair.processes]
    found = []
    if any(code not in (0, 1, -signal.SIGKILL) for code in codes) or 0 not in codes:
        found.append(f"exit codes {codes}")
    for process, text in zip(pair.processes, said, strict=True):
        if process.code == 1 and not any(why in text for why in WHY):
            found.append(f"refused without saying why: {text[-300:]!r}")
        found += [f"said {word!r}" for word in NEVER_SAID if word in text]
    if not found and pair.result() != expected:
        found.append("not the undisturbed run")
    left = [path.name for path in pair.checkpoints.iterdir() if not path.name.startswith("step-")]
    if left:
        found.append(f"left {', '.join(left)}")
    return found


def main(folder: Path, seed: int, pairs: int) -> None:
    """Try pairs of each kind, and print the rows."""
    import autoaccum  # noqa: F401, PLC0415 - before the first fork
    from long_runs import Run  # noqa: PLC0415 - as above

    Run()  # imports the rest of torch, which takes seconds; computes nothing, or autograd could not be forked
    gc.collect()
    gc.freeze()  # otherwise every process would traverse, and so copy, all imported objects
    chance = random.Random(seed)  # noqa: S311
    expected = {}
    for windows in (SHORT, LONG):
        alone = Pair(folder / f"alone-{windows}", windows, chance)
        alone.start()
        assert alone.ended(), "the undisturbed run hangs"
        assert alone.processes[0].code == 0, alone.processes[0].stderr.read_text()
        expected[windows] = alone.result()
    rows = []
    for number, (name, act) in enumerate(KINDS.items()):
        losses: list[str] = []
        refused = 0
        for turn in range(pairs):
            windows = LONG if turn % 2 else SHORT
            pair = Pair(folder / f"{number}-{turn}", windows, chance)
            act(pair)
            if not pair.ended():
                losses.append(f"pair {turn}: hangs")
                for process in pair.processes:
                    process.send(signal.SIGKILL)
                continue
            refused += sum(process.code == 1 for process in pair.processes)
            losses += [f"pair {turn}: {loss}" for loss in losses_of(pair, expected[windows])]
        rows.append(asdict(Row(name, pairs, tuple(losses), f"{refused} processes gave way to the other")))
    print(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
