"""Why a process ended, left in a file for whoever started it: a launcher between them turns exit codes into 1.

The wrapper names the file in AUTOACCUM_REASON_FILE; a process writes to it just before it ends, and the wrapper reads
it afterwards. Neither side raises because of the file: without it there is less to go by, and nothing else is lost.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from autoaccum._system import safe_files, whole_files
from autoaccum._system.environment import REASON_FILE

OUT_OF_MEMORY = "out_of_memory"
# What `write` leaves has some hundred bytes; a message that is longer than this is cut.
_MOST_BYTES = 1 << 16
_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a process ended.

    Attributes:
        reason: `OUT_OF_MEMORY`, or another word that is not acted upon.
        micro_batch: The samples with which it happened; None where that is not known.
        rank: The rank that says so; None outside a distributed job.
        message: For a person.
    """

    reason: str
    micro_batch: int | None = None
    rank: int | None = None
    message: str = ""


def write(reason: Reason) -> bool:
    """Leave a reason for the wrapper; return False where there is no wrapper that asks for one.

    Lack of memory takes the place of whatever was left before, since other ranks fail only because of it; any other
    reason stands only where there is none yet.
    """
    named = os.environ.get(REASON_FILE)
    if not named:
        return False
    content = asdict(reason) | {"message": reason.message[:_MESSAGE_CHARS]}
    data = json.dumps(content).encode() + b"\n"
    try:
        whole_files.write(Path(named), data, overwrites=reason.reason == OUT_OF_MEMORY)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def read(path: Path) -> Reason | None:
    """Return what was left in a file; None where there is none, or nothing that `write` could have left."""
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
