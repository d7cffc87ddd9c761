"""`autoaccum run`: a command that knows nothing of this library in, its own exit code out, however often it ran.

It is started again only where memory ran out and there is something smaller to try; every other end is its own affair
and is passed on. What it is told is a cut of the target batch, by placeholders and variables, or where no target is
known a cap that `fit` obeys. What lack of memory is says `_launch/deaths.py`, which cut comes next `_launch/cuts.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._arguments import check_positive_int
from autoaccum._launch.attempts import AttemptLog
from autoaccum._launch.command import filled, numbers_of, placeholders, variables
from autoaccum._launch.cuts import Cut, cut_within, remark, smaller, smaller_cap
from autoaccum._launch.deaths import DOES_NOT_FIT, Ended, Verdict, judge
from autoaccum._launch.launchers import SIGNAL_BASE
from autoaccum._launch.supervisor import GRACE_S, Supervisor
from autoaccum._launch.surroundings import read_devices
from autoaccum._launch.world import world_size_of
from autoaccum._memory.kills import read_kills
from autoaccum._sizing.cache import Key, PlanCache, Remembered, key_of_command
from autoaccum._system import reason_file
from autoaccum._system.environment import MAX_MICRO_BATCH, max_micro_batch
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RETRIES = 5
# No training counts more samples; and divisors are looked for up to the root of it.
_MOST = 10**12
_MOST_GRACE_S = 7 * 24 * 60 * 60
# More than anything that could be remembered, where there is no target batch to hold it against.
_NO_TARGET = 1 << 62


@dataclass(frozen=True, slots=True)
class Options:
    """What `autoaccum run` is asked.

    Attributes:
        target_batch: Samples an update, over all ranks; None where the command decides that by itself.
        micro_batch: The most samples at once to begin with; None to begin with what is remembered, else with all.
        world_size: Ranks; None to find out.
        retries: How often to start again after memory ran out.
        grace_s: Seconds from a signal that asks for the end to SIGKILL.
        reports: Whether the devices' memory is told before each attempt.
        log: Where the attempts are written down.
        cache: Whether what worked is kept for the next job.
        slurm_state: Asked after each failed attempt for the state that Slurm gives its step; None outside Slurm.
    """

    target_batch: int | None = None
    micro_batch: int | None = None
    world_size: int | None = None
    retries: int = RETRIES
    grace_s: float = GRACE_S
    reports: bool = False
    log: Path | None = None
    cache: bool = True
    slurm_state: Callable[[], str | None] | None = None


def run_command(command: Sequence[str], options: Options) -> int:
    """Run a command until it ends with anything but lack of memory, or nothing smaller is left to try.

    Args:
        command: The program and its arguments, with placeholders.
        options: What is asked.

    Returns:
        The command's own exit code, 128 + N where signal N ended it; 4 where it runs out of memory however it is cut.

    Raises:
        InvalidInputError: An option, a placeholder or a variable cannot be used; nothing was started.
    """
    return _Run(command, options).until_done()


class _Run:
    """One job: a command and what is known of it."""

    def __init__(self, command: Sequence[str], options: Options) -> None:
        _check(command, options)
        self._command = list(command)
        self._options = options
        self._notices = Notices()
        self._cache = PlanCache(self._notices) if options.cache else None
        counts_ranks = options.target_batch is not None or "world_size" in placeholders(command)
        self._world_size = options.world_size or (world_size_of(command) if counts_ranks else 1)
        self._devices = read_devices()
        self._key = self._named()
        self._most = self._first_most()
        self._cut: Cut | None = None
        self._cut = self._first_cut(self._most)
        self._has_shrunk = False
        self._log = AttemptLog(options.log, self._notices, self._about())

    def until_done(self) -> int:
        """Start it again and again."""
        with (
            Supervisor(grace_s=self._options.grace_s) as supervisor,
            tempfile.TemporaryDirectory(prefix="autoaccum-", ignore_cleanup_errors=True) as folder,
        ):
            attempt = 0
            while True:
                self._tell_beginning()
                ended, verdict = self._attempt(supervisor, attempt, Path(folder) / f"reason-{attempt}.json")
                if verdict.kind != "out_of_memory":
                    code = self._finish(ended, verdict, whole=supervisor.ended_by is None)
                    break
                final = self._after_memory_ran_out(ended, verdict, attempt)
                if supervisor.ended_by is not None:  # between two attempts
                    final = SIGNAL_BASE + supervisor.ended_by
                if final is not None:
                    code = final
                    break
                attempt += 1
        self._log.close(code)
        return code

    # --- one attempt --------------------------------------------------------------------------------------------------

    def _attempt(self, supervisor: Supervisor, attempt: int, reason: Path) -> tuple[Ended, Verdict]:
        arguments = filled(self._command, self._numbers())
        told = variables(self._cut, self._most, attempt=attempt, reason_file=reason)
        self._log.begin(arguments, self._cut, self._most, self._devices)
        before = read_kills()
        ended = supervisor.run(arguments, os.environ | told)
        failed = ended.code != 0 and supervisor.ended_by is None
        verdict = judge(
            ended,
            reason=reason_file.read(reason),
            kills_before=before,
            kills_after=read_kills(),
            slurm=self._options.slurm_state() if failed and self._options.slurm_state is not None else None,
        )
        if verdict.kind == "out_of_memory" and supervisor.ended_by is not None:
            verdict = Verdict("other", f"{ended}, after it was asked to end")
        self._log.end(ended, verdict)
        return ended, verdict

    def _numbers(self) -> dict[str, int]:
        if self._cut is not None:
            return numbers_of(self._cut)
        size = {} if self._most is None else {"micro_batch": self._most}
        return {"world_size": self._world_size, **size}

    def _tell_beginning(self) -> None:
        if self._log.attempts or self._options.reports:
            self._devices = read_devices()
        if self._options.reports:
            for device in self._devices:
                _say(str(device))
        if self._cut is not None:
            _say(str(self._cut))
        elif self._most is not None:
            _say(f"micro-batches of at most {self._most} samples ({MAX_MICRO_BATCH}={self._most})")

    def _finish(self, ended: Ended, verdict: Verdict, *, whole: bool) -> int:
        """Keep what worked, or say of a failure what it was not.

        Args:
            ended: How the command ended.
            verdict: What is made of that.
            whole: Whether it was left to end by itself.
        """
        if verdict.kind == "done":
            if whole:
                self._keep()
        elif ended.refusal:
            _say(f"{self._command[0]!r} cannot be started ({ended.refusal})")
        elif ended.signal is not None or verdict.evidence != str(ended):
            _say(f"the command ended with {verdict.evidence}; not started again")
        return ended.code

    def _after_memory_ran_out(self, ended: Ended, verdict: Verdict, attempt: int) -> int | None:
        """Take a smaller cut; return the exit code where there is none."""
        what = f"memory ran out ({verdict.evidence})"
        sizes = [size for size in (verdict.micro_batch, self._most) if size is not None]
        failed = min(sizes, default=None)
        if failed is None:
            _say(
                f"{what}, but it is not known how many samples the command has at once, so it cannot be made smaller; "
                "give --target-batch, and let the command read {micro_batch} and {accum_steps}"
            )
            return ended.code
        if attempt >= self._options.retries:
            _say(f"{what} with micro-batches of {failed}, and no retry is left (--retries {self._options.retries})")
            return DOES_NOT_FIT
        if not self._shrink(failed):
            _say(f"{what} with micro-batches of {failed}, and there is nothing smaller to try")
            return DOES_NOT_FIT
        _say(f"{what} with micro-batches of {failed}; starting again, retry {attempt + 1} of {self._options.retries}")
        if self._cut is not None and not placeholders(self._command):
            # Not refused: it may read the variables, or use fit, and nobody can see that from here.
            self._notices.say(
                "the command names no placeholder such as {micro_batch}; unless it reads AUTOACCUM_MICRO_BATCH, or "
                "uses fit, it runs as it did",
                key="no placeholder",
            )
        return None

    def _shrink(self, failed: int) -> bool:
        self._has_shrunk = True
        if self._cut is None:
            self._most = smaller_cap(failed)
            return self._most is not None
        cut = smaller(self._cut, failed)
        if cut is None:
            return False
        self._remark(cut, failed - 1)
        self._cut, self._most = cut, cut.micro_batch
        return True

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _first_most(self) -> int | None:
        if self._options.micro_batch is not None:
            return self._options.micro_batch
        found = None if self._cache is None else self._cache.find(self._key)
        if found is not None:
            self._notices.say(f"micro-batches of {found.micro_batch} have worked before")
        bounds = [one for one in (None if found is None else found.micro_batch, max_micro_batch()) if one is not None]
        return min(bounds, default=None)

    def _first_cut(self, most: int | None) -> Cut | None:
        if self._options.target_batch is None:
            missing = placeholders(self._command) - self._numbers().keys()
            if missing:
                raise InvalidInputError(
                    f"the command has the placeholder {{{min(missing)}}}, and there is no target batch to fill it by; "
                    "give --target-batch N"
                )
            return None
        cut = cut_within(self._options.target_batch, self._world_size, most)
        self._remark(cut, cut.share if most is None else min(most, cut.share))
        self._most = cut.micro_batch
        return cut

    def _remark(self, cut: Cut, most: int) -> None:
        hint = remark(cut, most)
        if hint is not None:
            self._notices.say(hint, key="a poor choice of sizes")

    # --- what is kept for the next job --------------------------------------------------------------------------------

    def _keep(self) -> None:
        if self._cache is None or self._most is None or (self._cut is None and not self._has_shrunk):
            return
        kept = self._cache.find(self._key)
        # A smaller size that was asked for says nothing against a larger one.
        if self._has_shrunk or kept is None or kept.micro_batch < self._most:
            self._cache.keep(self._key, Remembered(self._most))

    def _named(self) -> Key:
        target, folder = self._options.target_batch, str(Path.cwd())
        described = {
            "arguments": self._command,
            "folder": folder,
            "target_batch": target,
            "world_size": self._world_size,
            "devices": [[device.name, device.total_bytes] for device in self._devices],
        }
        about: dict[str, str | int | None] = {
            "command": " ".join(self._command),
            "folder": folder,
            "target_batch": target,
            "world_size": self._world_size,
        }
        return key_of_command(described, target or _NO_TARGET, about)

    def _about(self) -> dict[str, object]:
        return {
            "command": self._command,
            "folder": str(Path.cwd()),
            "target_batch": self._options.target_batch,
            "world_size": self._world_size,
            "retries": self._options.retries,
        }


def _check(command: Sequence[str], options: Options) -> None:
    if sys.platform != "linux":
        raise InvalidInputError(f"autoaccum run needs Linux, and this is {sys.platform}; start the command by itself")
    if not command or not command[0]:
        raise InvalidInputError("there is no command to run; write it after --")
    for name in ("target_batch", "micro_batch", "world_size"):
        value = getattr(options, name)
        if value is not None and check_positive_int(name, value) > _MOST:
            raise InvalidInputError(f"{name}={value!s:.20} is too large; give at most {_MOST}")
    if options.retries < 0:
        raise InvalidInputError(f"retries={options.retries} must be 0 or more")
    # Not beyond what `poll` can wait, which is known only when a signal has come.
    if not 0 <= options.grace_s <= _MOST_GRACE_S:
        raise InvalidInputError(
            f"grace={options.grace_s:g} must be a number of seconds from 0 to {_MOST_GRACE_S} (a week)"
        )


def _say(text: str) -> None:
    """Say something between two attempts; with stderr gone there is nobody to tell."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            Notices().say(text)
