"""Starts the same command twice on one checkpoint folder: one must complete the run, and the other say why it did not.

A contender gives up after three seconds here.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks import Row

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[2] / "tests"
PAIRS = 8  # of each kind
LIMIT_S = 120.0
# Windows of a run: some tenths of a second, and longer than a contender waits.
SHORT, LONG = 12, 90
# From a contender that gives way.
WHY = ("is in use by process",)
NEVER_SAID = ("FileNotFoundError", "make room")
# It begins at a word, so that imports, which take seconds, do not set processes apart.
SCRIPT = """
import random, sys, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import autoaccum
from autoaccum._system import folder_lock

folder_lock._PATIENCE_S, folder_lock._PAUSE_S = 3.0, 0.02
torch.manual_seed(3)
random.seed(3)
np.random.seed(3)
chance = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(50, 6, generator=chance), torch.randint(3, (50,), generator=chance))
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

def slow(outputs, targets):
    time.sleep(0.02)
    return nn.functional.cross_entropy(outputs, targets)

print("ready", flush=True)
sys.stdin.readline()
autoaccum.fit(
    model, DataLoader(data, batch_size=7, shuffle=True), 12, loss=slow, loss_reduction="mean",
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9),
    checkpoint=sys.argv[1], checkpoint_every=4, max_steps=int(sys.argv[2]), micro_batch=6, device="cpu",
)
"""


class Pair:
    """Two processes on one folder, of which each waits for its beginning."""

    def __init__(self, folder: Path, windows: int, number: int = 2) -> None:
        folder.mkdir()
        self.checkpoints = folder / "checkpoints"
        self._said = [folder / f"said-{each}" for each in range(number)]
        self.processes = [self._start(said, windows) for said in self._said]
        for process in self.processes:
            process.stdout.readline()  # type: ignore[union-attr]

    def _start(self, said: Path, windows: int) -> subprocess.Popen[str]:
        own = os.environ | {"OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", SCRIPT, str(self.checkpoints), str(windows)]
        with said.open("w") as stderr:
            return subprocess.Popen(command, env=own, stderr=stderr, **pipes)  # noqa: S603 - fixed

    def begin(self, which: int) -> None:
        """Let one begin."""
        self.processes[which].stdin.write("go\n")  # type: ignore[union-attr]
        self.processes[which].stdin.flush()  # type: ignore[union-attr]

    def begin_and_hold(self) -> None:
        """Let the first begin, and wait until it holds the folder."""
        self.begin(0)
        _wait(lambda: self.processes[0].poll() is not None or any(self.checkpoints.glob(".lock")))

    def ended(self) -> bool:
        """Wait for all to end; return whether they did."""
        return _wait(lambda: all(process.poll() is not None for process in self.processes))

    def result(self) -> Any:
        """Return the newest checkpoint's content, in a form that is equal only if every bit is."""
        import torch  # noqa: PLC0415 - only here

        from support.training.long_runs import bits  # noqa: PLC0415 - as above

        content = torch.load(max(self.checkpoints.glob("step-*")) / "state.pt", weights_only=True)
        kept = ("windows", "samples", "modules", "optimizer", "scheduler", "random")
        return bits({key: content[key] for key in kept})

    def losses(self, expected: Any) -> list[str]:
        """Return what is wrong with the outcome."""
        codes, said = [process.returncode for process in self.processes], [file.read_text() for file in self._said]
        found = []
        if any(code not in (0, 1, -signal.SIGKILL) for code in codes) or 0 not in codes:
            found.append(f"exit codes {codes}")
        for code, text in zip(codes, said, strict=True):
            if code == 1 and not any(why in text for why in WHY):
                found.append(f"refused without saying why: {text[-300:]!r}")
            found += [f"said {word!r}" for word in NEVER_SAID if word in text]
        if not found and self.result() != expected:
            found.append("not the undisturbed run")
        left = [path.name for path in self.checkpoints.iterdir() if not path.name.startswith(("step-", ".lock"))]
        return [*found, f"left {', '.join(left)}"] if left else found


def _wait(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def at_once(pair: Pair, _pause: Callable[[float], None]) -> None:
    """Both begin at the same moment."""
    pair.begin(0)
    pair.begin(1)


def apart(pair: Pair, pause: Callable[[float], None]) -> None:
    """The second begins while the first trains."""
    pair.begin_and_hold()
    pause(1.5)
    pair.begin(1)


def suspended(pair: Pair, pause: Callable[[float], None]) -> None:
    """The first is suspended while training, and wakes while the second waits, or has given way."""
    pair.begin_and_hold()
    pause(1.5)
    pair.processes[0].send_signal(signal.SIGSTOP)
    pair.begin(1)
    pause(4.0)
    pair.processes[0].send_signal(signal.SIGCONT)


def killed(pair: Pair, pause: Callable[[float], None]) -> None:
    """The first is killed while the second waits for it."""
    pair.begin_and_hold()
    pair.begin(1)
    pause(1.5)
    pair.processes[0].kill()


KINDS = {
    "the same command twice at once": at_once,
    "the same command twice, up to 1.5 s apart": apart,
    "owner suspended, and woken late": suspended,
    "owner killed while another waits": killed,
}


def attack(folder: Path, seed: int, share: float) -> list[Row]:
    """Start pairs of processes, and check the outcome of each.

    Args:
        folder: Where they write.
        seed: Seed of the moments at which they are started, suspended and killed.
        share: Share of the pairs to try.
    """
    sys.path.insert(0, str(TESTS))
    chance, expected = random.Random(seed), {}  # noqa: S311
    for windows in (SHORT, LONG):
        alone = Pair(folder / f"alone-{windows}", windows, number=1)
        alone.begin(0)
        assert alone.ended(), "the undisturbed run hangs"
        expected[windows] = alone.result()
    rows = []
    for number, (name, act) in enumerate(KINDS.items()):
        losses: list[str] = []
        refused, pairs = 0, max(1, round(PAIRS * share))
        for turn in range(pairs):
            windows = LONG if turn % 2 else SHORT
            pair = Pair(folder / f"{number}-{turn}", windows)
            act(pair, lambda most_s: time.sleep(chance.uniform(0.0, most_s)))
            if not pair.ended():
                losses.append(f"pair {turn}: hangs")
                for process in pair.processes:
                    process.kill()
                continue
            refused += sum(process.returncode == 1 for process in pair.processes)
            losses += [f"pair {turn}: {loss}" for loss in pair.losses(expected[windows])]
        rows.append(Row(name, pairs, tuple(losses), f"{refused} processes gave way to the other"))
    return rows
