"""One process writes into a checkpoint folder: a second one waits, goes on or is refused, and overwrites nothing."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import autoaccum
from autoaccum._system import folder_lock
from autoaccum._system.folder_lock import FolderLock
from autoaccum._training.checkpoint_files import Storage
from autoaccum.errors import CheckpointError, CheckpointInUseError
from support.training.long_runs import Noisy, Run, checkpoints, loader_of

# Holds a folder, and has a child that was forked before or after and outlives it.
HOLDER = """
import os, sys, time
from pathlib import Path
from autoaccum._system.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
with lock.call:
    assert list(lock.taking(print)) == []
    if os.fork() == 0:
        os.close(1)
        time.sleep(float(sys.argv[2]))
        os._exit(0)
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path, "60"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def said():
    return []


def take(lock, said=None, pause_s=0.01):
    for _ in lock.taking((lambda _: None) if said is None else said.append):
        time.sleep(pause_s)
    return lock


def contents_of(folder):
    return {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


# --- who waits, who goes on, who is refused ---------------------------------------------------------------------------


def test_free_folder_is_taken_at_once_and_given_back(tmp_path, said):
    for _ in range(2):
        lock = FolderLock(tmp_path)
        with lock.call:
            assert list(lock.taking(said.append)) == []
            lock.check()

    assert said == []


@pytest.mark.parametrize("suspends", [False, True])
def test_holder_that_lives_is_waited_for_and_then_named_in_the_refusal(tmp_path, holder, said, monkeypatch, suspends):
    monkeypatch.setattr(folder_lock, "_PATIENCE_S", 0.1)
    if suspends:
        holder.send_signal(signal.SIGSTOP)

    with pytest.raises(CheckpointInUseError, match=f"in use by process {holder.pid} on .* after 0 s of waiting"):
        take(FolderLock(tmp_path), said)

    assert len(said) == 1
    assert f"in use by process {holder.pid} on" in said[0]


def test_killed_holder_is_followed_though_a_process_that_it_forked_lives_on(tmp_path, holder, said):
    holder.kill()
    holder.wait()

    take(FolderLock(tmp_path), said).check()

    assert len(said) <= 1  # the kernel takes a moment


def test_file_system_without_locks_is_said_and_trained_on(tmp_path, said, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)

    lock = take(FolderLock(tmp_path), said)

    lock.check()
    assert "has no locks, so nothing keeps a second process from writing there" in said[0]


@pytest.mark.parametrize("makes", ["mkdir", "mkfifo", "symlink"])
def test_what_stands_in_place_of_the_locks_file_is_refused_by_its_name(tmp_path, makes):
    path = tmp_path / ".lock"
    {"mkdir": path.mkdir, "mkfifo": lambda: os.mkfifo(path), "symlink": lambda: path.symlink_to("/etc/passwd")}[makes]()

    with pytest.raises(CheckpointError, match=r"cannot be written to \(.*: its file \.lock\)"):
        take(FolderLock(tmp_path))


def test_folder_that_is_gone_is_said(tmp_path):
    (tmp_path / "run").mkdir()
    lock = take(FolderLock(tmp_path / "run"))
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run").rmdir()

    with pytest.raises(CheckpointError, match="is gone, and with it the checkpoints in it"):
        lock.check()


def test_holder_that_finds_another_let_in_by_the_file_system_writes_nothing(tmp_path):
    lock = take(FolderLock(tmp_path))
    (tmp_path / ".lock").write_text("process 7 on node1\nits token\n")  # as over NFS, once a lock has run out

    with pytest.raises(CheckpointInUseError, match="is in use by process 7 on node1, which its file system has let in"):
        lock.check()


def test_folder_that_another_process_holds_is_not_removed_by_a_call_that_fails(tmp_path, holder):
    folder_lock.remove_free(tmp_path)

    assert (tmp_path / ".lock").exists()
    holder.kill()
    holder.wait()
    for _ in range(100):
        folder_lock.remove_free(tmp_path)
        time.sleep(0.01)
    assert not tmp_path.exists()


# --- whose call has ended, and who was forked -------------------------------------------------------------------------


def test_folder_of_a_call_that_goes_on_is_refused_to_the_next_of_the_process_until_it_has_ended(tmp_path):
    lock = FolderLock(tmp_path)
    with lock.call:
        take(lock)
        with pytest.raises(CheckpointInUseError, match="call of fit in this process"):
            take(FolderLock(tmp_path))
        lock.check()

    take(FolderLock(tmp_path)).check()


def test_process_forked_from_the_holder_writes_nothing_and_releases_nothing(tmp_path):
    lock, storage = FolderLock(tmp_path), Storage(tmp_path)
    storage.guard = lock.check
    with lock.call:
        take(lock)
        storage.write({"by": "holder"}, 3)
        before = contents_of(tmp_path)

        def write():
            with pytest.raises(CheckpointInUseError, match="was forked; nothing is written here"):
                storage.write({"by": "fork"}, 4)

        assert in_a_fork(write) == 0
        assert contents_of(tmp_path) == before
        lock.check()
        with (tmp_path / ".lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def in_a_fork(act):
    """Return the exit code of a forked process that calls a function: 0, or 1 if it raises."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Forks(autoaccum.Callback):
    """Forks in a window; the child ends as it is told, unless `fit` ends it."""

    def __init__(self, ends):
        self.ends = ends
        self.code = None

    def on_step(self, report, *, epoch):
        if report.step != 5:
            return
        child = os.fork()
        if child == 0:
            self.ends()
        else:
            self.code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fails():
    raise MemoryError


@pytest.mark.parametrize("ends", [fails, lambda: None], ids=["fails", "returns"])
def test_process_forked_in_a_callback_leaves_checkpoints_log_reason_and_progress_to_its_parent(
    tmp_path, monkeypatch, capfd, ends
):
    def files_at(step):
        class Look(autoaccum.Callback):
            def on_step(self, report, *, epoch):
                if report.step == step:
                    seen.append(contents_of(tmp_path))

        return Look()

    monkeypatch.setenv("AUTOACCUM_REASON_FILE", str(tmp_path / "reason.json"))
    seen, forks, parent = [], Forks(ends), os.getpid()
    looks, log = files_at(5), autoaccum.JSONLinesLog(tmp_path / "log.jsonl")
    run = Run(
        checkpoint=tmp_path / "run",
        checkpoint_every=2,
        progress="lines",
        loader=lambda: loader_of(Noisy(), num_workers=1),
    )
    try:
        run.fit(log, looks, forks, looks)
    except BaseException:
        if os.getpid() != parent:  # what the child frees now must not end the workers of its parent
            os._exit(7)
        raise

    assert forks.code == 7
    assert seen[0] == seen[1]
    assert run.result.steps == 15
    assert capfd.readouterr().err.count("step 5/15") <= 1


# --- in fit -----------------------------------------------------------------------------------------------------------


def test_fit_within_a_fit_on_the_same_folder_is_refused_and_the_outer_one_goes_on(tmp_path):
    class Nested(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            if report.step == 2:
                with pytest.raises(CheckpointInUseError, match="call of fit in this process"):
                    Run(checkpoint=tmp_path).fit()

    expected = Run(max_steps=4)
    expected.fit()
    run = Run(checkpoint=tmp_path, checkpoint_every=1, max_steps=4)
    run.fit(Nested())

    assert run.result.steps == 4
    assert checkpoints(tmp_path) == ["step-00000003", "step-00000004"]


def test_run_whose_locks_file_was_removed_ends_at_the_next_checkpoint_and_writes_nothing(tmp_path):
    class Lost(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            if report.step == 3:
                (tmp_path / ".lock").unlink()

    run = Run(checkpoint=tmp_path, checkpoint_every=4, max_steps=9)
    with pytest.raises(CheckpointInUseError, match=r"its file \.lock was removed or replaced"):
        run.fit(Lost())

    assert list(run.samples.windows) == [1, 2, 3, 4]
    assert checkpoints(tmp_path) == []


def test_call_that_fails_before_it_trains_leaves_no_folder(tmp_path):
    class Refuses(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            pytest.fail("it has trained")

        def on_plan(self, plan, *, step, probe):
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        Run(checkpoint=tmp_path / "a" / "run").fit(Refuses())

    assert list(tmp_path.iterdir()) == []
