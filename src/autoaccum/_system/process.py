"""Names a process so that another one, perhaps on another machine, can tell whether it is still there.

A pid alone does not do: pids are used again, and mean something else in another container. So the identity includes the
machine's boot, the pid namespace, in which alone the pid can be looked up, and the time of the start. A process counts
as alive unless it has certainly ended. Linux only; elsewhere no process is ever known to have ended.
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
# Of /proc/PID/stat, counted behind the name in parentheses (proc(5)): the state, and the start in ticks since boot.
_STATE, _START = 0, 19
_ENDED = (b"Z", b"X")
_NAME_CHARS = 253  # RFC 1123


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one machine.

    Attributes:
        host: The machine's name, for people.
        pid: The process's number.
        boot: Names the machine's run since it was started; "" where that is not known.
        namespace: Within which the number holds; 0 where that is not known.
        start: When the process was started, in ticks since boot; 0 where that is not known.
    """

    host: str
    pid: int
    boot: str = ""
    namespace: int = 0
    start: int = 0

    @classmethod
    def own(cls) -> Self:
        """Return the name of this process."""
        boot, namespace = _where()
        found = _state_and_start(os.getpid())
        return cls(platform.node(), os.getpid(), boot, namespace, 0 if found is None else found[1])

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self | None:
        """Return the name that `asdict` has made fields of; None where these are nothing of the kind."""
        host, pid, boot, namespace, start = (fields.get(name) for name in cls.__slots__)
        numbers_are_right = all(type(one) is int and 0 <= one < 1 << 63 for one in (pid, namespace, start))
        if not (isinstance(host, str) and isinstance(boot, str) and numbers_are_right and 0 < pid < 1 << 31):  # type: ignore[operator]
            return None
        readable = "".join(char if char.isprintable() else "?" for char in host[:_NAME_CHARS])
        return cls(readable, pid, boot, namespace, start)  # type: ignore[arg-type]

    def is_this_process(self) -> bool:
        """Whether it is certainly this one."""
        return bool(self.boot and self.namespace and self.start) and self == ProcessIdentity.own()

    def is_gone(self) -> bool:
        """Whether the process has certainly ended: it was of this machine, and is not there any more."""
        if not (self.boot and self.namespace and self.start) or (self.boot, self.namespace) != _where():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # another user's: it is there, though /proc may hide it
        found = _state_and_start(self.pid)
        return found is not None and (found[0] in _ENDED or found[1] != self.start)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _where() -> tuple[str, int]:
    """Return within what numbers of processes mean what they mean here."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return boot, (_PROC / "self/ns/pid").stat().st_ino
    return "", 0


def _state_and_start(pid: int) -> tuple[bytes, int] | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return fields[_STATE], int(fields[_START])
    return None
