"""Tries what `memory="auto"` may save memory by in the first windows, alike on all ranks, and tells what it found."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.checkpoint import CheckpointError

from autoaccum._records import MemoryTrial
from autoaccum._sizing.rung_choice import RungChoice
from autoaccum.errors import AutoaccumError, DoesNotFitError, SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._engine.block_costs import BlockCost
    from autoaccum._records import BackwardReport, StepReport
    from autoaccum._sizing.rung_choice import Judged, Rung
    from autoaccum._sizing.sizing import Cutting
    from autoaccum._system.notices import Notices

# Trying all takes 20 to 40 windows. If fewer than this are to come, nothing is tried that is not needed.
WINDOWS_WORTH_TRYING = 40
# What another rung may avoid: not one sample fits, or the model or its loss does not bear what is in force.
AVOIDABLE = (DoesNotFitError, SavingRefusedError, CheckpointError)
# Windows in which memory ran out are not timed, but for a rung with which it does so every time.
_MOST_NOT_TIMED = 4


class _Said(NamedTuple):
    """What a process says of a window.

    Attributes:
        failed: With what not one sample fitted in this window, or what was refused, in order, and which it was.
        rung: What was in force in the end.
        is_found: Whether its sizes are known.
        micro_batch: The largest of them; 0 if this process had no samples.
        is_whole: Whether the window was a single micro-batch.
        seconds: What it took; None if that is not to be counted.
        work: How much it was: bytes of samples, or their number.
        peak_bytes: The peak; None if unknown.
    """

    failed: tuple[tuple[Rung, bool], ...]
    rung: Rung
    is_found: bool
    micro_batch: int
    is_whole: bool
    seconds: float | None
    work: int
    peak_bytes: int | None


class Rungs:
    """What `memory="auto"` saves memory by, window by window.

    Args:
        levels: Returns what can save memory, from the cheapest on, by names of `memory`; given what checkpointing each
            block saves and costs, or None if that is not known.
        of_all: Returns the values of all processes of this training, given what is said and this process's own.
        notices: Reports choices made for the user.
        is_alone: Whether there is no other process.

    Attributes:
        is_measuring: Whether windows are being compared; the same on all ranks.
    """

    def __init__(
        self,
        levels: Callable[[Sequence[BlockCost] | None], tuple[str, ...]],
        of_all: Callable[[str, Any], list[Any]],
        notices: Notices,
        *,
        is_alone: bool = False,
    ) -> None:
        self._is_alone = is_alone
        self._levels = levels
        self._of_all = of_all
        self._notices = notices
        self._choice = RungChoice((), measures=False)
        self._failed: list[tuple[Rung, bool]] = []
        self._not_timed = 0
        self._earlier: str | None = None
        self._usual_work: float | None = None
        self.is_measuring = False

    @property
    def rung(self) -> Rung:
        """What saves memory in the next window."""
        return self._choice.rung

    @property
    def kept(self) -> Rung | None:
        """What a checkpoint keeps: the rung that was chosen; None while it is not."""
        return None if self.is_measuring else self.rung

    @property
    def trials(self) -> tuple[MemoryTrial, ...]:
        """All that was tried, in order; empty if nothing was."""
        judged = self._choice.judged
        tried = tuple(_trial(rung, one) for rung, one in judged.items() if one.micro_batches or not one.fits)
        return tried if len(tried) > 1 else ()

    @property
    def tried(self) -> str | None:
        """All that was tried, here or in the run that chose what is in force, in words; None if nothing was."""
        return "; ".join(map(_told, self.trials)) or self._earlier

    def begin(
        self,
        known: Rung | None,
        windows_ahead: int | None,
        *,
        measures: bool,
        look: Callable[[], Sequence[BlockCost] | None] = lambda: None,
        tried: str | None = None,
    ) -> bool:
        """Begin with what is known, or to measure; return whether something is known.

        Args:
            known: What an earlier run has chosen; None if there was none.
            windows_ahead: Number of windows still to come; None if unknown.
            measures: Whether windows can be compared.
            look: Measures what checkpointing each block saves and costs; None if that cannot be measured.
            tried: What the earlier run has tried, in words.
        """
        if measures and known is None and windows_ahead is not None and windows_ahead < WINDOWS_WORTH_TRYING:
            measures = False
            self._notices.say(
                f"memory='auto' compares nothing in fewer than {WINDOWS_WORTH_TRYING} windows, and {windows_ahead} are "
                "to come: it saves memory where not even one sample fits"
            )
        levels = self._levels(look() if measures and known is None else None)
        said = self._of_all("what saves memory", (known, levels, measures))
        measures = all(one for *_, one in said)
        levels = said[0][1]  # those of the first rank: each has measured by itself
        if known is not None:
            levels = _levels_with(levels, known)
        is_known = known is not None and all(one == said[0] for one in said) and set(known) <= set(levels)
        self._choice = RungChoice(levels, measures=measures and not is_known)
        self.is_measuring = not self._choice.is_settled
        if is_known and known is not None:
            self._choice.settle(known)
            self._earlier = tried
            if known or tried:
                numbers = f": {tried}" if tried else ""
                self._notices.say(f"memory='auto' takes {_written(known)}, as an earlier run has measured{numbers}")
        return is_known

    def end(self) -> None:
        """Tell what was tried, if nothing is chosen yet."""
        if self.is_measuring and self.trials:
            self._notices.say(f"memory='auto' was still comparing when the training ended; tried: {self.tried}")

    def may_avoid(self, error: Exception) -> bool:
        """Whether another rung may avoid an error: one of `AVOIDABLE`, or the first with what is being tried."""
        if isinstance(error, AVOIDABLE):
            return True
        judged = self._choice.judged
        is_first = self.is_measuring and bool(self.rung) and not judged[self.rung].micro_batches
        went_without = () in judged and bool(judged[()].seconds)
        return is_first and went_without and self._is_alone and not isinstance(error, AutoaccumError)

    def climb(self, error: Exception) -> bool:
        """Take another rung after an error that it may avoid; return whether there is one."""
        is_refused = not isinstance(error, DoesNotFitError)
        if not error.saving_helps if isinstance(error, DoesNotFitError) else not self.rung:
            return False
        self._failed.append((self.rung, is_refused))
        goes_on = self._choice.does_not_fit(self.rung, is_refused=is_refused)
        self.is_measuring = not self._choice.is_settled
        return goes_on

    def after_window(
        self, report: StepReport | BackwardReport, cutting: Cutting, work: int, *, was_trial: bool, seconds: float
    ) -> bool:
        """Choose the rung of the next window with all ranks; return whether it changes or is now final.

        Args:
            report: The window's report.
            cutting: How windows are cut now.
            work: How much the window was.
            was_trial: Whether its micro-batches were trials.
            seconds: What it took.
        """
        is_clean = not was_trial and (report.oom_events == 0 or self._not_timed >= _MOST_NOT_TIMED)
        self._not_timed = 0 if is_clean else self._not_timed + (not was_trial)
        before = self.rung
        own = _Said(
            tuple(self._failed),
            before,
            cutting.is_found,
            cutting.plan.micro_batch if report.micro_batches else 0,
            # With a target in tokens, padding may cut a window of which so many tokens would fit at once.
            len(report.micro_batches) <= 1 or cutting.plan.accum_steps == 1,
            seconds if is_clean else None,
            work,
            report.peak_bytes,
        )
        self._failed.clear()
        self._judge([_Said(*one) for one in self._of_all("what saves memory", own)], len(own.failed))
        self.is_measuring = not self._choice.is_settled
        if self.is_measuring and self.rung != before and not self._choice.judged[self.rung].micro_batches:
            self._notices.say(f"memory='auto' tries {_written(self.rung)} from the next window on")
        if not self.is_measuring and len(self._choice.judged) > 1:
            self._tell()
        return self.rung != before or not self.is_measuring

    def _judge(self, said: list[_Said], failed_here: int) -> None:
        failed = max((one.failed for one in said), key=len)
        for rung, is_refused in failed[failed_here:]:  # of other ranks
            self._choice.does_not_fit(rung, is_refused=is_refused)
        if failed or not all(one.is_found for one in said):
            return
        if not self._choice.judged[self.rung].micro_batches:
            self._choice.found(
                [one.micro_batch for one in said if one.micro_batch], is_whole=all(one.is_whole for one in said)
            )
            return
        seconds = [one.seconds for one in said if one.seconds is not None]
        work = sum(one.work for one in said)
        if len(seconds) == len(said) and work:
            self._usual_work = self._usual_work or work
            peaks = [one.peak_bytes for one in said if one.peak_bytes is not None]
            self._choice.note(max(seconds) * self._usual_work / work, max(peaks, default=None))

    def _tell(self) -> None:
        self._notices.say(f"memory='auto' takes {_written(self.rung)}; tried: {self.tried}")


def reason_of(error: Exception) -> str:
    """Return why another rung is taken after an error."""
    if isinstance(error, DoesNotFitError):
        return "not even one sample fits"
    text = str(error).partition("\n")[0]
    return text if isinstance(error, SavingRefusedError) else f"this fails: {type(error).__name__}: {text}"


def change_of_rung(reason: str, ways: Sequence[str]) -> str:
    """Return what the user is told of another rung.

    Args:
        reason: Why it is taken.
        ways: What is in force now, in words.
    """
    return f"{reason}; from now on {'; '.join(ways) or 'nothing saves memory'} (memory='auto')"


def work_of(window: Window) -> int:
    """Return the bytes of a window's samples, or their number where they hold no tensors."""
    return sum(map(operator.mul, window.groups(), window.sample_bytes())) or window.samples


