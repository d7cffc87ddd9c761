"""Diagnoses whether a command ended because memory ran out, with evidence. The caller reads files and counters.

In this order: the command's reason file; an exit code that means nothing else; for a killed process the kernel's
counters; the last exception on stderr, by the table of `_oom.py`. The last is a guess, for scripts that do not know
autoaccum: a wrong one costs restarts in vain, never a wrong result.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum._oom import OOM_SIGNS
from autoaccum._system.reason_file import OUT_OF_MEMORY, RUNNING
from autoaccum.errors import StartAgainError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autoaccum._launch.supervisor import Ended
    from autoaccum._system.reason_file import Reason

# The exit code of `autoaccum run` if no size fits; one inside another must not be repeated.
DOES_NOT_FIT = 4
KILLED = 128 + 9  # SIGKILL, which Windows does not have
# Exit codes that lack of memory leaves: an exception (1), an abort (134), SIGKILL (137), and Slurm's for a step with a
# killed process (5, 125, and 253 for that as a signal).
_CODES = {1, 5, 125, 128 + signal.SIGABRT, KILLED, 253}
_MOST_LINES = 4000
_MOST_CHARS = 1000
_SHOWN_CHARS = 120

_LABEL = re.compile(r"\x1b\[[\d;]*m|^(\[(rank|default)?\d+\]:|\d+:) ?")
_LACK = re.compile(
    "|".join(sign.pattern for sign in OOM_SIGNS)
    + r"|\b(_ArrayMemory|Memory|OutOfMemory)Error\b"
    # Slurm's own words, for a step that it or the kernel killed; on other nodes no counter here tells of that.
    + r"|^slurmstepd\S* error: .*(\boom[-_ ]kill event|\bexceeded (job )?memory limit)"
    + r"|^srun: error: [^\s:]+: tasks? [\d,\[\]-]+: Out Of Memory\s*$",
    re.IGNORECASE,
)
_EXCEPTION = re.compile(
    r"(^|\s)[\w.]*[A-Za-z](Error|Exception|Interrupt|ExceptionGroup)\b(:|$)|^terminate called after"
)
_CAUSE = "The above exception was the direct cause of the following exception"
# What follows from another process's end, or ends nothing.
_AFTERWARDS = re.compile(
    r"ChildFailedError|CalledProcessError|Process(Exited|Raised)Exception|RankFailedError|Dist(Backend|Network|Store)Error"
    r"|Connection (closed|reset)|interpreter shutdown|I/O operation on closed file"
)
_REPORTED = re.compile(r"\bexitcode\s*: (-?\d+)|\bexit(?:ed with exit)? (?:code|status) (\d+)")
_REPORTED_KILL = re.compile(
    r"\bexitcode\s*: -9\b|\bSIGKILL\b|is killed by signal: Killed|^srun: .*: Killed\s*$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of an end.

    Attributes:
        is_oom: Whether memory ran out.
        evidence: The evidence, as text.
        micro_batch: The micro-batch that ran out of memory, if the command says so.
    """

    is_oom: bool
    evidence: str
    micro_batch: int | None = None


def passed_on(code: int) -> int:
    """Return the exit code for a command that ran out of memory at every size: its own, if it chose one."""
    return DOES_NOT_FIT if code in {*_CODES, StartAgainError.exit_code} else code


def diagnose(ended: Ended, reason: Reason | None, risen: Mapping[str, int]) -> Diagnosis:
    """Diagnose whether a command ended because memory ran out.

    Args:
        ended: How the command ended.
        reason: The content of its reason file.
        risen: The kernel's counters of out-of-memory kills that rose meanwhile, and by how much.
    """
    size = None if reason is None else reason.micro_batch
    if ended.code in (0, DOES_NOT_FIT):
        return Diagnosis(False, f"exit code {ended.code}")
    if reason is not None and reason.reason != RUNNING:
        where = "" if reason.rank is None else f"rank {reason.rank}: "
        said = reason.message if reason.reason == OUT_OF_MEMORY else f"{reason.reason}: {reason.message}"
        return Diagnosis(reason.reason == OUT_OF_MEMORY, f"its reason file: {where}{_short(said)}", size)
    if ended.code == StartAgainError.exit_code:
        return Diagnosis(True, f"exit code {ended.code}, which asks for a restart", size)
    last = "\n".join(ended.tail.splitlines()[-_MOST_LINES:])
    if risen and (ended.code == KILLED or (ended.code in _CODES and _REPORTED_KILL.search(last))):
        rises = ", ".join(f"{name} by {count}" for name, count in risen.items())
        return Diagnosis(True, f"SIGKILL, and the kernel's count of out-of-memory kills rose: {rises}", size)
    line = _oom_in(last) if ended.code in _CODES else None
    if line is not None:
        return Diagnosis(True, f"on stderr: {_short(line)}", size)
    killed = ", and no count of out-of-memory kills rose" if ended.code == KILLED else ""
    return Diagnosis(False, f"{_name(ended.code)}{killed}")


def _oom_in(text: str) -> str | None:
    """Return the line that says that memory ran out, if the last exception does, and what a launcher reports fits."""
    reported = _REPORTED.findall(text)
    if reported:
        code = int(reported[-1][0] or reported[-1][1])
        if (code if code >= 0 else 128 - code) not in _CODES:
            return None
    has_ended = False
    for line in (_LABEL.sub("", line[:_MOST_CHARS]) for line in reversed(text.splitlines())):
        if has_ended and line.startswith(_CAUSE):
            has_ended = False
        elif _AFTERWARDS.search(line):
            continue
        elif _LACK.search(line) and not has_ended:
            return line
        elif _EXCEPTION.search(line):
            if has_ended:
                return None
            has_ended = True
    return None


def _short(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 1] + "…"


def _name(code: int) -> str:
    try:
        return f"{signal.Signals(code - 128).name} (exit code {code})"
    except ValueError:
        return f"exit code {code}"
