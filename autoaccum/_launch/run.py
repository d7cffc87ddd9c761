"""`autoaccum run`: runs a command, and restarts it with a smaller cut if it ran out of memory.

Any other end is passed on. The command receives its cut in placeholders and environment variables; if the target batch
is unknown, it receives a cap, which `fit` obeys. `deaths.py` diagnoses an end, `cuts.py` finds the next cut.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._arguments import check_positive_int
from autoaccum._launch.command import filled, numbers_of, placeholders, variables
from autoaccum._launch.cuts import Cut, cut_within, remark, smaller
from autoaccum._launch.deaths import DOES_NOT_FIT, Diagnosis, Ended, diagnose
from autoaccum._launch.launchers import SIGNAL_BASE
from autoaccum._launch.supervisor import GRACE_S, Supervisor
from autoaccum._launch.world import world_size_of
from autoaccum._memory import Host
from autoaccum._memory.kills import read_kills
from autoaccum._memory.nvml import read_cards
from autoaccum._sizing.cache import Key, PlanCache, Remembered, digest_of
from autoaccum._system import reason_file
from autoaccum._system.environment import MAX_MICRO_BATCH, max_micro_batch
from autoaccum._system.notices import Notices
from autoaccum._system.output import write_line
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

RETRIES = 5
# More samples than any training has; divisors are searched up to its square root.
_MOST = 10**12
_MOST_GRACE_S = 7 * 24 * 60 * 60
# More than any size in the cache, if there is no target batch to bound it.
_NO_TARGET = 1 << 62


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `autoaccum run`.

    Attributes:
        target_batch: Samples per update, over all ranks; None if the command sets it itself.
        micro_batch: The largest micro-batch to start with; None for what worked before, or all samples.
        world_size: Ranks; None to detect them.
        retries: Restarts after memory ran out.
        grace_s: Seconds from a signal that asks for the end to SIGKILL.
        cache: Whether to start with what worked before, and to store what works.
    """

    target_batch: int | None = None
    micro_batch: int | None = None
    world_size: int | None = None
    retries: int = RETRIES
    grace_s: float = GRACE_S
    cache: bool = True


def run_command(command: Sequence[str], options: Options) -> int:
    """Run a command until it ends for another reason than lack of memory, or no smaller cut is left.

    Args:
        command: The program and its arguments, with placeholders.
        options: The options.

    Returns:
        The command's exit code, 128 + N if signal N ended it; 4 if it runs out of memory in every cut.

    Raises:
        InvalidInputError: An option, a placeholder or a variable cannot be used; nothing has been started.
    """
    return _Run(command, options).until_done()