def _levels_with(levels: Rung, known: Rung) -> Rung:
    """Return the levels with the blocks that an earlier run has chosen in place of others."""
    some = [name for name in known if name.startswith("checkpoint:")]
    if not some or "checkpoint" not in levels:
        return levels
    others = [name for name in levels if not name.startswith("checkpoint:")]
    at = others.index("checkpoint")
    return (*others[:at], *some, *others[at:])


def _trial(rung: Rung, judged: Judged) -> MemoryTrial:
    fits = judged.fits and judged.micro_batches
    return MemoryTrial(
        rung,
        min(judged.micro_batches) if fits else None,
        judged.pace if judged.seconds else None,
        judged.peak_bytes,
        is_refused=judged.is_refused,
    )


def _told(trial: MemoryTrial) -> str:
    if trial.micro_batch is None:
        return f"{_written(trial.memory)} {'is refused' if trial.is_refused else 'does not fit'}"
    peak = "" if trial.peak_bytes is None else f", {trial.peak_bytes / 2**20:,.0f} MiB"
    time = "" if trial.seconds is None else f" {trial.seconds:.3g} s"
    return f"{_written(trial.memory)}{time} ({trial.micro_batch} at once{peak})"


def _written(rung: Rung) -> str:
    return " + ".join(rung) or "nothing"
