"""One process writes into a checkpoint folder: a second one waits, takes over or is refused, and overwrites nothing.

Processes of other machines are leases with other names, and time is what the test says it is.
"""

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import autoaccum
from autoaccum._system import lease as lease_module
from autoaccum._system import signals
from autoaccum._system.lease import Holder, Lease
from autoaccum._system.notices import Notices
from autoaccum._training.checkpoint_files import Storage
from autoaccum.errors import CheckpointInUseError, InvalidInputError
from interleaving import Interleaving
from long_runs import Noisy, Run, checkpoints, loader_of

SECONDS = 60


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(lease_module, "time", made)
    return made


@pytest.fixture
def said():
    return []


@pytest.fixture
def of_host(tmp_path, monkeypatch):
    """Makes leases of other machines on one folder."""
    made = []

    def make(host, folder=tmp_path):
        with monkeypatch.context() as context:
            context.setattr(Holder, "own", lambda: Holder(host, 7, "boot/1", 1))
            made.append(Lease(folder))
        monkeypatch.setattr(lease_module, "_held", {})  # they are no calls of this process
        return made[-1]

    yield make
    for one in made:
        one.release()


def take(lease, clock, said=None, between=lambda: None, looks=10_000):
    say = (lambda _: None) if said is None else said.append
    for look, pause_s in enumerate(itertools.islice(lease.taking(say), looks)):
        clock.sleep(pause_s)
        between()
        assert look < looks - 1, "it was never taken"
    return lease


def leases(folder):
    return sorted(path.name for path in Path(folder).glob(".lease-*"))


# --- who waits, who takes over, who is refused ------------------------------------------------------------------------


def test_free_folder_is_taken_at_once_and_given_back(tmp_path, clock, said):
    lease = take(Lease(tmp_path), clock, said, looks=1)

    lease.check()
    assert leases(tmp_path) == [".lease-00000001"]
    lease.release()
    assert leases(tmp_path) == []
    assert said == []


def test_holder_that_renews_is_waited_for_and_then_named_in_the_refusal(of_host, clock, said):
    owner = take(of_host("node1"), clock)
    started = clock.now

    with pytest.raises(CheckpointInUseError, match="in use by process 7 on node1, which still renews its lease after"):
        take(of_host("node2"), clock, said, between=owner._renewed)

    assert clock.now - started == pytest.approx(3 * SECONDS, abs=3)
    assert len(set(said)) == 1
    assert "in use by process 7 on node1; waiting until it ends or has not renewed its lease for 60 s" in said[0]
    owner.check()


def test_two_that_wait_for_a_holder_look_again_at_unlike_times(of_host, clock):
    take(of_host("node1"), clock)

    pauses = [list(itertools.islice(of_host(host).taking(lambda _: None), 5)) for host in ("node2", "node3")]

    assert len({*pauses[0], *pauses[1]}) == 10


def test_contender_that_was_suspended_itself_does_not_take_a_holder_for_dead(of_host, clock):
    owner = take(of_host("node1"), clock)
    looks = itertools.count(1)

    def between():
        # Every other time the file server was away, for both, and the holder comes a moment after the contender's look.
        if next(looks) % 2:
            clock.sleep(10 * SECONDS)
        else:
            owner._renewed()

    with pytest.raises(CheckpointInUseError, match="still renews its lease"):
        take(of_host("node2"), clock, between=between)

    owner.check()


def test_killed_process_of_this_host_is_followed_at_once_and_without_a_word(tmp_path, clock, said):
    process = holder_here(tmp_path)
    process.kill()
    process.wait()

    take(Lease(tmp_path), clock, said, looks=1).release()

    assert said == []


def holder_here(folder):
    """Leave the lease of another process of this machine, which does not renew it."""
    process = subprocess.Popen(["/bin/sleep", "1000"])
    fields = asdict(identity_of(process.pid)) | {"token": "its", "lease_s": SECONDS}
    (folder / ".lease-00000001").write_text(json.dumps(fields))
    return process


def identity_of(pid):
    return replace(Holder.own(), pid=pid, start=lease_module._state_and_start(pid)[1])


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"pid": 1, "host": 3}', b"\xff\x00", "a pipe"])
def test_holder_that_renews_nothing_is_waited_out(tmp_path, of_host, clock, said, content):
    if content is None:
        take(of_host("node1"), clock)
    elif content == "a pipe":
        os.mkfifo(tmp_path / ".lease-00000041")
    else:
        (tmp_path / ".lease-00000041").write_bytes(content)
    started = clock.now

    take(of_host("node2"), clock, said).check()

    assert clock.now - started == pytest.approx(SECONDS, abs=3)
    who = "another process" if content is not None else "process 7 on node1"
    assert f"is taken over from {who}, which has not renewed its lease for 60 s" in said[-1]


