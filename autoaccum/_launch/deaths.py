"""Diagnoses whether a command ended for lack of memory, with evidence. The caller reads files and counters.

Evidence is used in this order: the command's reason file; an exit code that means nothing else; the exception that
ended it (`last_words.py`), by the table of `_oom.py`; and for a killed process the kernel's counters. A SIGKILL alone
is not evidence, because anybody may have sent it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from autoaccum._launch.last_words import killed_by, memory_words
from autoaccum._launch.launchers import KILLED, SIGNAL_BASE
from autoaccum._memory.kills import risen
from autoaccum._system.reason_file import OUT_OF_MEMORY
from autoaccum.errors import StartAgainError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autoaccum._system.reason_file import Reason

# The exit code of every command of autoaccum if not even one sample fits.
DOES_NOT_FIT = 4

_LINE_CHARS = 120


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    Attributes:
        exit_code: Its exit code; None if a signal ended it.
        signal: The signal that ended it; None if it exited.
        tail: The end of its stderr.
        refusal: Why it could not be started; empty if it was.
    """

    exit_code: int | None
    signal: int | None = None
    tail: str = ""
    refusal: str = ""

    @property
    def code(self) -> int:
        """The exit code as a shell reports it."""
        if self.signal is not None:
            return SIGNAL_BASE + self.signal
        assert self.exit_code is not None
        return self.exit_code

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.exit_code}"
        return f"{_signal_name(self.signal)} (exit code {self.code})"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of an end.

    Attributes:
        kind: Its kind.
        evidence: The evidence, as text.
        micro_batch: The micro-batch that ran out of memory, if the command reports it.
    """

    kind: Literal["done", "out_of_memory", "other"]
    evidence: str
    micro_batch: int | None = None


def diagnose(
    ended: Ended,
    *,
    reason: Reason | None = None,
    kills_before: Mapping[str, int] | None = None,
    kills_after: Mapping[str, int] | None = None,
) -> Diagnosis:
    """Diagnose whether a command ended for lack of memory.

    Args:
        ended: How the command ended.
        reason: The content of its reason file.
        kills_before: The kernel's counters of out-of-memory kills before it started.
        kills_after: The same counters after it ended.
    """
    if ended.code == 0:
        return Diagnosis("done", "exit code 0")
    if ended.exit_code == DOES_NOT_FIT:
        return Diagnosis("other", "exit code 4 of autoaccum: not even one sample fits")
    return _by_words(ended, reason) or _by_kill(ended, kills_before or {}, kills_after or {})


def _by_words(ended: Ended, reason: Reason | None) -> Diagnosis | None:
    """Judge by what the command or Slurm wrote; None if that does not mention memory."""
    if reason is not None:
        where = "" if reason.rank is None else f"rank {reason.rank}: "
        if reason.reason == OUT_OF_MEMORY:
            return Diagnosis("out_of_memory", f"its reason file: {where}{_short(reason.message)}", reason.micro_batch)
        return Diagnosis("other", f"its reason file: {where}{_short(f'{reason.reason}: {reason.message}')}")
    if ended.exit_code == StartAgainError.exit_code:
        return Diagnosis("out_of_memory", "exit code 75, which requests a restart with a smaller cut")
    said = memory_words(ended.tail, ended.code)
    if said is not None:
        return Diagnosis("out_of_memory", f"on stderr: {_short(said)}")
    return None


def _by_kill(ended: Ended, before: Mapping[str, int], after: Mapping[str, int]) -> Diagnosis:
    by = str(ended)
    if ended.code != KILLED:
        source = killed_by(ended.tail, ended.code)
        if source is None:
            return Diagnosis("other", by)
        by = f"{source} reports SIGKILL"
    counters = risen(before, after)
    if counters:
        rises = ", ".join(f"{name} by {count}" for name, count in counters.items())
        return Diagnosis("out_of_memory", f"{by}, and the kernel's count of out-of-memory kills rose: {rises}")
    looked_at = ", ".join(after) or "there is none here"
    return Diagnosis("other", f"{by}, but no count of out-of-memory kills rose (checked: {looked_at})")


def _short(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"