class _Run:
    """A command and its state."""

    def __init__(self, command: Sequence[str], options: Options) -> None:
        _check(command, options)
        self._command = list(command)
        self._options = options
        self._notices = Notices()
        counts_ranks = options.target_batch is not None or "world_size" in placeholders(command)
        self._world_size = options.world_size or (world_size_of(command) if counts_ranks else 1)
        self._cache = PlanCache(self._notices) if options.cache else None
        self._key = self._named()
        self._cap = self._first_cap()
        self._cut = self._first_cut()
        self._has_shrunk = False

    def until_done(self) -> int:
        """Run the command as often as necessary; return the exit code."""
        with (
            Supervisor(grace_s=self._options.grace_s) as supervisor,
            tempfile.TemporaryDirectory(prefix="autoaccum-", ignore_cleanup_errors=True) as folder,
        ):
            attempt = 0
            while True:
                self._announce()
                ended, diagnosis = self._attempt(supervisor, attempt, Path(folder) / f"reason-{attempt}.json")
                if diagnosis.kind != "out_of_memory":
                    return self._finish(ended, diagnosis, was_asked_to_end=supervisor.ended_by is not None)
                final = self._after_lack_of_memory(ended, diagnosis, attempt)
                if supervisor.ended_by is not None:  # between two attempts
                    return SIGNAL_BASE + supervisor.ended_by
                if final is not None:
                    return final
                attempt += 1

    # --- one attempt --------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        if self._cut is not None:
            _say(str(self._cut))
        elif self._cap is not None:
            _say(f"micro-batches of at most {self._cap} samples ({MAX_MICRO_BATCH}={self._cap})")

    def _attempt(self, supervisor: Supervisor, attempt: int, reason: Path) -> tuple[Ended, Diagnosis]:
        before = read_kills()
        ended = supervisor.run(
            filled(self._command, self._numbers()),
            os.environ | variables(self._cut, self._cap, attempt=attempt, reason_file=reason),
        )
        diagnosis = diagnose(ended, reason=reason_file.read(reason), kills_before=before, kills_after=read_kills())
        if diagnosis.kind == "out_of_memory" and supervisor.ended_by is not None:
            diagnosis = Diagnosis("other", f"{ended}, after it was asked to end")
        return ended, diagnosis

    def _numbers(self) -> dict[str, int]:
        if self._cut is not None:
            return numbers_of(self._cut)
        return {"world_size": self._world_size} | ({} if self._cap is None else {"micro_batch": self._cap})

    def _finish(self, ended: Ended, diagnosis: Diagnosis, *, was_asked_to_end: bool) -> int:
        if diagnosis.kind == "done":
            if not was_asked_to_end:
                self._keep()
        elif ended.refusal:
            _say(f"{self._command[0]!r} cannot be started ({ended.refusal})")
        elif ended.signal is not None or diagnosis.evidence != str(ended):
            _say(f"the command ended with {diagnosis.evidence}; not restarted")
        return ended.code

    def _after_lack_of_memory(self, ended: Ended, diagnosis: Diagnosis, attempt: int) -> int | None:
        """Choose a smaller cut; return the exit code if there is none."""
        what = f"memory ran out ({diagnosis.evidence})"
        sizes = [size for size in (diagnosis.micro_batch, self._cap) if size is not None]
        if not sizes:
            _say(
                f"{what}, but the command's micro-batch is unknown, so it cannot be reduced; "
                "pass --target-batch, and use {micro_batch} and {accum_steps} in the command"
            )
            return ended.code
        failed = min(sizes)
        if attempt >= self._options.retries:
            _say(f"{what} with micro-batches of {failed}, and no retry is left (--retries {self._options.retries})")
            return DOES_NOT_FIT
        if not self._shrink(failed):
            _say(f"{what} with micro-batches of {failed}, and there is nothing smaller to try")
            return DOES_NOT_FIT
        _say(f"{what} with micro-batches of {failed}; restarting, retry {attempt + 1} of {self._options.retries}")
        if self._cut is not None and not placeholders(self._command):
            # Not an error: the command may read the variables or use fit, which cannot be seen from here.
            self._notices.say(
                "the command has no placeholder such as {micro_batch}; unless it reads AUTOACCUM_MICRO_BATCH or "
                "uses fit, it runs unchanged",
            )
        return None

    def _shrink(self, failed: int) -> bool:
        """Choose the next smaller cut, or without a target batch half the cap; return False if there is none."""
        self._has_shrunk = True
        if self._cut is None:
            self._cap = failed // 2 or None
            return self._cap is not None
        cut = smaller(self._cut, failed)
        if cut is None:
            return False
        self._remark(cut, failed - 1)
        self._cut, self._cap = cut, cut.micro_batch
        return True

    # --- the beginning ------------------------------------------------------------------------------------------------

    def _first_cap(self) -> int | None:
        if self._options.micro_batch is not None:
            return self._options.micro_batch
        found = None if self._cache is None else self._cache.find(self._key)
        if found is not None:
            self._notices.say(f"micro-batches of {found.micro_batch} worked before")
        bounds = [one for one in (None if found is None else found.micro_batch, max_micro_batch()) if one is not None]
        return min(bounds, default=None)

    def _first_cut(self) -> Cut | None:
        if self._options.target_batch is None:
            known = {"world_size"} if self._cap is None else {"world_size", "micro_batch"}
            missing = placeholders(self._command) - known
            if missing:
                raise InvalidInputError(
                    f"the command has the placeholder {{{min(missing)}}}, but no target batch is known; "
                    "pass --target-batch N"
                )
            return None
        cut = cut_within(self._options.target_batch, self._world_size, self._cap)
        self._remark(cut, min(self._cap or cut.share, cut.share))
        self._cap = cut.micro_batch
        return cut

    def _remark(self, cut: Cut, most: int) -> None:
        hint = remark(cut, most)
        if hint is not None:
            self._notices.say(hint, key="a poor choice of sizes")

    # --- what is kept for the next job --------------------------------------------------------------------------------

    def _keep(self) -> None:
        if self._cache is None or self._cap is None or (self._cut is None and not self._has_shrunk):
            return
        kept = self._cache.find(self._key)
        # Success with a smaller requested size says nothing about a larger one.
        if self._has_shrunk or kept is None or kept.micro_batch < self._cap:
            self._cache.keep(self._key, Remembered(self._cap))

    def _named(self) -> Key:
        target = self._options.target_batch
        about = {"folder": str(Path.cwd()), "target_batch": target, "world_size": self._world_size}
        # From NVML and the host's files, because this process makes no CUDA context.
        memory = [["host memory", Host().reading().total_bytes]]
        memory += [[card.name, card.total_bytes] for card in read_cards()]
        described = {"arguments": self._command, "devices": memory, **about}
        return Key(digest_of(described), target or _NO_TARGET, {"command": " ".join(self._command), **about})


def _check(command: Sequence[str], options: Options) -> None:
    if sys.platform != "linux":
        raise InvalidInputError(f"autoaccum run needs Linux, and this is {sys.platform}; start the command directly")
    if not command or not command[0]:
        raise InvalidInputError("there is no command to run; write it after --")
    for name in ("target_batch", "micro_batch", "world_size"):
        value = getattr(options, name)
        if value is not None and check_positive_int(name, value) > _MOST:
            raise InvalidInputError(f"{name}={value!s:.20} is too large; pass at most {_MOST}")
    if options.retries < 0:
        raise InvalidInputError(f"retries={options.retries} must be 0 or more")
    # At most what `poll` can wait; a larger value would fail only after a signal.
    if not 0 <= options.grace_s <= _MOST_GRACE_S:
        raise InvalidInputError(
            f"grace={options.grace_s:g} must be a number of seconds from 0 to {_MOST_GRACE_S} (a week)"
        )


def _say(text: str) -> None:
    write_line(f"autoaccum: {text}")
