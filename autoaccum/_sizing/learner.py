"""Learns from the training's own windows how large micro-batches may be, so that no trial is thrown away."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from autoaccum._memory._storages import gradient_bytes
from autoaccum._records import ProbeResult, Trial
from autoaccum._sizing import planner
from autoaccum._sizing.cutter import widest
from autoaccum._sizing.search import Search

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._sizing.cutter import Cutter
    from autoaccum._sizing.frontier import Widths

# The most samples with which a window begins again above a soft limit, since the next would be single ones.
_UNDIVIDED = 2


class Learner:
    """Chooses the sizes of the first windows, and ends with a plan that it sets.

    Attributes:
        is_active: Whether current windows are trials.
        peak_bytes: While it is active, the highest peak of the window.
        probe: The result; None before.
    """

    def __init__(self, cutter: Cutter) -> None:
        self.is_active = cutter.wanted.learns
        self.peak_bytes: int | None = None
        self.probe: ProbeResult | None = None
        self._cutter = cutter
        self._trials: list[Trial] = []
        self._before_state = 0  # how many of them ran before the optimizer had state

    @cached_property
    def search(self) -> Search:
        """The search, which begins with the first window."""
        memory = self._cutter.memory
        return Search(
            self._cutter.frontier,
            begins_with=self._cutter.wanted.begins_with,
            fails_cleanly=memory.fails_cleanly,
            is_soft=memory.is_soft,
        )

    def sizes(self, start: int) -> Iterator[int]:
        """Yield the size of the next micro-batch, then the remaining sizes as they are without further learning."""
        self._cutter.memory.trim()
        runs, *others = self._cutter.rests(start)
        rest = sum(samples for samples, _ in runs)
        free_bytes = self._cutter.memory.reading().free_bytes
        size = self._cutter.capped(self.search.next_size(rest, widest(runs), free_bytes, is_first=start == 0))
        yield size
        for samples in [rest - size, *(sum(each for each, _ in other) for other in others)]:
            if samples:
                yield from planner.balanced(samples, size)

    def expected_bytes(self, size: int, widths: Widths) -> float:
        """Return the memory of a micro-batch where it is known; 0 otherwise."""
        line = self._cutter.frontier.line(widths)
        return 0.0 if line is None else line.at(size)

    def ran(
        self, start: int, size: int, widths: Widths, *, peak: int | None, extra: int | None, elapsed_s: float
    ) -> None:
        """Record a micro-batch that has run through. One above a soft limit is kept, and the next is smaller.

        Args:
            start: Its first sample.
            size: Its number of samples.
            widths: Their widths.
            peak: The highest number of bytes in use; None if not measured.
            extra: Its bytes beside what was in use before; None if not measured.
            elapsed_s: Its seconds.

        Raises:
            torch.OutOfMemoryError: It is above the limit, and can hardly be made smaller.
        """
        self.peak_bytes = max(self.peak_bytes or 0, peak or 0) or None
        if (overrun := self._cutter.memory.describe_overrun(peak)) is not None:
            if size <= _UNDIVIDED:
                raise torch.OutOfMemoryError(overrun)
            self._note(Trial(size, fits=False, peak_bytes=peak, elapsed_s=elapsed_s), widths)
            if extra is not None and start:
                self._cutter.frontier.measure(size, widths, extra)
            self.search.fail(size, widths)
            return
        self.search.note(
            size,
            widths,
            extra,
            is_first=start == 0,
            is_whole=size == sum(samples for runs in self._cutter.groups for samples, _ in runs),
            gradient_bytes=gradient_bytes(self._cutter.parameters()),
        )
        self._note(Trial(size, fits=True, peak_bytes=peak, elapsed_s=elapsed_s), widths)

    def failed(self, size: int, widths: Widths, elapsed_s: float) -> None:
        """Record a micro-batch that ran out of memory."""
        self._note(Trial(size, fits=False, peak_bytes=None, elapsed_s=elapsed_s), widths)

    def end_window(self, sizes: Sequence[int], held_bytes: int) -> None:
        """Record that a window has become an optimizer step; set the plan that it leads to.

        Args:
            sizes: Those of its micro-batches.
            held_bytes: The memory in use before the last of them.
        """
        self._cutter.memory.trim()
        groups = [(sum(samples for samples, _ in runs), widest(runs)) for runs in self._cutter.groups]
        self.search.end_window(groups, self._cutter.memory.reading().free_bytes, most=self._cutter.wanted.most)
        # A size that fitted before the optimizer's state existed may not fit with it.
        self._before_state = self._before_state or len(self._trials)
        if self.search.is_done:
            self._conclude(sizes, held_bytes)
        else:
            self._cutter.replace_plan(self._cutter.plan_of(max(sizes)))

    def _note(self, trial: Trial, widths: Widths) -> None:
        """Record and report a trial if it adds information: a size below one that fits rarely does."""
        known = self._trials[self._before_state :]
        failed = min((one.size for one in known if not one.fits), default=math.inf)
        fits = max((one.size for one in known if one.fits and one.size < failed), default=0)
        is_reported = any((one.size, one.fits) == (trial.size, trial.fits) for one in known)
        is_answer = trial.fits and trial.size == self._cutter.frontier.surely(widths)
        if not is_reported and (fits < trial.size < failed or is_answer or not trial.fits):
            self._trials.append(trial)
            self._cutter.events.trial(trial)

    def _conclude(self, sizes: Sequence[int], held_bytes: int) -> None:
        """End with what was found for the widest samples of the last window."""
        self.is_active = False
        cutter, frontier, failed_trials = self._cutter, self._cutter.frontier, self.search.failed_trials
        widths = cutter.widths = widest(run for runs in cutter.groups for run in runs)
        line, sure = frontier.line(widths), frontier.surely(widths)
        if not sure:  # samples as wide were in first micro-batches alone, the last of which has just fitted
            sure = max(1, min(sizes[0], (frontier.too_many(widths) or sizes[0] + 1) - 1))
            frontier.note(sure, cutter.widths_of(0, sure) if cutter.packs else widths)
        begun_with = None if failed_trials else self._cutter.wanted.begins_with
        largest = max(sizes) if begun_with is not None and begun_with >= max(sizes) else sure
        self.probe = ProbeResult(
            largest,
            tuple(self._trials),
            self._cutter.memory.reading().limit_bytes,
            None if line is None else max(0, int(held_bytes + line.fixed_bytes)),
            None if line is None else int(line.bytes_per_sample),
        )
        cutter.replace_plan(cutter.plan_of(largest))
        if begun_with is not None and begun_with < sure:
            cutter.compared_to = sure  # by the clock of an earlier run
        frontier.forgive()
        if failed_trials and line is not None:
            hoped = cutter.plan_of(line.largest_within(cutter.free_beside_gradients()))
            if hoped.micro_batch > cutter.plan.micro_batch:  # it has failed, although it is predicted to fit
                cutter.grow_later(hoped, cutter.plan.micro_batch)
        self._cutter.events.planned(cutter.plan, self.probe, is_proven=cutter.plan.micro_batches == tuple(sizes))
