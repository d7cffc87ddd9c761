"""Parses launchers' reports of failed processes in a log: torchrun, srun, accelerate, torch.multiprocessing.

A launcher exits with its own code, mostly 1, whatever the exit codes of its processes. Its report has those.
"""

from __future__ import annotations

import re
import signal
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum._launch.tracebacks import endings
from autoaccum._oom import Sign

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._launch.tracebacks import Ending

RAISED = 1
# The offset that shells and containers add to a signal's number.
SIGNAL_BASE = 128
KILLED = SIGNAL_BASE + signal.SIGKILL
ABORTED = SIGNAL_BASE + signal.SIGABRT

_SECTION = re.compile(r"\[\d+\]:\s*$|-{10,}\s*$|={10,}\s*$")
_NUMBERS = re.compile(r"\s*rank\s*: (\d+) \(local_rank: (\d+)\)")
_EXIT_CODE = re.compile(r"\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_TRACEBACK = re.compile(r"\s*traceback : Traceback \(")
_FAILED_OF_BINARY = re.compile(r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: (?P<pid>\d+)\) of binary")

_RETURNED = re.compile(r"returned non-zero exit status (\d+)|terminated with exit code (\d+)")
_DIED = re.compile(r"(?:died with <Signals\.|terminated with signal )(SIG\w+)")
# A script that calls another program is not a launcher.
_RUNS_A_SCRIPT = re.compile(r"python|torchrun|accelerate|deepspeed|\.py\b|\bsrun\b|\b(?:ba)?sh\b|\.sh\b")

# Slurm's messages for lack of memory. The wrapper's own kill counters do not cover a step on another node.
SLURM_MEMORY_SIGNS = (
    Sign(
        r"^slurmstepd[\w.-]*: error: .*\boom[-_ ]kill event", "Slurm", "slurmstepd of a cgroup, before and since 21.08"
    ),
    Sign(r"^slurmstepd[\w.-]*: error: .*\bexceeded (job )?memory limit", "Slurm", "slurmstepd, if Slurm itself checks"),
    Sign(r"^srun: error: [^\s:]+: tasks? [\d,\[\]-]+: Out Of Memory\s*$", "Slurm", "srun, for a task that ended so"),
)
# Exit codes of a step with a killed process: SIGKILL, the signal for the others, Slurm's own number (125, as a signal
# 253), or the error of a process that missed the killed one (5, from `fit`).
SLURM_MEMORY_CODES = (RAISED, 5, 125, KILLED, SIGNAL_BASE + signal.SIGTERM, 253)
# srun's messages for ends of tasks, with the exit codes.
_TASKS = re.compile(r"srun: error: [^\s:]+: tasks? (?P<tasks>[\d,\[\]-]+): (?P<how>.+?)\s*$")
_TASK_CODES = {
    "Killed": KILLED,
    "Out Of Memory": KILLED,
    "Aborted": ABORTED,
    "Segmentation fault": SIGNAL_BASE + signal.SIGSEGV,
    "Bus error": SIGNAL_BASE + signal.SIGBUS,
    "Terminated": SIGNAL_BASE + signal.SIGTERM,
    "Interrupt": SIGNAL_BASE + signal.SIGINT,
}


@dataclass(frozen=True, slots=True)
class Failed:
    """Processes that failed in the same way.

    Attributes:
        code: Their exit code as a shell reports it, 128 + N if signal N ended them.
        by: The launcher that reports it.
        numbers: Their ranks or tasks; empty if not reported.
        pid: The process id; None if not reported.
        ending: What ended them, if the launcher reports that too.
    """

    code: int
    by: str
    numbers: frozenset[int] = frozenset()
    pid: int | None = None
    ending: Ending | None = None

    @property
    def count(self) -> int:
        """The number of processes, as far as known."""
        return len(self.numbers) if self.by == "srun" else 1


def failed_by_launcher(ending: Ending) -> list[Failed]:
    """Return the failed processes that a launcher's exception reports; none for any other exception."""
    if ending.name == "ChildFailedError":
        return list(_in_report(ending.report))
    by = {"CalledProcessError": "subprocess", "ProcessExitedException": "torch.multiprocessing"}.get(ending.name)
    if by is None:
        return []
    died, returned = _DIED.search(ending.exception.message), _RETURNED.search(ending.exception.message)
    if died is not None:
        number = signal.Signals.__members__.get(died[1])
        return [] if number is None else [Failed(SIGNAL_BASE + number, by)]
    is_launcher = by != "subprocess" or _RUNS_A_SCRIPT.search(ending.exception.message) is not None
    return [Failed(int(returned[1] or returned[2]), by)] if returned is not None and is_launcher else []


def failed_by_srun(lines: Sequence[str]) -> list[Failed]:
    """Return the failed tasks that srun reports in a log without labels."""
    found = [match for line in lines if line.startswith("srun: error: ") and (match := _TASKS.match(line))]
    return [
        Failed(code, "srun", _tasks(match["tasks"])) for match in found if (code := _code(match["how"])) is not None
    ]


def start_of_last_workers(lines: Sequence[str], failed: Sequence[Failed]) -> int:
    """Return the first line of the workers that torchrun did not restart.

    Args:
        lines: A log without labels.
        failed: The processes in torchrun's last report.
    """
    last = {one.pid for one in failed}
    found = [(at, match) for at, line in enumerate(lines) if (match := _FAILED_OF_BINARY.search(line))]
    return max((at + 1 for at, match in found if int(match["pid"]) not in last), default=0)


def _in_report(lines: Sequence[str]) -> Iterator[Failed]:
    """Yield the processes in torchrun's report."""
    numbers: frozenset[int] = frozenset()
    for at, line in enumerate(lines):
        ranks, ended = _NUMBERS.match(line), _EXIT_CODE.match(line)
        if ranks is not None:
            numbers = frozenset(map(int, ranks.groups()))
        elif ended is not None:
            code = int(ended[1])
            rest = lines[at + 1 :]
            end = next((end for end, other in enumerate(rest) if _SECTION.match(other)), len(rest))
            yield Failed(
                code if code >= 0 else SIGNAL_BASE - code, "torchrun", numbers, int(ended[2]), _ending_in(rest[:end])
            )


def _ending_in(lines: Sequence[str]) -> Ending | None:
    """Return what ended a process whose traceback is in the report, indented by two spaces."""
    begin = next((at for at, line in enumerate(lines) if _TRACEBACK.match(line)), None)
    if begin is None:
        return None
    first, *others = lines[begin:]
    text = f"{first.partition(' : ')[2]}\n" + textwrap.dedent("\n".join(["  ", *others]))
    return next(reversed(endings(text)), None)


def _tasks(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in text.strip("[]").split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            # A job has thousands of tasks at most; a corrupt log must not make this loop longer.
            numbers.update(range(int(first), min(int(last or first), int(first) + 100_000) + 1))
    return frozenset(numbers)


def _code(how: str) -> int | None:
    exited = re.match(r"Exited with exit code (\d+)", how)
    if exited is not None:
        return int(exited[1])
    return next((code for name, code in _TASK_CODES.items() if how.startswith(name)), None)
