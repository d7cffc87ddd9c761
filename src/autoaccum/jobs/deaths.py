"""How a command ended in, whether memory ran out and by which evidence out. Nothing is asked or read here.

Evidence is taken in the order of its worth: what the command itself left in the reason file, an exit code that means
nothing else, the exception that ended it by the table of `oom.py`, and for a process that was killed the kernel's own
counters. A SIGKILL alone is none: somebody may have sent it.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from autoaccum.memory.kills import risen
from autoaccum.oom import OOM_SIGNS, Sign
from autoaccum.reason_file import OUT_OF_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from autoaccum.reason_file import Reason

# Of ExitCode: `fit` says that not even one sample fits, or that it wants to be started again with a smaller cut.
DOES_NOT_FIT = 4
START_AGAIN = 75

# What shells add to a signal's number; containers do as they do.
SIGNAL_BASE = 128

# What others say of a process of theirs that was killed.
_KILLED_SIGNS = (
    Sign(r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\)", "torchrun", "its summary, for a rank; its own exit code is 1"),
    Sign(r"died with <Signals\.SIGKILL", "subprocess", "CalledProcessError, as accelerate launch raises it"),
    Sign(r"terminated with signal SIGKILL", "torch.multiprocessing", "ProcessExitedException"),
    Sign(r"is killed by signal: Killed", "DataLoader", "the RuntimeError for a worker that is gone"),
)
# srun runs elsewhere than the wrapper, whose counters say nothing then.
_SLURM_SIGNS = (
    Sign(r"slurmstepd: error: Detected \d+ oom[-_ ]kill event", "Slurm", "slurmstepd, task/cgroup"),
    Sign(r"^srun: error: .*: Out Of Memory\s*$", "Slurm", "srun, for a task that ended so"),
)

_HEADER = "Traceback (most recent call last)"
_DIRECT_CAUSE = "The above exception was the direct cause of the following exception"
# What stands before the lines of one process where several share a stream: torch's, torchrun's --tee, srun's --label.
_PREFIX = re.compile(r"(?:\[[\w.-]+\]:|\d+:) ?")
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: |:?$)")
_LAUNCHERS = ("ChildFailedError", "CalledProcessError")
_BY_TYPE = ("MemoryError", "OutOfMemoryError", "_ArrayMemoryError")
_LINE_CHARS = 120


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    Attributes:
        exit_code: Its exit code; None where a signal ended it.
        signal: The signal that ended it; None where it exited.
        tail: The end of what it wrote to stderr.
        refusal: Why it could not be started at all; empty where it was.
    """

    exit_code: int | None
    signal: int | None = None
    tail: str = ""
    refusal: str = ""

    @property
    def code(self) -> int:
        """The exit code as a shell would tell it."""
        if self.signal is not None:
            return SIGNAL_BASE + self.signal
        assert self.exit_code is not None
        return self.exit_code

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.exit_code}"
        return f"{_signal_name(self.signal)} (exit code {self.code})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is made of an end.

    Attributes:
        kind: What it was.
        evidence: By what that is told, for a person.
        micro_batch: The samples with which memory ran out, where the command says so.
    """

    kind: Literal["done", "out_of_memory", "other"]
    evidence: str
    micro_batch: int | None = None


def judge(
    ended: Ended,
    *,
    reason: Reason | None = None,
    kills_before: Mapping[str, int] | None = None,
    kills_after: Mapping[str, int] | None = None,
    slurm: str | None = None,
) -> Verdict:
    """Tell an end for lack of memory from every other.

    Args:
        ended: How the command ended.
        reason: What it left in its reason file.
        kills_before: The kernel's counters of kills for lack of memory before it started.
        kills_after: The same when it had ended.
        slurm: The state that Slurm gives its step, where it is one.
    """
    if ended.code == 0:
        return Verdict("done", "exit code 0")
    if ended.exit_code == DOES_NOT_FIT:
        return Verdict("other", "exit code 4, by which autoaccum says that not even one sample fits")
    said = _judge_words(ended, reason, slurm)
    return said or _judge_kill(ended, kills_before or {}, kills_after or {})


def _judge_words(ended: Ended, reason: Reason | None, slurm: str | None) -> Verdict | None:
    """Judge by what was said, by the command or by Slurm; None where nothing tells of lack of memory."""
    if reason is not None and reason.reason == OUT_OF_MEMORY:
        where = "" if reason.rank is None else f"rank {reason.rank}: "
        return Verdict("out_of_memory", f"its reason file: {where}{_short(reason.message)}", reason.micro_batch)
    if ended.exit_code == START_AGAIN:
        return Verdict("out_of_memory", "exit code 75, by which it asks to be started again with a smaller cut")
    said = memory_words(ended.tail)
    if said is not None:
        return Verdict("out_of_memory", f"on stderr: {_short(said)}")
    if slurm is not None and slurm.startswith("OUT_OF_ME"):
        return Verdict("out_of_memory", f"Slurm's state of the step, {slurm}")
    return None


def _judge_kill(ended: Ended, before: Mapping[str, int], after: Mapping[str, int]) -> Verdict:
    by = _killed_by_words(ended)
    if by is None:
        return Verdict("other", str(ended))
    counters = risen(before, after)
    if counters:
        told = ", ".join(f"{name} by {count}" for name, count in counters.items())
        return Verdict("out_of_memory", f"{by}, and the kernel's count of kills for lack of memory rose: {told}")
    looked_at = ", ".join(after) or "none is to be had here"
    return Verdict("other", f"{by}, but no count of kills for lack of memory rose (looked at: {looked_at})")


def _killed_by_words(ended: Ended) -> str | None:
    """Say by what it is told that SIGKILL ended the command or a process of its; None where nothing tells it."""
    if ended.code == SIGNAL_BASE + signal.SIGKILL:
        return str(ended)
    sign = next((sign for sign in _KILLED_SIGNS if sign.matches(ended.tail)), None)
    return None if sign is None else f"{sign.device} tells of SIGKILL"


# --- what was said on stderr ------------------------------------------------------------------------------------------


def memory_words(text: str) -> str | None:
    """Return the line of stderr by which memory ran out; None where nothing of the kind ended the command.

    What counts is the exception that ended it, with what it was raised from. An earlier one was survived, whatever it
    says. Where several processes share the stream, the last of each counts, and a launcher's own exception does not.
    """
    for sign in _SLURM_SIGNS:
        found = re.search(sign.pattern, text, re.IGNORECASE | re.MULTILINE)
        if found is not None:
            return found.group()
    streams = _streams(text)
    for lines in streams.values():
        for kind, message in _endings(lines):
            if _is_memory(kind, message):
                return message.splitlines()[0]
    return None


def _streams(text: str) -> dict[str, list[str]]:
    """Return the lines of each process, as far as prefixes tell them apart."""
    streams: dict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        found = _PREFIX.match(line)
        prefix = found.group() if found else ""
        streams[prefix.strip()].append(line[len(prefix) :])
    return streams


def _endings(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield type and text of the exceptions that may have ended what wrote these lines, the last one first."""
    starts = [index for index, line in enumerate(lines) if _HEADER in line]
    blocks = [lines[start:end] for start, end in pairwise([*starts, len(lines)])]
    found = [(exception, block) for block in blocks if (exception := _exception_of(block)) is not None]
    count = len(found)
    while found and found[-1][0][0].rpartition(".")[2] in _LAUNCHERS:
        found.pop()
    has_launcher = len(found) < count
    follows = True
    for exception, block in reversed(found):
        if follows or has_launcher or any(_DIRECT_CAUSE in line for line in block):
            yield exception
            # What followed an update has no part in how it was cut: `oom.is_oom` stops there too.
            follows = False
            if exception[0].endswith("UpdateCompleteError"):
                break
        else:
            break
    # C++ has no traceback: the runtime says what the exception says, and aborts.
    yield from (("RuntimeError", line.strip()) for line in lines if line.startswith("  what():"))


def _exception_of(block: Sequence[str]) -> tuple[str, str] | None:
    """Return type and text of the exception of one traceback; None where the end of it is missing."""
    for index, line in enumerate(block[1:], start=1):
        found = _EXCEPTION.match(line)
        if found is not None:
            message = "\n".join(block[index:])
            return found["type"], message.partition(_DIRECT_CAUSE)[0]
    return None


def _is_memory(kind: str, message: str) -> bool:
    module, _, name = kind.rpartition(".")
    if name in _BY_TYPE:
        return True
    if name == "OSError":
        return "[Errno 12]" in message.splitlines()[0]
    # As in oom.py: native code reaches Python as RuntimeError, and anything else with the same words is a sentence.
    is_native = name == "RuntimeError" or module.startswith("torch")
    return is_native and any(sign.matches(message) for sign in OOM_SIGNS)


def _short(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"
