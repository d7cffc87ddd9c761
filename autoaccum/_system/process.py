"""Identifies a process so that another one, perhaps on another machine, can tell whether it is still running.

A pid alone is not enough: pids are reused, and differ between containers. The identity therefore includes the machine's
boot ID, the pid namespace, in which alone the pid is valid, and the start time. A process counts as alive unless it has
certainly ended. Linux only; elsewhere no process is ever known to have ended.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROC = Path("/proc")
# Fields of /proc/PID/stat, counted after the name in parentheses (proc(5)): state, and start in ticks since boot.
_STATE, _START = 0, 19
_ENDED = (b"Z", b"X")
_NAME_CHARS = 253  # RFC 1123


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process of a machine.

    Attributes:
        host: The machine's name, for display.
        pid: The process's pid.
        boot: The ID of the machine's boot; "" if unknown.
        namespace: The pid namespace; 0 if unknown.
        start: The start time of the process in ticks since boot; 0 if unknown.
    """

    host: str
    pid: int
    boot: str = ""
    namespace: int = 0
    start: int = 0

    @classmethod
    def own(cls) -> Self:
        """Return the identity of this process."""
        boot, namespace = _where()
        found = _state_and_start(os.getpid())
        return cls(platform.node(), os.getpid(), boot, namespace, 0 if found is None else found[1])

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self | None:
        """Return the identity with fields from `asdict`; None if they are not valid."""
        host, pid, boot, namespace, start = (fields.get(name) for name in cls.__slots__)
        numbers_are_right = all(type(one) is int and 0 <= one < 1 << 63 for one in (pid, namespace, start))
        if not (isinstance(host, str) and isinstance(boot, str) and numbers_are_right and 0 < pid < 1 << 31):  # type: ignore[operator]
            return None
        readable = "".join(char if char.isprintable() else "?" for char in host[:_NAME_CHARS])
        return cls(readable, pid, boot, namespace, start)  # type: ignore[arg-type]

    def is_this_process(self) -> bool:
        """Whether this is certainly the current process."""
        return bool(self.boot and self.namespace and self.start) and self == ProcessIdentity.own()

    def is_gone(self) -> bool:
        """Whether the process has certainly ended: it was on this machine, and no longer exists."""
        if not (self.boot and self.namespace and self.start) or (self.boot, self.namespace) != _where():
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
        return f"process {self.pid} on {self.host}"


def _where() -> tuple[str, int]:
    """Return the boot ID and pid namespace that pids are valid in; ("", 0) if unknown."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return boot, (_PROC / "self/ns/pid").stat().st_ino
    return "", 0


def _state_and_start(pid: int) -> tuple[bytes, int] | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return fields[_STATE], int(fields[_START])
    return None
