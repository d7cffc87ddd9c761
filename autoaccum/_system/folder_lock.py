"""Gives one process at a time the right to write into a folder, by the operating system's lock on a file in it.

The kernel frees the lock when the process ends, however it ends. Between machines that share a file system the lock is
as good as that file system's: NFS passes it on to its server. Where another process was let in all the same, the file
holds what that one wrote, which the first finds before it writes a checkpoint. Where there are no locks, nothing is
protected, and a message says so. A process forked meanwhile has no part in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import secrets
import stat
import time
import weakref
from typing import TYPE_CHECKING

from autoaccum._system import signals
from autoaccum.errors import CheckpointError, CheckpointInUseError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAME = ".lock"
# How long a process waits for the holder to end: longer than the 120 s of docs/long-runs.md, in which a process that
# Slurm has asked to end writes its last checkpoint.
_PATIENCE_S, _PAUSE_S = 180.0, 1.0
_HOLDER = re.compile(rb"process \d+ on [\w.-]+")
_MOST_BYTES = 300
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
# The locks of this process, all of them, and those held by device and number of the folder: some file systems grant a
# lock twice to one process.
_made: weakref.WeakSet[FolderLock] = weakref.WeakSet()
_held: weakref.WeakValueDictionary[tuple[int, int], FolderLock] = weakref.WeakValueDictionary()


class FolderLock:
    """The right of this process to write into a folder, for one call of `fit`.

    Args:
        folder: The folder, which must exist when the lock is taken.

    Attributes:
        call: Holds the lock while it is open: `with lock.call`. Leaving that is the one thing that no interrupt can
            prevent, since Python's files are closed in C.
    """

    def __init__(self, folder: Path) -> None:
        self.call = open(os.devnull, "rb", buffering=0)  # noqa: PTH123, SIM115 - the caller closes it
        self._folder, self._path = folder, folder / NAME
        self._process = 0  # that has taken it
        self._is_locked = False
        self._written: bytes | None = None  # to the file; None if it cannot be written
        self._descriptor = -1  # while it is being taken
        weakref.finalize(self, self.call.close)  # where the caller did not come to that
        _made.add(self)

    def taking(self, say: Callable[[str], None]) -> Iterator[float]:
        """Take the lock, waiting for its holder; yield the seconds to pause before each further attempt.

        Args:
            say: Reports that this process waits, or that the file system has no locks.

        Raises:
            CheckpointInUseError: The holder is still alive after a long wait; or it is this process.
            CheckpointError: The folder cannot be written to.
        """
        began_at, is_said = time.monotonic(), False
        while (holder := self._attempt(say)) is not None:
            waited_s = time.monotonic() - began_at
            if waited_s >= _PATIENCE_S:
                raise CheckpointInUseError(
                    f"the checkpoint folder {self._folder} is in use by {holder}, after {waited_s:.0f} s of waiting; "
                    f"wait until that process has ended, or end it (if its machine is gone, remove {self._path}), or "
                    "pass another folder as checkpoint="
                )
            if not is_said:
                say(f"the checkpoint folder {self._folder} is in use by {holder}; waiting until it ends")
                is_said = True
            yield _PAUSE_S

    def _attempt(self, say: Callable[[str], None]) -> str | None:
        """Take the lock, or return its holder."""
        try:
            with signals.deferred():  # a descriptor that is lost would keep the lock
                return self._taken(say)
        except OSError as error:
            raise self._cannot_be_used(error) from error

    def _taken(self, say: Callable[[str], None]) -> str | None:
        place = self._folder.stat()
        other = _held.get((place.st_dev, place.st_ino))
        if other is not None and not other.call.closed:
            raise CheckpointInUseError(
                f"the checkpoint folder {self._folder} is in use by another call of fit in this process; give each "
                "call its own folder"
            )
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        self._descriptor = descriptor = os.open(self._path, flags, 0o666)
        try:
            with contextlib.suppress(OSError):  # another user's
                os.fchmod(descriptor, 0o666)  # as a folder is shared, so is its lock
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, f"{NAME} is no regular file")
            if self._is_refused(descriptor, say):
                with contextlib.suppress(OSError):  # where a lock keeps others from reading
                    if found := _HOLDER.match(os.read(descriptor, _MOST_BYTES)):
                        return found[0].decode()
                return "another process"
            if self._is_locked and not self._is_in_place(descriptor):
                return "another process"  # the file was removed in between
            own = f"process {os.getpid()} on {platform.node()}\n{secrets.token_hex(16)}\n".encode()
            self._written = None
            with contextlib.suppress(OSError):  # on a full disk
                os.ftruncate(descriptor, 0)
                self._written = own if os.write(descriptor, own) == len(own) else None
            os.dup2(descriptor, self.call.fileno(), inheritable=False)
            self._process = os.getpid()
            _held[place.st_dev, place.st_ino] = self
            return None
        finally:
            self._descriptor = -1
            os.close(descriptor)

    def _is_refused(self, descriptor: int, say: Callable[[str], None]) -> bool:
        """Lock a file where that can be done; return whether another process holds the lock."""
        self._is_locked = False
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_locked = True
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if not self._is_locked:
            say(
                f"the file system of the checkpoint folder {self._folder} has no locks, so nothing keeps a second "
                "process from writing there; start one at a time"
            )
        return False

    def check(self) -> None:
        """Check that this process still holds the folder.

        Raises:
            CheckpointInUseError: The lock's file was removed, or another process has written to it; or this process was
                forked from the holder.
            CheckpointError: The folder is gone or cannot be read.
        """
        if not self._process:
            return
        if self._process != os.getpid():
            raise CheckpointInUseError(
                f"the checkpoint folder {self._folder} is in use by process {self._process}, from which this one was "
                "forked; nothing is written here; end a forked process with os._exit() where it was forked"
            )
        if not self._is_locked:
            if not self._folder.is_dir():
                raise self._is_gone()
            return
        try:
            is_there = self._is_in_place(self.call.fileno())
            content = self._path.read_bytes() if is_there else b""
        except OSError as error:
            raise self._cannot_be_used(error) from error
        if not is_there or self._written not in (None, content):
            raise self._is_lost(content)

    def _is_lost(self, content: bytes) -> CheckpointError:
        """Return the error where the lock's file is gone, or holds something else."""
        if not self._folder.is_dir():
            return self._is_gone()
        if found := _HOLDER.match(content):
            return CheckpointInUseError(
                f"the checkpoint folder {self._folder} is in use by {found[0].decode()}, which its file system has let "
                "in although this process holds the lock (was this process suspended?); nothing more is written, and "
                "the other continues from the last checkpoint"
            )
        return CheckpointInUseError(
            f"the lock of this process on the checkpoint folder {self._folder} is gone: its file {NAME} was removed or "
            "replaced, and another process may train there; nothing more is written, and the same call resumes from "
            "the last checkpoint there"
        )

    def _is_in_place(self, descriptor: int) -> bool:
        """Whether the path still names an open file."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except FileNotFoundError:
            return False

    def _cannot_be_used(self, error: OSError) -> CheckpointError:
        if not self._folder.is_dir():
            return self._is_gone()
        return CheckpointError(
            f"the checkpoint folder {self._folder} cannot be written to ({error.strerror or error}: its file {NAME}); "
            "fix that, or pass another folder as checkpoint="
        )

    def _is_gone(self) -> CheckpointError:
        return CheckpointError(
            f"the folder {self._folder} is gone, and with it the checkpoints in it; do not touch the folder while "
            "training runs, or pass another as checkpoint="
        )


def remove_free(folder: Path) -> None:
    """Remove a folder in which there is nothing, or the file of a lock that nobody holds; leave any other."""
    path = folder / NAME
    with contextlib.suppress(OSError):
        if fcntl is not None and list(folder.iterdir()) == [path]:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        folder.rmdir()


def _leave_to_the_parent() -> None:
    """Close the locks in a forked process, which would keep them when the holder has ended."""
    for lock in list(_made):
        lock.call.close()
        if lock._descriptor >= 0:  # another thread was about to take it
            os.close(lock._descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
