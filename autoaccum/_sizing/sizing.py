"""Controls the size of micro-batches across windows: learns and times sizes, shrinks after a failure, and grows back.

Sizes are counted in samples as large as the largest of the first window: if inputs vary in length, shorter ones go in
larger micro-batches and longer ones in smaller. Learning uses the training's own windows, so no trial is thrown away.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from autoaccum._memory._storages import gradient_bytes
from autoaccum._records import Plan, ProbeResult, Trial
from autoaccum._sizing import planner
from autoaccum._sizing.autotune import Autotune
from autoaccum._sizing.backoff import Backoff, wait_for_memory
from autoaccum._sizing.online_search import OnlineSearch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from autoaccum._data.batches import Window
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._sizing.offline_search import Line

# The fraction of a prediction taken as certain, and the fraction of a failed size that may fit.
_CERTAIN = 0.9
_LESS = 0.7
# The most samples with which a window begins again above a soft limit, since the next would be single ones.
_UNDIVIDED = 2


@dataclass(frozen=True)
class SizingOptions:
    """Requirements for the cut.

    Attributes:
        is_uniform: Whether all sizes are to be equal, for compiled models.
        by_bytes: Whether samples with smaller inputs go in larger micro-batches.
        learns: Whether to learn from the first windows how large micro-batches may be.
        times_after: Windows after which autotuning starts; None for never.
        fits: The largest size that a probe found to fit; 0 if there was no probe.
        begins_with: An initial size that is known to have fitted in an earlier run.
        fitted_before: The largest size known to have fitted then.
        line: The memory of a micro-batch then.
        most: The most samples allowed in a micro-batch, however small they are; None for no cap.
    """

    is_uniform: bool = False
    by_bytes: bool = False
    learns: bool = False
    times_after: int | None = None
    fits: int = 0
    begins_with: int | None = None
    fitted_before: int = 0
    line: Line | None = None
    most: int | None = None


@dataclass(frozen=True)
class Cutting:
    """How windows are cut. A runner passes it on to the next, and a checkpoint to the run that resumes from it.

    Attributes:
        plan: The current plan.
        grows_to: The plan that was set or found, which sizes grow back to after failures.
        bytes_per_sample: Additional memory per sample during a micro-step; None if unknown.
        sample_bytes: Input bytes of a sample as counted by the plan; None if all samples count the same.
        is_found: Whether learning has finished.
        is_timed: Whether autotuning has finished.
    """

    plan: Plan
    grows_to: Plan
    bytes_per_sample: int | None = None
    sample_bytes: int | None = None
    is_found: bool = False
    is_timed: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Cutting:
        """Return how windows are cut by a plan alone."""
        return cls(plan, plan)


class Watcher(Protocol):
    """Receives the events of a `Sizing`."""

    def trial(self, trial: Trial) -> None:
        """Handle a micro-batch that was run as a trial."""

    def planned(self, plan: Plan, probe: ProbeResult | None, *, is_proven: bool = False) -> None:
        """Handle a new plan.

        Args:
            plan: The plan.
            probe: The probe's result, if it led to the plan.
            is_proven: Whether the most recent window was already cut by it.
        """


class Sizing:
    """Cuts the windows of one run, based on the outcome of earlier ones.

    Args:
        memory: The device.
        parameters: Returns the parameters that are currently trained.
        cutting: How windows are cut initially. If it has `bytes_per_sample`, that memory is checked before each
            micro-batch on devices that cannot fail cleanly.
        wanted: Requirements for the cut.
        watcher: Receives trials and plans.

    Attributes:
        plan: The current plan.
        set_plan: The plan that sizes grow back to.
        bytes_per_sample: As in `cutting`, or as learned.
        sample_bytes: As in `cutting`, or of the largest sample in the first window; None if all count the same.
        peak_bytes: During learning, the highest peak of the window.
        probe: The result of learning; None before.
        fastest: The plan chosen by autotuning; None before.
        start: The index in the window of the current micro-batch's first sample.
        measures: Whether `enter` and `leave` must be called for micro-batches of the current window.
    """

    def __init__(
        self,
        memory: MemoryBackend,
        parameters: Callable[[], Iterable[Tensor]],
        cutting: Cutting,
        wanted: SizingOptions,
        watcher: Watcher,
    ) -> None:
        plan = cutting.grows_to
        self.bytes_per_sample = cutting.bytes_per_sample
        self.sample_bytes = cutting.sample_bytes
        self.probe: ProbeResult | None = None
        self.fastest: Plan | None = None
        self.start = 0
        self.measures = False
        self.plan = self.set_plan = plan
        self._memory = memory
        self._parameters = parameters
        self._wanted = wanted
        self._watcher = watcher
        self._relative: list[float] = []
        self._learning: OnlineSearch | None = None
        self._is_to_learn = wanted.learns
        self._trials: list[Trial] = []
        self._before_state = 0  # how many of them ran before the optimizer had state
        self._pace = Backoff(plan.target_batch, plan.micro_batch)
        self._alone: Counter[int] = Counter()  # how often this window's samples failed alone, by their indices
        self._windows = 0
        self._fits = wanted.fits  # may exceed the plan's size; the rest of a window can use it
        self._may_fit = math.inf  # for samples larger than the unit of counting
        self._counts_bytes = wanted.by_bytes
        self.peak_bytes: int | None = None
        self._times_after = wanted.times_after
        self._tempo: Autotune | None = None
        self._timed: Plan | None = None  # the plan that is being timed
        self._compared_to = 0  # the largest size that the clock compares
        if cutting.plan.micro_batch < plan.micro_batch:  # after failures
            self.plan, self._times_after = cutting.plan, None
            self._pace.grow(cutting.plan.micro_batch)
            self._pace.stay()

    @property
    def cutting(self) -> Cutting:
        """How windows are currently cut."""
        return Cutting(
            self.plan, self.set_plan, self.bytes_per_sample, self.sample_bytes, not self.is_learning, self.is_timed
        )

    @property
    def is_learning(self) -> bool:
        """Whether current windows are trials."""
        return self._learning is not None or self._is_to_learn

    @property
    def is_timed(self) -> bool:
        """Whether autotuning has finished."""
        return self._tempo is None and self._times_after is None

    @property
    def is_settled(self) -> bool:
        """Whether windows are cut by the plan: neither trials nor timed."""
        return not self.is_learning and self._tempo is None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is to be learned from windows that do not run out of memory: sizes stay as they are."""
        return self._learning is None and not self._is_to_learn and self.is_timed and self._pace.is_quiet

    def set(self, plan: Plan) -> None:
        """Set a plan chosen by the caller."""
        self._learning, self._is_to_learn = None, False
        self._begin_with(plan)
        self._times_after, self._fits = None, 0

    def grow_to(self, size: int) -> None:
        """Set a larger size chosen by the caller, and notify the watcher."""
        self.set(self._plan_of(size))
        self._watcher.planned(self.plan, None)

    # --- one window ---------------------------------------------------------------------------------------------------

    def begin(self, window: Window) -> None:
        """Inspect a window before it is cut."""
        self._began = self._entered = time.perf_counter()
        self._ended: float | None = None
        self.start = 0
        self._alone.clear()
        self.peak_bytes = None
        self._groups = window.groups()
        self._weigh(window)
        if self._is_to_learn:
            self._is_to_learn = False
            self._learning = self._learn()
        self.measures = self._learning is not None or self.bytes_per_sample is not None

    def cut(self, start: int) -> tuple[int, ...]:
        """Return the micro-batch sizes of the window from sample `start` on."""
        rests = self._rests(start)
        if self._learning is not None:
            return tuple(self._cut_to_learn(self._learning, rests, is_first=start == 0))
        plan, wanted = self._timed or self.plan, self._wanted
        if start == 0 and self._groups == [plan.target_batch] and self._relative == [1.0]:
            return plan.micro_batches
        return tuple(
            itertools.chain.from_iterable(
                planner.cut(
                    rest,
                    self._capped(max(1, int(self._most(plan, relative) / relative))),
                    is_uniform=wanted.is_uniform,
                )
                for rest, relative in rests
            )
        )

    def enter(self, size: int) -> None:
        """Prepare for the micro-batch at `start`; needed if `measures` is set.

        Raises:
            torch.OutOfMemoryError: Its expected memory is not available.
        """
        self._counted = self._counted_size(self.start, size)
        if self._learning is not None:
            self._memory.reset_peak()
            self._held_bytes = self._memory.peak_bytes()
            self._entered = time.perf_counter()
            self._memory.ensure(self._learning.expected_bytes(self._counted))
        elif self.bytes_per_sample is not None:
            self._memory.ensure(int(self.bytes_per_sample * self._counted * _CERTAIN))

    def leave(self, size: int) -> None:
        """Record that the micro-batch has completed; one above a soft limit is kept, and the next is smaller.

        Raises:
            torch.OutOfMemoryError: It is above the limit, and hardly can be smaller.
        """
        if self._learning is None:
            return
        self._memory.synchronize()
        elapsed_s = time.perf_counter() - self._entered
        peak = self._memory.peak_bytes()
        self.peak_bytes = max(self.peak_bytes or 0, peak or 0) or None
        # While a micro-batch computes, the next one is being copied to the card.
        ahead = (self.sample_bytes or 0) * self._counted if self._memory.device.type == "cuda" else 0
        extra = None if peak is None or self._held_bytes is None else max(0, peak - self._held_bytes) + ahead
        if extra is not None:
            extra = int(extra * self._counted / (size * self._relative_at(self.start)))  # counted sizes are integers
        if (excess := self._memory.excess(peak)) is not None:
            if size <= _UNDIVIDED:
                raise torch.OutOfMemoryError(excess)
            self._note(Trial(self._counted, fits=False, peak_bytes=peak, elapsed_s=elapsed_s))
            self._learning.fail(self._counted)
            return
        self._learning.note(
            self._counted,
            extra,
            is_first=self.start == 0,
            is_whole=size == sum(self._groups),
            gradient_bytes=gradient_bytes(self._parameters()),
        )
        self._note(Trial(self._counted, fits=True, peak_bytes=peak, elapsed_s=elapsed_s))

    def wait(self) -> None:
        """Record that the window now waits for other processes."""
        if self._tempo is not None:
            self._memory.synchronize()
        self._ended = time.perf_counter()

    def fail(self, size: int, *, may_wait: bool = False) -> bool:
        """Switch to smaller sizes after a micro-batch ran out of memory; return whether to try again.

        Args:
            size: Its samples.
            may_wait: Whether single samples have fitted before.
        """
        counted = self._counted_size(self.start, size)
        if self._learning is not None:
            self._note(Trial(counted, fits=False, peak_bytes=None, elapsed_s=time.perf_counter() - self._entered))
        if size == 1 and (self._learning is not None or self.plan.micro_batch == 1):
            # No smaller size is left, but something else may have taken the memory for a moment.
            tries, self._alone[self.start] = self._alone[self.start], self._alone[self.start] + 1
            return wait_for_memory(tries, may_wait=may_wait)
        if counted == 1 < size:
            # Many samples with small inputs did not fit, so memory does not follow input bytes here.
            self._counts_bytes, self.sample_bytes, counted = False, None, size
            self._relative = [1.0] * len(self._groups)
        if self._learning is not None:
            return self._learning.fail(counted) is not None
        if size > 1 and counted > max(self.plan.micro_batch, self._fits):
            self._may_fit = counted * _LESS
            return True
        # A single remaining sample that fails proves nothing about larger sizes, which have fitted.
        return self._shrink(self.plan.micro_batch if size == 1 else counted)

    def shrink(self) -> bool:
        """Switch to smaller sizes before memory runs out; return whether there are any."""
        return self._learning is None and self._shrink(self._pace.size)

    def end(self, sizes: Sequence[int], *, is_clean: bool, has_room: Callable[[int], bool]) -> None:
        """Record that a window has become an update, and choose the sizes of the next.

        Args:
            sizes: Its micro-batches.
            is_clean: Whether it never ran out of memory.
            has_room: Tells whether this many bytes more than before are available.
        """
        if self._learning is not None:
            self._memory.trim()
            self._learning.end_window(self._memory.reading().free_bytes)
            # A size that fitted before the optimizer's state existed may not fit with it.
            self._before_state = self._before_state or len(self._trials)
            if self._learning.is_done:
                self._conclude(self._learning, sizes)
            else:
                self.plan = self.set_plan = self._plan_of(self._learning.so_far)
            return
        if self._is_timed(is_clean=is_clean):
            return
        larger = self._pace.succeed() if is_clean else None
        if larger is None:
            return
        if has_room((self.bytes_per_sample or 0) * (larger - self._pace.size)):
            self._pace.grow(larger)
            self._follow_pace()
        else:
            self._pace.stay()

    # --- learning -----------------------------------------------------------------------------------------------------

    def _learn(self) -> OnlineSearch:
        largest = max(each * relative for each, relative in self._rests(0))
        return OnlineSearch(
            self._capped(math.ceil(largest)),
            begins_with=self._wanted.begins_with,
            fitted_before=self._wanted.fitted_before,
            line=self._wanted.line,
            fails_cleanly=self._memory.fails_cleanly,
        )

    def _cut_to_learn(self, learning: OnlineSearch, rests: list[tuple[int, float]], *, is_first: bool) -> Iterator[int]:
        """Yield the size of the next micro-batch, then the remaining sizes as they are without further learning."""
        self._memory.trim()
        (rest, relative), *others = rests
        counted = math.ceil(rest * relative)
        size = learning.next_size(counted, self._memory.reading().free_bytes, is_first=is_first)
        size = self._capped(rest if size >= counted else min(rest, max(1, int(size / relative))))
        yield size
        for samples, each in [(rest - size, relative), *others]:
            if samples:
                yield from planner.balanced(samples, self._capped(max(1, int(size * relative / each))))

    def _note(self, trial: Trial) -> None:
        """Record and report a trial if it adds information: a size below one that fits rarely does."""
        known = self._trials[self._before_state :]
        failed = min((one.size for one in known if not one.fits), default=math.inf)
        fits = max((one.size for one in known if one.fits and one.size < failed), default=0)
        is_told = any((one.size, one.fits) == (trial.size, trial.fits) for one in known)
        is_answer = self._learning is not None and trial.fits and trial.size == self._learning.largest
        if not is_told and (fits < trial.size < failed or is_answer or not trial.fits):
            self._trials.append(trial)
            self._watcher.trial(trial)

    def _conclude(self, learning: OnlineSearch, sizes: Sequence[int]) -> None:
        line = learning.line
        self._learning = None
        self.bytes_per_sample = None if line is None else int(line.bytes_per_sample)
        self.probe = ProbeResult(
            learning.largest,
            tuple(self._trials),
            self._memory.reading().limit_bytes,
            None if line is None else max(0, int((self._held_bytes or 0) + line.fixed_bytes)),
            self.bytes_per_sample,
        )
        self._begin_with(self._plan_of(learning.largest))
        self._fits = learning.largest
        if learning.has_failed and line is not None:
            predicted = line.largest_within(self._free_beside_gradients())
            if predicted > learning.largest:
                self._hope(self._plan_of(predicted))
        self._watcher.planned(self.plan, self.probe, is_proven=self.plan.micro_batches == tuple(sizes))

    def _hope(self, larger: Plan) -> None:
        """Schedule a later attempt at a plan that failed although it is predicted to fit."""
        if larger.micro_batch > self.plan.micro_batch:
            self.set_plan, smaller = larger, self.plan.micro_batch
            self._pace = Backoff(larger.target_batch, larger.micro_batch)
            self._pace.grow(smaller)
            self._pace.stay()

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _begin_with(self, plan: Plan) -> None:
        self.plan = self.set_plan = plan
        self._pace, self._tempo, self._timed = Backoff(plan.target_batch, plan.micro_batch), None, None

    def _plan_of(self, most: int) -> Plan:
        wanted, target = self._wanted, self.plan.target_batch
        return planner.planned(target, self._capped(min(most, target)), is_uniform=wanted.is_uniform)

    def _capped(self, size: int) -> int:
        """Return a size that is allowed."""
        most = self._wanted.most
        return size if most is None else min(size, most)

    def _shrink(self, failed: int) -> bool:
        if self._pace.fail(failed) is None:
            return False
        if self._tempo is not None:
            self._compared_to = self._pace.size
            self._time(Autotune(self.plan.target_batch, self._pace.size))
        self._follow_pace()
        return True

    def _follow_pace(self) -> None:
        self._fits = 0
        whole = self._pace.size == self.set_plan.micro_batch
        self.plan = self.set_plan if whole else self._plan_of(self._pace.size)
        self._watcher.planned(self.plan, None)

    # --- the clock ----------------------------------------------------------------------------------------------------

    def _is_timed(self, *, is_clean: bool) -> bool:
        """Return whether autotuning is active; if so, record the window's time unless memory ran out."""
        self._windows += 1
        if self._tempo is not None:
            work = sum(samples * relative for samples, relative in self._rests(0))
            if is_clean and sum(self._groups) >= self.plan.target_batch:
                self._memory.synchronize()
                self._tempo.note((self._ended or time.perf_counter()) - self._began, work / self.plan.target_batch)
            self._time(self._tempo)
            return True
        if self._times_after is None or self._windows < self._times_after or self.plan != self.set_plan:
            return False
        self._times_after, self._compared_to = None, self.plan.micro_batch
        self._time(Autotune(self.plan.target_batch, self.plan.micro_batch))
        return True

    def _time(self, tempo: Autotune) -> None:
        """Cut the next window as autotuning asks, or conclude."""
        if not tempo.is_settled:
            self._tempo, self._timed = tempo, self._plan_of(tempo.size)
            return
        before = self.plan
        self._begin_with(self._plan_of(tempo.size))
        if self.plan != before:
            self._watcher.planned(self.plan, None)
        self.fastest = self.plan

    # --- samples of different size ------------------------------------------------------------------------------------

    def _weigh(self, window: Window) -> None:
        """Determine how large the window's samples are relative to the unit of counting."""
        if not self._counts_bytes:
            self._relative = [1.0] * len(self._groups)
            return
        costs = window.sample_bytes()
        self.sample_bytes = self.sample_bytes or max(costs) or None
        self._relative = [max(cost, 1) / (self.sample_bytes or 1) for cost in costs]
        if self.bytes_per_sample and max(self._relative) > 1.0:
            self._may_fit = min(self._may_fit, _CERTAIN * self._free_beside_gradients() / self.bytes_per_sample)

    def _most(self, plan: Plan, relative: float) -> float:
        """Return the maximum counted size of a micro-batch of samples of this relative size."""
        if plan.micro_batch < self._compared_to:
            return plan.micro_batch  # the clock asks for less than fits
        most = max(plan.micro_batch, self._fits)
        # No more than has fitted; but for larger samples, the largest size that memory allows may never have been
        # tried.
        return most if relative <= 1.0 or self._may_fit == math.inf else max(most, self._may_fit)

    def _free_beside_gradients(self) -> int:
        to_come = (p for p in self._parameters() if p.requires_grad and p.grad is None)
        return self._memory.reading().free_bytes - sum(p.nbytes for p in to_come)

    def _counted_size(self, start: int, size: int) -> int:
        return max(1, round(size * self._relative_at(start)))

    def _relative_at(self, start: int) -> float:
        return 1.0 if self._relative == [1.0] else self._rests(start)[0][1]

    def _rests(self, start: int) -> list[tuple[int, float]]:
        """Return the remaining samples of each group from `start` on, with the relative size of those that come."""
        ends = itertools.accumulate(self._groups)
        groups = zip(self._groups, self._relative, ends, strict=True)
        return [(min(group, end - start), each) for group, each, end in groups if end > start]
