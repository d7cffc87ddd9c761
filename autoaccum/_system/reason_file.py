"""Passes the reason why a process ended to `autoaccum run` in a file, since launchers convert all exit codes to 1.

The wrapper names the file in AUTOACCUM_REASON_FILE; a process writes it just before it ends. Neither side raises errors
about the file: without it the wrapper has only the exit code.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from autoaccum._system import safe_files
from autoaccum._system.environment import REASON_FILE

OUT_OF_MEMORY = "out_of_memory"
# Files written by `write` have some hundred bytes; longer messages are truncated.
_MOST_BYTES = 1 << 16
_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a process ended.

    Attributes:
        reason: `OUT_OF_MEMORY`; the wrapper ignores any other value.
        micro_batch: Samples in the current micro-batch; None if unknown.
        rank: The rank that wrote it; None outside a distributed job.
        message: A human-readable message.
    """

    reason: str
    micro_batch: int | None = None
    rank: int | None = None
    message: str = ""


def write(reason: Reason) -> bool:
    """Write a reason for the wrapper; return False if there is no wrapper.

    Lack of memory replaces any earlier reason, since other ranks fail only because of it. Other reasons are written
    only if there is none yet.
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
    """Return the reason in a file; None if there is none, or the content is not valid."""
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
