"""One process writes into a checkpoint folder: a second one waits, goes on or is refused, and overwrites nothing."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import autoaccum
from autoaccum._system import folder_lock  # a removal that meets a holder: of two calls that is a race
from autoaccum._training.checkpoint_files import Storage  # the lock's own refusal of a fork, before which fit has one
from autoaccum.errors import AutoaccumError, CheckpointError, CheckpointInUseError
from support.processes import fork_server
from support.training.long_runs import Noisy, Run, checkpoints, loader_of

# Trains in a folder, and has a child that was forked and outlives it.
HOLDER = """
import os, sys, time, torch, autoaccum

class Forks(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        if os.fork() == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print("held by", os.getpid(), flush=True)
        time.sleep(600)

batch = torch.zeros(4, 2), torch.zeros(4, 1)
autoaccum.fit(torch.nn.Linear(2, 1), [batch], 4, checkpoint=sys.argv[1], callbacks=[Forks()], progress=False)
"""


class Holder(NamedTuple):
    process: subprocess.Popen  # ends as the one that holds the folder ends
    pid: int

    def send_signal(self, number):
        os.kill(self.pid, number)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen([*fork_server.python(), "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    held, pid = process.stdout.readline().rsplit(maxsplit=1)
    assert held == "held by"
    yield Holder(process, int(pid))
    process.kill()
    process.communicate()


class At(autoaccum.Callback):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step(self, report, *, epoch):
        if report.step == self.step:
            self.action()


def contents_of(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def run_in(folder, **options):
    return Run(checkpoint=folder, **{"checkpoint_every": 4, "max_steps": 9, "val_loader": None} | options)


# --- who waits, who goes on, who is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("suspends", [False, True])
def test_holder_that_lives_is_waited_for_and_then_named_in_the_refusal(tmp_path, holder, capsys, monkeypatch, suspends):
    monkeypatch.setattr(folder_lock, "_PATIENCE_S", 1.5)
    if suspends:
        holder.send_signal(signal.SIGSTOP)

    with pytest.raises(CheckpointInUseError, match=f"in use by process {holder.pid} on .* after 2 s of waiting"):
        run_in(tmp_path).fit(progress="lines")

    assert capsys.readouterr().err.count(f"in use by process {holder.pid} on") == 1


def test_killed_holder_is_followed_though_a_process_that_it_forked_lives_on(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(folder_lock, "_PATIENCE_S", 3.0)  # shorter than that process lives
    holder.send_signal(signal.SIGKILL)
    holder.process.wait()

    assert run_in(tmp_path).fit().steps == 9


def test_file_system_without_locks_is_said_and_trained_on(tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)

    run_in(tmp_path).fit(progress="lines")

    assert "has no locks, so nothing keeps a second process from writing there" in capsys.readouterr().err
    assert checkpoints(tmp_path) == ["step-00000008", "step-00000009"]


@pytest.mark.parametrize("makes", ["mkdir", "mkfifo", "symlink"])
def test_what_stands_in_place_of_the_locks_file_is_refused_by_its_name(tmp_path, makes):
    path, run = tmp_path / ".lock", run_in(tmp_path)
    {"mkdir": path.mkdir, "mkfifo": lambda: os.mkfifo(path), "symlink": lambda: path.symlink_to("/etc/passwd")}[makes]()

    with pytest.raises(CheckpointError, match=r"cannot be written to \(.*: its file \.lock\)"):
        run.fit()

    assert run.samples.windows == {}


def let_another_in(folder):
    """As over NFS, once a lock has run out."""
    (folder / ".lock").write_text("process 7 on node1\nits token\n")


LOST = {
    "removed": (lambda folder: (folder / ".lock").unlink(), r"its file \.lock was removed or replaced"),
    "another let in": (let_another_in, "is in use by process 7 on node1, which its file system has let in"),
    "folder": (shutil.rmtree, "is gone, and with it the checkpoints in it"),
}


@pytest.mark.parametrize("what", LOST)
def test_run_that_has_lost_its_lock_ends_at_the_next_checkpoint_and_writes_nothing(tmp_path, what):
    lose, said = LOST[what]
    run = run_in(tmp_path / "run")

    with pytest.raises(CheckpointError, match=said) as caught:
        run.fit(At(3, lambda: lose(tmp_path / "run")))

    assert isinstance(caught.value, CheckpointInUseError) is (what != "folder")
    assert list(run.samples.windows) == [1, 2, 3, 4]
    assert not list(tmp_path.glob("run/*step*"))


# --- whose call has ended, and who was forked -------------------------------------------------------------------------


def test_fit_within_a_fit_on_the_same_folder_is_refused_and_the_next_is_not(tmp_path, capsys):
    def nested():
        with pytest.raises(CheckpointInUseError, match="call of fit in this process"):
            run_in(tmp_path).fit()

    run_in(tmp_path).fit(At(2, nested))

    assert checkpoints(tmp_path) == ["step-00000008", "step-00000009"]
    assert run_in(tmp_path, max_steps=10).fit(progress="lines").steps == 10
    assert "in use" not in capsys.readouterr().err


def test_process_forked_from_the_holder_writes_nothing_and_releases_nothing(tmp_path):
    lock, storage = folder_lock.FolderLock(tmp_path), Storage(tmp_path)
    storage.guard = lock.check
    with lock.call:
        assert list(lock.taking(print)) == []
        storage.write({"by": "holder"}, 3)
        before = contents_of(tmp_path)

        child = os.fork()
        if child == 0:
            try:
                storage.write({"by": "fork"}, 4)
            except CheckpointInUseError as error:
                os._exit(7 if "was forked; nothing is written here" in str(error) else 8)
            os._exit(9)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        assert code == 7
        assert contents_of(tmp_path) == before
        lock.check()
        with (tmp_path / ".lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Forks(autoaccum.Callback):
    """Forks in a window; the child ends as it is told, unless `fit` ends it."""

    def __init__(self, folder, ends):
        self.folder, self.ends = folder, ends
        self.code = self.before = self.after = None

    def on_step(self, report, *, epoch):
        if report.step != 5:
            return
        self.before = contents_of(self.folder)
        child = os.fork()
        if child == 0:
            self.ends()
            return
        self.code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.after = contents_of(self.folder)


def fails():
    raise MemoryError


def returns():
    pass


@pytest.mark.parametrize(("ends", "workers", "error"), [(fails, 1, MemoryError), (returns, 0, AutoaccumError)])
def test_process_forked_in_a_callback_leaves_checkpoints_log_reason_and_progress_to_its_parent(
    tmp_path, monkeypatch, capfd, ends, workers, error
):
    monkeypatch.setenv("AUTOACCUM_REASON_FILE", str(tmp_path / "reason.json"))
    forks, parent = Forks(tmp_path, ends), os.getpid()
    log = autoaccum.JSONLinesLog(tmp_path / "log.jsonl")
    run = Run(
        checkpoint=tmp_path / "run",
        checkpoint_every=2,
        progress="lines",
        loader=lambda: loader_of(Noisy(), num_workers=workers),
    )
    try:
        run.fit(log, forks)
    except BaseException as ended:
        if os.getpid() != parent:  # what the child frees now must not end the workers of its parent
            os._exit(7 if type(ended) is error else 8)
        raise

    assert forks.code == 7
    assert forks.before == forks.after
    assert run.result.steps == 15
    assert capfd.readouterr().err.count("step 5/15") <= 1


# --- calls that fail before they train --------------------------------------------------------------------------------


def test_call_that_fails_before_it_trains_leaves_no_folder(tmp_path):
    class Refuses(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            pytest.fail("it has trained")

        def on_plan(self, plan, *, step, probe):
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        Run(checkpoint=tmp_path / "a" / "run").fit(Refuses())

    assert list(tmp_path.iterdir()) == []


def test_folder_that_another_process_holds_is_not_removed_by_a_call_that_fails(tmp_path, holder):
    folder_lock.remove_free(tmp_path)

    assert (tmp_path / ".lock").exists()
    holder.send_signal(signal.SIGKILL)
    holder.process.wait()
    for _ in range(100):
        folder_lock.remove_free(tmp_path)
        time.sleep(0.01)
    assert not tmp_path.exists()
