"""Tells `autoaccum run` why a process ended, or what it does, in a file: launchers turn all exit codes into 1.

The wrapper names the file in AUTOACCUM_REASON_FILE. Rank 0 writes it, and every other rank one of its own beside it, so
that no rank can overwrite the word of another; a rank's last word counts. Neither side raises errors about it: without
the file the wrapper has the exit code and stderr.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from autoaccum._system import files, launched
from autoaccum.errors import DoesNotFitError, InvalidInputError, StartAgainError, StateDamagedError

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
        rank: The rank that wrote it, set by `write`; None outside a distributed job.
        message: A human-readable message.
    """

    reason: str
    micro_batch: int | None = None
    rank: int | None = None
    message: str = ""


# Where this process has left lack of memory.
_left: Path | None = None


def write(reason: Reason) -> None:
    """Write a reason of this rank, if there is a wrapper."""
    global _left  # noqa: PLW0603 - of the process, like its file
    named = os.environ.get(launched.REASON_FILE)
    if not named:
        return
    rank = _own_rank()
    path = Path(f"{named}.{rank}" if rank else named)
    content = asdict(replace(reason, rank=rank, message=reason.message[:_MESSAGE_CHARS]))
    with contextlib.suppress(OSError):  # a rank on another node, say
        files.write(path, json.dumps(content).encode())
        _left = path if reason.reason == OUT_OF_MEMORY else None


def _take_back() -> None:
    """Take back this process's lack of memory: it has survived that, and goes on."""
    global _left  # noqa: PLW0603
    if _left is not None:
        with contextlib.suppress(OSError):
            _left.unlink(missing_ok=True)
        _left = None


def _own_rank() -> int | None:
    with contextlib.suppress(InvalidInputError):  # of variables, which is raised where it matters
        return launched.own_rank() if launched.world_size() > 1 else None
    return None


def read(path: Path) -> Reason | None:
    """Return what counts of the reasons of all ranks; None if there is none, or no content is valid.

    One rank's lack of memory counts: others fail only because of it. Of several sizes, the smallest counts.
    """
    paths = [path, *(one for one in path.parent.glob(f"{path.name}.*") if one.suffix[1:].isdigit())]
    found = [reason for one in paths if (reason := _read(one)) is not None]
    return min(found, key=lambda one: (_severity(one.reason), one.micro_batch or math.inf), default=None)


def _severity(word: str) -> int:
    """Return 0 for the word that counts before all others."""
    return {OUT_OF_MEMORY: 0, RUNNING: 2}.get(word, 1)


def _read(path: Path) -> Reason | None:
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
    Outside it too: the next call of such a function takes it back.
    """

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        _take_back()
        process = os.getpid()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _is_lack_of_memory(error) and os.getpid() == process:  # else it was forked, and the error is its own
                # A sample that does not fit: nothing smaller would help.
                size = 1 if isinstance(error, DoesNotFitError) else getattr(error, "micro_batch", None)
                write(Reason(OUT_OF_MEMORY, size, message=str(error)))
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
