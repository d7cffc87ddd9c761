"""Decides whether lack of memory ended the command that wrote a log, using its exit status.

An uncaught exception is the last traceback of its process, which then exits with code 1. Output without a traceback may
follow: functions at exit, other threads, other ranks. An exception that a function caught and logged also counts,
because programs then exit with 1 themselves, but only near the end of the log. An uncaught exception in C++ ends in
SIGABRT (134). With any other status the process survived the lack of memory in its log, and something else ended it.
Under a launcher, the statuses it reports for the processes count.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from autoaccum._launch.launchers import (
    ABORTED,
    KILLED,
    RAISED,
    SIGNAL_BASE,
    SLURM_MEMORY_CODES,
    SLURM_MEMORY_SIGNS,
    Failed,
    failed_by_launcher,
    failed_by_srun,
    start_of_last_workers,
)
from autoaccum._launch.tracebacks import endings, unlabelled
from autoaccum._oom import OOM_SIGNS, Sign

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._launch.tracebacks import Ending, Raised

# Experiment trackers write this many lines at exit, for some hundred metrics.
_NEAR_THE_END = 300
_BY_TYPE = ("MemoryError", "OutOfMemoryError", "_ArrayMemoryError")
# Errors of ranks that have lost another rank.
_PEER_IS_GONE = re.compile(
    r"Connection (?:closed|reset) by peer|communicator was aborted|remote process exited|RankFailedError"
    r"|Dist(?:Backend|Network|Store)Error"
)
_WORKER_KILLED = Sign(r"is killed by signal: Killed", "DataLoader", "the RuntimeError for a worker that is gone")


def memory_words(text: str, code: int) -> str | None:
    """Return the line of a command's stderr that shows that lack of memory ended it; None if none does.

    Args:
        text: The end of stderr.
        code: The exit code, as a shell reports it.
    """
    line = slurm_words(text, code)
    if line is not None:
        return line
    for ending in _End(text, code).deciding():
        found = _lack_in(ending)
        if found is not None:
            return found.message.splitlines()[0]
    return None


def killed_by(text: str, code: int) -> str | None:
    """Return what reports that SIGKILL ended a process of the command, or None; arguments as for `memory_words`."""
    end = _End(text, code)
    for one in end.failed if end.is_launched else ():
        if one.code == KILLED:
            return one.by
    is_worker = any(_WORKER_KILLED.matches(ending.exception.message) for ending in end.deciding())
    return _WORKER_KILLED.device if is_worker else None


def slurm_words(text: str, code: int) -> str | None:
    """Return Slurm's line about a process killed for its memory, if that ended the step.

    At the end of a step Slurm reports every kill, even one that the step survived, such as of a loader's worker. So the
    line counts only with an exit code that such a kill causes, and without an error of another kind.

    Args:
        text: The end of the step's log.
        code: srun's exit code.
    """
    if code not in SLURM_MEMORY_CODES or not ("slurmstepd" in text or "srun: error: " in text):
        return None
    lines = [line for line in unlabelled(text) if "slurmstepd" in line or "srun" in line]
    said = next((line.strip() for line in lines if any(sign.matches(line) for sign in SLURM_MEMORY_SIGNS)), None)
    if said is None or code >= SIGNAL_BASE:
        return said
    return said if all(_follows_a_kill(ending) for ending in _End(text, code).deciding()) else None


def _follows_a_kill(ending: Ending) -> bool:
    message = f"{ending.exception.kind} {ending.exception.message}"
    return bool(_PEER_IS_GONE.search(message)) or _WORKER_KILLED.matches(message) or _lack_in(ending) is not None


def _lack_in(ending: Ending) -> Raised | None:
    """Return the exception of an ending that means lack of memory; None if there is none."""
    if ending.parts:
        return ending.parts[0] if all(_is_memory(part) for part in ending.parts) else None
    for one in (ending.exception, *ending.causes):
        if _is_memory(one):
            return one
        # Work after an update does not depend on the cut: `_oom.is_oom` stops here too.
        if one.kind.rpartition(".")[2] == "UpdateCompleteError":
            break
    return None


def _is_memory(exception: Raised) -> bool:
    module, _, name = exception.kind.rpartition(".")
    if name in _BY_TYPE:
        return True
    if name == "OSError":
        return "[Errno 12]" in exception.message.splitlines()[0]
    # As in _oom.py: native code raises RuntimeError; in any other exception the same words are only prose.
    is_native = name == "RuntimeError" or module.startswith("torch") or "::" in exception.kind
    return is_native and any(sign.matches(exception.message) for sign in OOM_SIGNS)


class _End:
    """How the processes of a command ended, by their stderr and the command's exit code."""

    def __init__(self, text: str, code: int) -> None:
        found = endings(text)
        lines = unlabelled(text) if "srun: error: " in text or "of binary: " in text else ()
        tasks = failed_by_srun(lines)
        if code not in {task.code for task in tasks} and not (code in SLURM_MEMORY_CODES and tasks):
            tasks = []  # of an earlier step
        own = tasks or [Failed(code, "shell")]
        launchers = self._launchers(found, own)
        below = [failed for launcher in launchers for failed in failed_by_launcher(launcher)]
        self.failed = below or own
        self.is_launched = bool(below or tasks)
        since = start_of_last_workers(lines, below) if below else 0
        if len(tasks) == 0 or sum(task.count for task in tasks) == 1:
            since = max(since, self._survived(found, launchers))
        self._found = [ending for ending in found if ending.start >= since and not failed_by_launcher(ending)]

    @staticmethod
    def _launchers(found: Sequence[Ending], own: Sequence[Failed]) -> list[Ending]:
        """Return the launchers' exceptions that ended the command: the last, or those of several tasks."""
        if not any(one.code == RAISED for one in own):
            return []
        if sum(one.count for one in own) > 1:
            return [ending for ending in found if failed_by_launcher(ending)]
        launchers: list[Ending] = []
        for ending in reversed(found):
            if not failed_by_launcher(ending):
                break
            launchers.append(ending)
        return launchers

    @staticmethod
    def _survived(found: Sequence[Ending], launchers: Sequence[Ending]) -> int:
        """Return the line after the last launcher's failure that the command survived."""
        earlier = [ending for ending in found if ending.name == "ChildFailedError" and ending not in launchers]
        return max((ending.start + 1 for ending in earlier), default=0)

    def deciding(self) -> Iterator[Ending]:
        """Yield the endings of the processes that failed."""
        ranks = {ending.stream: ending for ending in self._found if ending.is_of_rank}
        yield from (ending for ending in ranks.values() if self._is_of_failed_rank(ending))
        yield from (one.ending for one in self.failed if one.ending is not None and one.code == RAISED)
        others = [ending for ending in self._found if not ending.is_of_rank]
        if not self.is_launched:
            last, own = others[-1:], self.failed[0].code
            is_later = not ranks or (last and last[0].start > max(ending.start for ending in ranks.values()))
            yield from (ending for ending in last if is_later and _fits(ending, own) and not _was_survived(ending))
            return
        yield from self._of_labelled(others)
        yield from self._of_mixed([ending for ending in others if ending.number is None], has_ranks=bool(ranks))

    def _is_of_failed_rank(self, ending: Ending) -> bool:
        """Whether a rank's uncaught exception is part of how the command ended."""
        codes = [one.code for one in self.failed if ending.number in one.numbers]
        if self.is_launched and not codes:
            return True  # its launcher ended it while exiting
        return any(code in (RAISED, ABORTED) for code in codes or [one.code for one in self.failed])

    def _of_labelled(self, others: Sequence[Ending]) -> Iterator[Ending]:
        """Yield the last ending of each failed process that has a label."""
        last = {ending.stream: ending for ending in others if ending.number is not None}
        for ending in last.values():
            codes = [one.code for one in self.failed if not one.numbers or ending.number in one.numbers]
            if any(_fits(ending, code) for code in codes):
                yield ending

    def _of_mixed(self, mixed: Sequence[Ending], *, has_ranks: bool) -> Iterator[Ending]:
        """Yield as many of the last endings without a label as processes failed."""
        aborted = sum(one.count for one in self.failed if one.code == ABORTED)
        raised = sum(one.count for one in self.failed if one.code == RAISED and one.ending is None)
        said = [ending for ending in mixed if ending.aborts]
        yield from said[len(said) - min(aborted, len(said)) :]
        if has_ranks:
            return  # torch marks exceptions that ended ranks; the ranks survived all others
        excepted = [ending for ending in mixed if not ending.aborts and not _is_consequence(ending)]
        yield from excepted[len(excepted) - min(raised, len(excepted)) :]


def _is_consequence(ending: Ending) -> bool:
    """Whether a rank failed only because another rank failed."""
    said = f"{ending.exception.kind} {ending.exception.message}"
    return _lack_in(ending) is None and _PEER_IS_GONE.search(said) is not None


def _was_survived(ending: Ending) -> bool:
    return ending.is_caught and ending.lines_after > _NEAR_THE_END


def _fits(ending: Ending, code: int) -> bool:
    return code == (ABORTED if ending.aborts else RAISED)
