"""Tells `autoaccum run` why a process ended, or what it does, in a file: launchers turn all exit codes into 1.

The wrapper names the file in AUTOACCUM_REASON_FILE. Neither side raises errors about it: without the file the wrapper
has the exit code and stderr.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from autoaccum._system import files
from autoaccum._system.launched import REASON_FILE
from autoaccum.errors import DoesNotFitError, StartAgainError, StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")

OUT_OF_MEMORY = "out_of_memory"
# No reason, but the size at work, for the case that the process is killed.
RUNNING = "running"
_MOST_BYTES = 1 << 16
_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a process ended.

    Attributes:
        reason: `OUT_OF_MEMORY`, `RUNNING` (it did not say), or the process's own word: then it is not restarted.
        micro_batch: Samples in the largest micro-batch; None if unknown.
        rank: The rank that wrote it; None outside a distributed job.
        message: A human-readable message.
    """

    reason: str
    micro_batch: int | None = None
    rank: int | None = None
    message: str = ""


def write(reason: Reason) -> None:
    """Write a reason, if there is a wrapper. Lack of memory stays: other ranks fail only because of it."""
    named = os.environ.get(REASON_FILE)
    if not named:
        return
    path = Path(named)
    if reason.reason != OUT_OF_MEMORY:
        earlier = read(path)
        if earlier is not None and earlier.reason == OUT_OF_MEMORY:
            return
    try:
        files.write(path, json.dumps(asdict(reason) | {"message": reason.message[:_MESSAGE_CHARS]}).encode())
    except OSError:  # a rank on another node, say
        return


def read(path: Path) -> Reason | None:
    """Return the reason in a file; None if there is none, or the content is not valid."""
    try:
        content = json.loads(files.read(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("reason"), str):
        return None
    return Reason(
        content["reason"],
        _whole(content.get("micro_batch"), least=1),
        _whole(content.get("rank"), least=0),
        str(content.get("message", ""))[:_MESSAGE_CHARS],
    )


def writes_reason(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a public function write the reason file when an out-of-memory error leaves it.

    Inside the library such an error may be caught, and a way round it found; so it is not written where it is raised.
    """

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _is_lack_of_memory(error):
                # A sample that does not fit: nothing smaller would help.
                size = 1 if isinstance(error, DoesNotFitError) else getattr(error, "micro_batch", None)
                rank = os.environ.get("RANK", "")
                write(Reason(OUT_OF_MEMORY, size, int(rank) if rank.isdigit() else None, str(error)))
            raise

    return called


def _is_lack_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, also within an optimizer that was half-way."""
    if isinstance(error, StateDamagedError):
        return _is_lack_of_memory(error.__cause__)
    known = isinstance(error, StartAgainError | DoesNotFitError | MemoryError)
    return known or type(error).__name__ == "OutOfMemoryError"


def _whole(value: object, *, least: int) -> int | None:
    return value if type(value) is int and value >= least else None