@pytest.mark.parametrize("text", ["soon", "0", "nan", "1e9"])
def test_length_of_a_lease_that_is_no_number_of_seconds_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setenv("AUTOACCUM_LEASE_S", text)

    with pytest.raises(InvalidInputError, match="AUTOACCUM_LEASE_S="):
        Lease(tmp_path)


# --- which process is gone --------------------------------------------------------------------------------------------


def test_process_is_gone_when_it_has_ended_also_before_anybody_has_asked_how():
    process = subprocess.Popen(["/bin/sleep", "1000"])
    identity = identity_of(process.pid)
    assert not identity.is_gone()

    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identity.is_gone()  # a zombie
    process.wait()
    assert identity.is_gone()


def test_number_that_another_process_has_by_now_is_one_of_a_process_that_is_gone():
    own = Holder.own()

    assert not own.is_gone()
    assert replace(own, start=own.start - 1).is_gone()


@pytest.mark.parametrize("other", [{"where": "x/1"}, {"where": ""}, {"start": 0}])
def test_process_of_elsewhere_is_never_known_to_be_gone(other):
    assert not replace(Holder.own(), pid=2**31 - 1, **other).is_gone()


# --- who has lost it --------------------------------------------------------------------------------------------------


def contents_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_holder_that_was_suspended_finds_out_before_it_renames_and_touches_nothing(of_host, clock, tmp_path):
    owner = take(of_host("node1"), clock)
    storage = Storage(tmp_path)
    storage.guard = owner.check
    storage.write({"by": "node1"}, 3)
    other = Storage(tmp_path)
    other.guard = take(of_host("node2"), clock).check
    newer = other.write({"by": "node2"}, 4)
    before = contents_of(tmp_path)

    for act in (lambda: storage.write({"by": "node1"}, 4), storage.tidy):
        with pytest.raises(CheckpointInUseError, match="in use by process 7 on node2, which has taken it over"):
            act()

    assert contents_of(tmp_path) == before
    assert newer / "state.pt" in before
    assert owner.is_lost
    owner.release()
    other.guard()


@pytest.mark.parametrize("step", [4, 5])
def test_holder_suspended_between_its_last_look_and_the_rename_renames_nothing(of_host, clock, tmp_path, step):
    owner, storage, other = take(of_host("node1"), clock), Storage(tmp_path), Storage(tmp_path)
    storage.write({"by": "node1"}, 3)

    def look_and_sleep():
        owner.check()
        if other.newest is None:
            other.guard = take(of_host("node2"), clock).check
            other.tidy()
            other.write({"by": "node2"}, step)

    storage.guard = look_and_sleep

    with pytest.raises(CheckpointInUseError, match="on node2"):
        storage.write({"by": "node1"}, 4)

    (path,) = other.found()
    assert Storage(tmp_path).read_newest(Notices(silent=True)) == (path, {"by": "node2"})


def test_lease_that_somebody_has_removed_is_not_taken_again(tmp_path, clock):
    lease = take(Lease(tmp_path), clock)
    (tmp_path / ".lease-00000001").unlink()

    with pytest.raises(CheckpointInUseError, match="is gone: another process has taken the folder over and has ended"):
        lease.check()

    lease.release()
    assert leases(tmp_path) == []


