"""Gives one process at a time the right to write into a folder, on a file system that several machines may share.

The holder has a file in the folder, `.lease-N`, which identifies it and which one of its threads rewrites every few
seconds. Another process takes over once it has seen that file unchanged for the duration of the lease, by its own
clock, or at once if the holder was a process of the same machine that has ended. A lease belongs to one call of `fit`,
and ends with it even if interrupts keep the call from releasing it. A process forked meanwhile has no part in it.

The process whose file exists holds the folder. To take over, a process creates the file with the next number, which
only one of several can (O_EXCL), checks that the files it judged are unchanged, and removes them. A suspended holder
then finds its file gone. `check` tests for that before each rename. If the holder is suspended between `check` and its
rename, it finds the file to rename gone too, since the new holder deletes unfinished files (`Storage.tidy`) before it
reads or writes anything else. So timing decides only who holds the folder, never correctness.

filelock's SoftFileLease takes over by atomically exchanging two names (renameat2), which NFS and SMB do not support:
there it never takes over, and a dead node would keep its job from starting. This module relies only on what all of them
support: exclusive creation, removal, and close-to-open consistency.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import random
import re
import secrets
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from autoaccum._system import files, launched, signals
from autoaccum.errors import CheckpointError, CheckpointInUseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Many times as long as a holder may be blocked, by other threads or its file server.
_LEASE_S = 60.0
# Renewals per lease duration.
_RENEWALS = 6
# Polls of a waiting process per lease duration, and the lease durations after which it gives up on a live holder. The
# latter exceeds the 120 s of docs/long-runs.md, in which a process that Slurm has asked to end writes its last
# checkpoint.
_LOOKS = 60
_PATIENCE = 3.0
_NAME = re.compile(r"\.lease-(\d{8,18})")
_MOST_BYTES = 4096
# A file server that is briefly unavailable, or a file that was replaced while being opened.
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR)
_PAUSES_S = (0.1, 0.5, 1.0)

_PROC = Path("/proc")
# Fields of /proc/PID/stat, counted after the name in parentheses (proc(5)): state, and start in ticks since boot.
_STATE, _START = 0, 19
_ENDED = (b"Z", b"X")

# The leases held by this process, by pid (to exclude forks) and token.
_held: dict[tuple[int, str], Lease] = {}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, as its file says, so that another process, perhaps on another machine, can tell if it runs.

    A pid alone is not enough: pids are reused, and differ between containers. A process counts as alive unless it has
    certainly ended. Linux only; elsewhere no process is ever known to have ended.

    Attributes:
        host: The machine's name, for display; "" if the file is truncated or something else.
        pid: The process's pid.
        where: The machine's boot and the pid namespace, in which alone the pid is valid; "" if unknown.
        start: The start time of the process in ticks since boot; 0 if unknown.
        token: The lease's own.
        lease_s: How long it lasts without being renewed.
    """

    host: str = ""
    pid: int = 0
    where: str = ""
    start: int = 0
    token: str = ""
    lease_s: float = 0.0

    @classmethod
    def own(cls) -> Self:
        """Return this process, without a lease."""
        found = _state_and_start(os.getpid())
        return cls(platform.node(), os.getpid(), _where(), 0 if found is None else found[1])

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Return what the content of a file says."""
        try:
            said = json.loads(content)
            process = said["host"], int(said["pid"]), str(said["where"]), int(said["start"])
            return cls(*process, str(said["token"]), min(float(said["lease_s"]), launched.MOST_LEASE_S))
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls()

    def is_this_process(self) -> bool:
        """Whether this is certainly the current process."""
        return bool(self.where and self.start) and replace(self, token="", lease_s=0.0) == Holder.own()

    def is_gone(self) -> bool:
        """Whether the process has certainly ended: it was on this machine, and no longer exists."""
        if not (self.where and self.start) or self.where != _where():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # another user's process: it exists, though /proc may hide it
        found = _state_and_start(self.pid)
        return found is not None and (found[0] in _ENDED or found[1] != self.start)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.host else "another process"


def _where() -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').stat().st_ino}"
    return ""


def _state_and_start(pid: int) -> tuple[bytes, int] | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return fields[_STATE], int(fields[_START])
    return None


class Lease:
    """The right of this process to write into a folder.

    Args:
        folder: The folder, which must exist.

    Attributes:
        call: Locked for as long as the lease is in use: `with lease.call`. Leaving that is the one thing that no
            interrupt can prevent (a lock is left in C), so a lease whose lock is open is released by its thread, or by
            the next lease of this process on the folder.
        is_lost: Whether the renewing thread has found that another process has taken over; only `check` is
            authoritative.

    Raises:
        InvalidInputError: AUTOACCUM_LEASE_S is not a valid number of seconds.
    """

    def __init__(self, folder: Path) -> None:
        self.call = threading.Lock()
        self._folder = folder
        self._seconds = launched.seconds(launched.LEASE_S, _LEASE_S, launched.MOST_LEASE_S)
        self._own = replace(Holder.own(), token=secrets.token_hex(16), lease_s=self._seconds)
        self._path: Path | None = None
        self._process = 0
        self._renewals = 0
        self._ages: dict[tuple[Path, bytes], float] = {}  # how long each file of others has been unchanged
        self._looked_at = time.monotonic()
        self._waited_s = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_lost = False

    # --- to take it ---------------------------------------------------------------------------------------------------

    def taking(self, say: Callable[[str], None]) -> Iterator[float]:
        """Take the lease, waiting for its holder; yield the seconds to pause before each further attempt.

        Args:
            say: Reports that this process waits, or has taken over.

        Raises:
            CheckpointInUseError: The holder is still alive after a long wait; or it is this process.
            CheckpointError: The folder cannot be written to.
        """
        while True:
            try:
                with signals.held():  # a half-finished attempt would block the next
                    holder = self._attempt(say)
            except OSError as error:
                if error.errno not in _TRANSIENT or self._waited_s >= _PATIENCE * self._seconds:
                    raise self._cannot_claim(error) from error
            else:
                if holder is None:
                    return
                if holder:
                    say(
                        f"the checkpoint folder {self._folder} is in use by {holder}; waiting until it ends or has "
                        f"not renewed its lease for {self._seconds:g} s"
                    )
            yield self._pause_s * random.uniform(0.5, 1.5)  # noqa: S311 - so that two do not back off in step

    def _attempt(self, say: Callable[[str], None]) -> str | None:
        """Take the lease, or return its holder; "" if another process came at the same time."""
        now = time.monotonic()
        # If this process was suspended or its file server unavailable, the same may be true of the holder.
        passed_s = min(now - self._looked_at, 2.0 * self._pause_s)
        self._looked_at = now
        self._waited_s += passed_s
        others = self._others()
        self._ages = {one: self._ages[one] + passed_s if one in self._ages else 0.0 for one in others.items()}
        silent = []
        for (_, content), age_s in self._ages.items():
            holder = Holder.of(content)
            held = _held.get((os.getpid(), holder.token))
            if held is not None and not held.call.locked():
                held.release()  # interrupts have kept its call from that
                return ""
            if held is not None:
                raise CheckpointInUseError(
                    f"the checkpoint folder {self._folder} is in use by another call of fit in this process; give "
                    "each call its own folder"
                )
            if holder.is_gone() or holder.is_this_process():
                continue  # the second: an earlier call could not remove its file
            if age_s < (holder.lease_s or self._seconds):
                if 0.0 in self._ages.values() and self._waited_s >= _PATIENCE * self._seconds:
                    raise CheckpointInUseError(
                        f"the checkpoint folder {self._folder} is in use by {holder}, which still renews its "
                        f"lease after {self._waited_s:.0f} s of waiting; wait until that process has ended, or end "
                        "it, or pass another folder as checkpoint="
                    )
                return str(holder)
            silent.append(holder)
        if not self._created(others):
            return ""
        for holder in silent:
            say(
                f"the checkpoint folder {self._folder} is taken over from {holder}, which has not renewed its "
                f"lease for {self._seconds:g} s"
            )
        return None

    @property
    def _pause_s(self) -> float:
        return self._seconds / _LOOKS

    def _created(self, judged: dict[Path, bytes]) -> bool:
        """Become the holder in place of the judged ones; return False if another process was faster."""
        number = 1 + max((_number(path) for path in judged), default=0)
        path = self._folder / f".lease-{number:08d}"
        try:
            with path.open("xb") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._path, self._process = path, os.getpid()
        is_holder = False
        try:
            if self._others() == judged:
                for other, content in judged.items():
                    if _bytes_of(other) == content:
                        other.unlink(missing_ok=True)
                if self._is_own(path):
                    self._begin_to_renew()
                    is_holder = True
        finally:
            if not is_holder:
                self._remove()
        return is_holder

    def _others(self) -> dict[Path, bytes]:
        """Return the files of other processes with their content."""
        return {path: content for path, content in self._files().items() if path != self._path}

    def _files(self) -> dict[Path, bytes]:
        paths = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        found = {path: _bytes_of(path) for path in sorted(paths, key=_number, reverse=True)}
        return {path: content for path, content in found.items() if content is not None}

    def _cannot_claim(self, error: OSError) -> CheckpointError:
        if not self._folder.is_dir():
            return self._is_gone()
        return CheckpointError(
            f"the checkpoint folder {self._folder} cannot be written to ({error.strerror or error}: its lease "
            "file); fix that, or pass another folder as checkpoint="
        )

    def _is_gone(self) -> CheckpointError:
        return CheckpointError(
            f"the folder {self._folder} is gone, and with it the checkpoints in it; do not touch the folder while "
            "training runs, or pass another as checkpoint="
        )

    # --- to keep it ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that this process still holds the folder.

        Raises:
            CheckpointInUseError: Another process has taken it over; or this process was forked from the holder.
            CheckpointError: The folder is gone or cannot be read.
        """
        if self._path is None:
            return
        if self._process != os.getpid():
            raise CheckpointInUseError(
                f"the checkpoint folder {self._folder} is in use by process {self._process}, from which this one was "
                "forked; nothing is written here; end a forked process with os._exit() where it was forked"
            )
        for pause_s in (*_PAUSES_S, None):
            try:
                is_there = self._is_own(self._path)
                break
            except OSError as error:
                if pause_s is None:
                    raise self._cannot_claim(error) from error
                time.sleep(pause_s)
        if is_there:
            return
        self.is_lost = True
        if not self._folder.is_dir():
            raise self._is_gone()
        with contextlib.suppress(OSError):
            for content in self._files().values():
                raise CheckpointInUseError(
                    f"the checkpoint folder {self._folder} is in use by {Holder.of(content)}, which has taken it "
                    f"over because this process had not renewed its lease for {self._seconds:g} s (was it "
                    "suspended?); nothing more is written, and the other process continues from the last checkpoint"
                )
        raise CheckpointInUseError(
            f"the lease of this process on the checkpoint folder {self._folder} is gone: another process has taken the "
            "folder over and has ended since, or the lease's file was removed; nothing more is written, and "
            "the same call resumes from the last checkpoint there"
        )

    def release(self) -> None:
        """Release the folder; without effect if this process does not hold it."""
        if self._path is None or self._process != os.getpid():
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=_LEASE_S)  # it removes the file, and may be waiting for a file server
        self._remove()

    def _remove(self) -> None:
        """Remove this process's file, if it exists; if that fails, others find this process gone, or not renewing."""
        path, self._path = self._path, None
        with contextlib.suppress(OSError):
            if path is not None and self._is_own(path):
                path.unlink(missing_ok=True)
        _held.pop((self._process, self._own.token), None)

    def _is_own(self, path: Path) -> bool:
        content = _bytes_of(path)
        return content is not None and Holder.of(content).token == self._own.token

    def _begin_to_renew(self) -> None:
        # A daemon, so that it keeps no process alive. Forked processes do not have it.
        thread = threading.Thread(target=self._renew_until_stopped, name="autoaccum-lease", daemon=True)
        _held[self._process, self._own.token] = self
        thread.start()
        self._thread = thread

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(self._seconds / _RENEWALS) and self.call.locked():
            # Whatever the error, even lack of memory: the next renewal may succeed, and `check` does not depend on it.
            with contextlib.suppress(Exception):
                self.is_lost = not self._renewed()
        self._remove()  # here, where no interrupt arrives

    def _renewed(self) -> bool:
        """Rewrite this process's file in place; a file that another process has replaced or removed is not touched."""
        assert self._path is not None
        try:
            with self._path.open("r+b", buffering=0) as file:
                if Holder.of(file.read(_MOST_BYTES) or b"").token != self._own.token:
                    return False
                self._renewals += 1
                file.seek(0)
                file.write(self._content())
        except FileNotFoundError:
            return False
        return True

    def _content(self) -> bytes:
        # Constant length, so that rewriting needs no space on a full disk.
        return (json.dumps(asdict(self._own) | {"renewals": f"{self._renewals:012d}"}) + "\n").encode()


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _bytes_of(path: Path) -> bytes | None:
    """Return a file's current content on the file server; None if it does not exist."""
    try:
        with files.open_regular(path) as file:
            return file.read(_MOST_BYTES)
    except files.NotAFileError:
        return b""
    except FileNotFoundError:
        return None
