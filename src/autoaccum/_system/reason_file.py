"""Passes the reason why a process ended to `autoaccum run` in a file, since launchers turn all exit codes into 1.

The wrapper names the file in AUTOACCUM_REASON_FILE; a process writes it just before it ends. Neither side raises
because of the file: without it the wrapper has only the exit code.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from autoaccum._system import safe_files
from autoaccum._system.environment import REASON_FILE

OUT_OF_MEMORY = "out_of_memory"
# A file as `write` makes it has some hundred bytes; longer messages are cut.
_MOST_BYTES = 1 << 16
_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a process ended.

    Attributes:
        reason: `OUT_OF_MEMORY`; the wrapper does not act on any other word.
        micro_batch: Samples in the micro-batch at work; None if unknown.
        rank: The rank that wrote it; None outside a distributed job.
        message: For a person.
    """

    reason: str
    micro_batch: int | None = None
    rank: int | None = None
    message: str = ""


def write(reason: Reason) -> bool:
    """Write a reason for the wrapper; return False where no wrapper asks for one.

    Lack of memory replaces any earlier reason, since other ranks fail only because of it. Other reasons are written
    only where there is none yet.
    """
    named = os.environ.get(REASON_FILE)
    if not named:
        return False
    content = asdict(reason) | {"message": reason.message[:_MESSAGE_CHARS]}
    data = json.dumps(content).encode() + b"\n"
    try:
        safe_files.write(Path(named), data, overwrites=reason.reason == OUT_OF_MEMORY)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def read(path: Path) -> Reason | None:
    """Return the reason in a file; None where there is none, or nothing that `write` could have written."""
    try:
        content = json.loads(safe_files.read(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("reason"), str):
        return None
    message = content.get("message")
    return Reason(
        content["reason"],
        _whole(content.get("micro_batch"), least=1),
        _whole(content.get("rank"), least=0),
        message[:_MESSAGE_CHARS] if isinstance(message, str) else "",
    )


def _whole(value: object, *, least: int) -> int | None:
    return value if type(value) is int and value >= least else None