def test_renewing_goes_on_after_an_error_that_passes(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOACCUM_LEASE_S", "0.06")
    went_well, calls, content = threading.Event(), itertools.count(), Lease._content

    def fails_twice(lease):
        call = next(calls)
        if call in (1, 2):
            raise OSError(5, "Input/output error")
        if call > 4:
            went_well.set()
        return content(lease)

    monkeypatch.setattr(Lease, "_content", fails_twice)
    lease = Lease(tmp_path)
    with lease.call:
        assert list(lease.taking(lambda _: None)) == []
        try:
            assert went_well.wait(60)
            assert not lease.is_lost
            assert lease._thread.daemon  # it keeps no process alive
        finally:
            lease.release()
    assert not lease._thread.is_alive()


# --- whose call has ended, and who was forked -------------------------------------------------------------------------


def test_lease_whose_call_has_ended_without_releasing_it_is_released_by_its_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOACCUM_LEASE_S", "0.06")
    lease = Lease(tmp_path)

    with lease.call:
        assert list(lease.taking(lambda _: None)) == []
    lease._thread.join(60)

    assert leases(tmp_path) == []


def test_lease_whose_call_has_ended_without_releasing_it_does_not_hinder_the_next_call(tmp_path, clock):
    lease = Lease(tmp_path)
    with lease.call:
        take(lease, clock)
        with pytest.raises(CheckpointInUseError, match="call of fit in this process"):
            take(Lease(tmp_path), clock)

    after = take(Lease(tmp_path), clock)

    after.check()
    assert not lease._thread.is_alive()
    after.release()


def in_a_fork(act):
    """Return the exit code of a forked process that calls a function: 0, or 1 if it raises."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_process_forked_from_the_holder_writes_nothing_and_releases_nothing(tmp_path):
    lease, storage = Lease(tmp_path), Storage(tmp_path)
    storage.guard = lease.check
    with lease.call:
        assert list(lease.taking(lambda _: None)) == []
        storage.write({"by": "holder"}, 3)
        before = contents_of(tmp_path)

        def write():
            with pytest.raises(CheckpointInUseError, match="from which this one was forked; nothing is written here"):
                storage.write({"by": "fork"}, 4)
            lease.release()

        assert in_a_fork(write) == 0
        assert contents_of(tmp_path) == before
        lease.check()
        lease.release()


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
    assert [path.name for path, _ in seen[0].items()] == [path.name for path, _ in seen[1].items()]
    changed = {path for path in seen[0] if seen[0][path] != seen[1][path]}
    assert all(path.name.startswith(".lease-") for path in changed)
    assert run.result.steps == 15
    assert capfd.readouterr().err.count("step 5/15") <= 1


def test_handler_of_the_parent_does_not_hold_back_signals_of_a_process_forked_in_a_block():
    def ends():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    with signals.held():
        code = in_a_fork(ends)

    assert code == 0


# --- several at once --------------------------------------------------------------------------------------------------


class Contest:
    """Leases of several machines on one folder; each is taken and given back, step by step in a drawn order."""

    def __init__(self, seed, members, clock):
        self.order = Interleaving(seed)
        self.members = members
        self.taken = []
        self._clock = clock
        self._old = None

    def run(self, old=None):
        for member in self.members:
            self.order.add(functools.partial(self._live, member))
        self._old = old
        if old is not None:
            self.taken.append(old)
            self.order.add(functools.partial(self._wake, old))
        self.order.run(self._look)

    def _live(self, member):
        for pause_s in member.taking(lambda _: None):
            self._clock.sleep(pause_s)
            self.order.point()
        self.taken.append(member)
        self.order.point()
        if self._old is None:  # else nobody waits long, and it may be overtaken by right
            member.check()
        member.release()

    def _wake(self, old):
        for _ in range(30):
            self.order.point()
        old.release()

    def _look(self):
        assert len([one for one in self.taken if has_its_file(one)]) <= 1


def has_its_file(lease):
    return lease._path is not None and lease._path.exists() and lease._own.token in lease._path.read_text()


@pytest.mark.parametrize("is_held", [False, True], ids=["empty folder", "silent holder"])
def test_of_several_at_once_one_holds_the_folder_however_their_steps_fall(
    of_host, tmp_path, clock, monkeypatch, is_held
):
    contest = None

    def at_a_point(function):
        def call(*args, **options):
            if contest is not None:
                contest.order.point()
            return function(*args, **options)

        return call

    monkeypatch.setattr(lease_module, "_LOOKS", 4 if is_held else 1000)  # the former for time's sake
    monkeypatch.setattr(lease_module, "_PATIENCE", 1000.0)  # all are to have their turn
    monkeypatch.setattr(Lease, "_begin_to_renew", lambda _: None)
    for name in ("open", "iterdir", "unlink"):
        monkeypatch.setattr(Path, name, at_a_point(getattr(Path, name)))
    for seed in range(60):
        folder = tmp_path / str(seed)
        folder.mkdir()
        old, *members = (of_host(f"node{number}", folder) for number in range(4))
        contest = None
        if is_held:
            take(old, clock)
        contest = Contest(seed, members, clock)

        contest.run(old if is_held else None)

        assert len(contest.taken) == 3 + is_held
        assert leases(folder) == []


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


def test_run_that_has_lost_its_folder_ends_at_the_next_window_and_writes_nothing(tmp_path, of_host, clock, monkeypatch):
    made = []
    begin = Lease.__init__
    monkeypatch.setattr(Lease, "__init__", lambda lease, folder: (begin(lease, folder), made.append(lease))[0])

    class Lost(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            if report.step == 3:
                (tmp_path / ".lease-00000001").unlink()
                take(of_host("node2"), clock)
                made[0].is_lost = not made[0]._renewed()  # as its thread does every few seconds

    run = Run(checkpoint=tmp_path, checkpoint_every=None, max_steps=9)
    with pytest.raises(CheckpointInUseError, match="on node2, which has taken it over because"):
        run.fit(Lost())

    assert list(run.samples.windows) == [1, 2, 3]
    assert checkpoints(tmp_path) == []


def test_holder_that_wakes_does_not_mistake_another_file_of_its_number_for_its_own(of_host, clock, tmp_path):
    owner = take(of_host("node1"), clock)
    take(of_host("node2"), clock).release()
    third = take(of_host("node3"), clock)
    assert leases(tmp_path) == [".lease-00000001"]

    assert not owner._renewed()
    with pytest.raises(CheckpointInUseError, match="on node3"):
        owner.check()
    owner.release()

    third.check()
