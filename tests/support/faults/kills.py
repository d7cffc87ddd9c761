"""Runs the training of `long_runs` in processes that are ended at random moments, again and again, until it is through.

A script of its own: each life of the run is forked from it, so that torch is imported once, and it is killed with
SIGKILL, or asked to end with SIGTERM, a random time after a random window: so a life gets somewhere, and ends
anywhere, however fast or busy the machine. What was seen is left as JSON beside what each run left.

    python tests/support/faults/kills.py FOLDER KILLS TERMINATIONS SEED
"""

import gc
import json
import math
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import torch

from support.training.long_runs import Run

warnings.filterwarnings("ignore", r"autoaccum: forward\(\) moves mean")  # in a buffer, which is to be kept

EPOCHS = 12
MOST_WINDOWS = 4  # of a life, where the signal comes after them


class Log(Run):
    """A run that notes in a file what it used, as it goes; a line is written whole or, by a kill, not at all."""

    def __init__(self, log, **options):
        super().__init__(epochs=EPOCHS, **options)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.samples.on_step = self._on_step
        self.samples.on_resume = self._on_resume

    def _on_step(self, report, *, epoch):
        self._note(["step", report.step, self.samples.seen])
        self.samples.seen = []

    def _on_resume(self, path, *, step, epoch):
        self._note(["resume", step])
        self.samples.seen = []

    def _note(self, entry):
        os.write(self._log, (json.dumps(entry) + "\n").encode())


def live(folder, **options):
    """One life of the run: to its end, where it leaves what it ended with."""
    run = Log(folder / "log", **options)
    run.fit()
    torch.save(run.end, folder / "end.unfinished")
    (folder / "end.unfinished").rename(folder / "end")


def in_child(function):
    """Run in a child process, which ends without the parent's clean-up; return its id."""
    process = os.fork()
    if process == 0:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - the child must not go on as the parent
            sys.excepthook(type(error), error, error.__traceback__)
            os._exit(1)
        os._exit(0)
    return process


def lines_of(log):
    return log.read_bytes().count(b"\n") if log.exists() else 0


def ends_before(process, is_time):
    """Wait until a process has ended by itself, or it is time; return whether it ended."""
    while not is_time():
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            assert status == 0, f"a life ended with status {status}"
            return True
        time.sleep(0.001)
    return False


def was_ended_by(number, process, log, lines, pause_s):
    """Signal a process a time after its log has so many lines; return whether that ended it, or it ended by itself."""
    if ends_before(process, lambda: lines_of(log) >= lines):
        return False
    deadline = time.monotonic() + pause_s
    if ends_before(process, lambda: time.monotonic() >= deadline):
        return False
    os.kill(process, number)
    _, status = os.waitpid(process, 0)
    if status == 0:
        return False  # it ended just then
    assert os.WIFSIGNALED(status), f"a life ended with status {status}"
    assert os.WTERMSIG(status) == number
    return True


def live_with_signals(folder, chance, number, signals, longest_pause_s, **options):
    """One run with so many signals at most; return how many ended a life, and how many in a checkpoint's writing."""
    done = in_writing = 0
    checkpoints = folder / "checkpoints"
    while not (folder / "end").exists():
        lines = lines_of(folder / "log") + chance.randint(0, MOST_WINDOWS) if done < signals else math.inf
        process = in_child(lambda: live(folder, checkpoint=checkpoints, **options))
        if was_ended_by(number, process, folder / "log", lines, chance.uniform(0.0, longest_pause_s)):
            done += 1
            in_writing += any(path.suffix == ".unfinished" for path in checkpoints.glob("*"))
    return done, in_writing


def runs_with(number, folder, chance, signals, longest_pause_s, **options):
    """As many runs as it takes for so many signals; return for each what `live_with_signals` does."""
    runs = []
    while (left := signals - sum(done for done, _ in runs)) > 0:
        run = folder / f"{signal.Signals(number).name}-{len(runs)}"
        run.mkdir()
        runs.append(live_with_signals(run, chance, number, left, longest_pause_s, **options))
    return runs


def main(folder, kills, terminations, seed):
    torch.set_num_threads(1)
    Run()  # brings the last of torch, which takes seconds; nothing is computed, or autograd would refuse to be forked
    gc.collect()
    gc.freeze()  # else what is imported is gone through, and so copied, in every life
    chance = random.Random(seed)  # noqa: S311
    (folder / "undisturbed").mkdir()
    started = time.monotonic()
    assert ends_before(in_child(lambda: live(folder / "undisturbed")), lambda: False)
    window_s = (time.monotonic() - started) / lines_of(folder / "undisturbed" / "log")
    seen = {
        "SIGKILL": runs_with(signal.SIGKILL, folder, chance, kills, 2 * window_s, checkpoint_every=1),
        # No checkpoint but those at the signal: all progress is theirs.
        "SIGTERM": runs_with(signal.SIGTERM, folder, chance, terminations, 2 * window_s, checkpoint_every=None),
    }
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
