"""Controls the size of micro-batches across windows: learns and times sizes, shrinks after a failure, and grows back.

Samples have widths, as in `frontier.py`: shorter ones go in larger micro-batches than longer ones. Learning uses the
training's own windows, so no trial is thrown away.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._memory._storages import gradient_bytes
from autoaccum._records import Plan, ProbeResult, Trial
from autoaccum._sizing import planner
from autoaccum._sizing.autotune import Autotune
from autoaccum._sizing.backoff import Backoffs, wait_for_memory
from autoaccum._sizing.frontier import Frontier, are_within, joined_widths, widths_between
from autoaccum._sizing.search import Search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._sizing.events import Events
    from autoaccum._sizing.frontier import Runs, Widths

# The fraction of a prediction taken as certain.
_CERTAIN = 0.9
# The most samples with which a window begins again above a soft limit, since the next would be single ones.
_UNDIVIDED = 2


@dataclass(frozen=True)
class SizingOptions:
    """Requirements for the cut.

    Attributes:
        is_uniform: Whether all sizes are to be equal, for compiled models.
        by_width: Whether memory decides how large micro-batches are, for samples of each width. Otherwise none exceeds
            the plan's size.
        learns: Whether to learn from the first windows how large micro-batches may be.
        times_after: Windows after which autotuning starts; None for never.
        fits: A size that micro-batches may have though it exceeds the plan's.
        begins_with: An initial size that is known to have fitted in an earlier run.
        frontier: What was known to fit then; empty if nothing.
        most: The most samples allowed in a micro-batch, however small they are; None for no cap.
    """

    is_uniform: bool = False
    by_width: bool = False
    learns: bool = False
    times_after: int | None = None
    fits: int = 0
    begins_with: int | None = None
    frontier: Frontier = field(default_factory=Frontier)
    most: int | None = None


@dataclass(frozen=True)
class Cutting:
    """How windows are cut. A runner passes it on to the next, and a checkpoint to the run that resumes from it.

    Attributes:
        plan: The current plan.
        largest_plan: The plan that was set or found, which sizes grow back to after failures.
        frontier: What is known to fit; None if nothing.
        is_found: Whether learning has finished.
        is_timed: Whether autotuning has finished.
        compared_to: The largest size that autotuning has compared; 0 if there was none.
        widths: Those of the samples that the plan was made for; None if they are not known.
    """

    plan: Plan
    largest_plan: Plan
    frontier: Frontier | None = None
    is_found: bool = False
    is_timed: bool = False
    compared_to: int = 0
    widths: Widths | None = None

    @classmethod
    def of(cls, plan: Plan) -> Cutting:
        """Return how windows are cut by a plan alone."""
        return cls(plan, plan)

    def state(self) -> dict[str, Any]:
        """Return it as plain values, for `of_state`."""
        return {
            "plan": list(self.plan.micro_batches),
            "largest": list(self.largest_plan.micro_batches),
            "frontier": None if self.frontier is None else self.frontier.state(),
            "is_found": self.is_found,
            "is_timed": self.is_timed,
            "compared_to": self.compared_to,
            "widths": None if self.widths is None else list(self.widths),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Cutting:
        """Return what `state` has returned."""
        plan, largest = (Plan(sum(sizes), tuple(sizes)) for sizes in (state["plan"], state["largest"]))
        names = ("is_found", "is_timed", "compared_to")
        widths = None if state["widths"] is None else tuple(state["widths"])
        frontier = Frontier.of_state(state["frontier"])
        return cls(plan, largest, frontier, **{name: state[name] for name in names}, widths=widths)


class Sizing:
    """Cuts the windows of one run, based on the outcome of earlier ones.

    Attributes:
        plan: The current plan, for samples as wide as those that it was made for.
        set_plan: The plan that sizes grow back to.
        frontier: What is known to fit. The memory of a micro-batch that was measured is checked before each on devices
            that cannot fail cleanly.
        peak_bytes: During learning, the highest peak of the window.
        probe: The result of learning; None before.
        fastest: The plan chosen by autotuning; None before.
        start: The index in the window of the current micro-batch's first sample.
        measures: Whether `enter` and `leave` must be called for micro-batches of the current window.
        failed: What ran out of memory in this window, trials left out: samples and widths, for other processes.
    """

    def __init__(
        self,
        memory: MemoryBackend,
        parameters: Callable[[], Iterable[Tensor]],
        cutting: Cutting,
        wanted: SizingOptions,
        events: Events,
    ) -> None:
        plan = cutting.largest_plan
        found = cutting.frontier if cutting.is_found else None
        self.frontier = found or wanted.frontier
        self.probe: ProbeResult | None = None
        self.fastest: Plan | None = None
        self.start = 0
        self.measures = False
        self.plan = self.set_plan = plan
        self.peak_bytes: int | None = None
        self.failed: list[tuple[int, Widths]] = []
        self._memory = memory
        self._parameters = parameters
        self._wanted = wanted
        self._events = events
        self._widths: Widths | None = None  # that the plan was made for; None before the first window
        self._widths_before = cutting.widths
        self._groups: list[Runs] = []
        self._sizes: tuple[int, ...] | None = None  # of the current window
        self._held_bytes: int | None = None
        self._copied_bytes = 0.0  # of each element of the next micro-batch, while one computes
        self._can_measure = True
        self._learning: Search | None = None
        self._is_to_learn = wanted.learns
        self._trials: list[Trial] = []
        self._before_state = 0  # how many of them ran before the optimizer had state
        self._backoffs = Backoffs()
        self._limits: dict[Widths, int] = {}  # as memory has them, until more is known
        self._alone: Counter[int] = Counter()  # how often this window's samples failed alone, by their indices
        self._too_large: set[Widths] = set()  # of samples that failed alone also after waiting
        self._windows = 0
        self._is_measuring = False
        self._times_after = wanted.times_after
        self._tempo: Autotune | None = None
        self._timed: Plan | None = None  # the plan that is being timed
        self._compared_to = cutting.compared_to
        self._shrunk = cutting.plan if cutting.plan.micro_batch < plan.micro_batch else None  # after failures
        if self._shrunk is not None:
            self.plan, self._times_after = self._shrunk, None

    @property
    def cutting(self) -> Cutting:
        """How windows are currently cut."""
        return Cutting(
            self.plan,
            self.set_plan,
            self.frontier,
            is_found=not self.is_learning,
            is_timed=self.is_timed,
            compared_to=self._compared_to,
            widths=self._widths,
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
    def is_stable(self) -> bool:
        """Whether windows are cut by the plan: neither trials nor timed."""
        return not self.is_learning and self._tempo is None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is to be learned from windows that do not run out of memory: sizes stay as they are."""
        return not (self.is_learning or self._backoffs or self._shrunk or self._is_measuring) and self.is_timed

    def set(self, plan: Plan) -> None:
        """Set a plan chosen by the caller."""
        self._learning, self._is_to_learn, self._shrunk = None, False, None
        self._begin_with(plan)
        self._times_after = None

    def grow_to(self, size: int) -> None:
        """Set a larger size chosen by the caller, and report it."""
        self.set(self._plan_of(size))
        self._events.planned(self.plan, None)

    # --- one window ---------------------------------------------------------------------------------------------------

    def begin(self, window: Window) -> None:
        """Inspect a window before it is cut."""
        self._began = self._entered = time.perf_counter()
        self._ended: float | None = None
        self.start = 0
        self._alone.clear()
        self.failed.clear()
        self.peak_bytes = None
        self._groups, self._sizes = window.widths(), None
        self._copied_bytes = self._bytes_copied(window)
        if self._widths is None:
            self._meet(_widest(itertools.chain.from_iterable(self._groups)))
        if self._is_to_learn:
            self._is_to_learn = False
            self._learning = Search(
                self.frontier,
                begins_with=self._wanted.begins_with,
                fails_cleanly=self._memory.fails_cleanly,
                is_soft=self._memory.is_soft,
            )
        self._is_measuring = False
        if self._learning is None:
            self.cut(0)
        self._choose_measuring()

    def _bytes_copied(self, window: Window) -> float:
        """Return the bytes of an element of a window that is copied to a GPU, on the average; 0 if none is."""
        device = self._memory.device
        # The widths of a split with `cost` are no numbers of elements.
        if device.type != "cuda" or hasattr(window.split, "cost") or window.is_on(device):
            return 0.0
        tensors = window.tensors()
        elements = sum(map(Tensor.numel, tensors))
        return sum(tensor.nbytes for tensor in tensors) / elements if elements else 0.0

    def cut(self, start: int) -> tuple[int, ...]:
        """Return the micro-batch sizes of the window from sample `start` on."""
        if self._learning is not None:
            return tuple(self._cut_to_learn(self._learning, start))
        if start == 0 and self._sizes is not None:
            return self._sizes
        sizes = tuple(itertools.chain.from_iterable(map(self._cut_group, self._rests(start))))
        if start == 0:
            self._sizes = sizes
        return sizes

    def enter(self, size: int) -> None:
        """Prepare for the micro-batch at `start`; needed if `measures` is set.

        Raises:
            torch.OutOfMemoryError: Its expected memory is not available.
        """
        widths = self._widths_of(size)
        if self._learning is not None:
            line = self.frontier.line(widths)
            expected = 0.0 if line is None else line.at(size)
        else:
            expected = _CERTAIN * (self.frontier.expected_bytes(size, widths) or 0.0)
        if self._learning is not None or self._is_measuring:
            self._memory.reset_peak()
            self._held_bytes = self._memory.peak_bytes()
            self._entered = time.perf_counter()
        if size > 1:  # of a single sample only trying tells, since a prediction may be far too high
            self._memory.ensure(max(0, int(expected)))

    def leave(self, size: int) -> None:
        """Record that the micro-batch has completed; needed if `measures` is set.

        One above a soft limit is kept, and the next is smaller.

        Raises:
            torch.OutOfMemoryError: It is above the limit, and can hardly be made smaller.
        """
        if self._learning is None and not self._is_measuring:
            return
        self._memory.synchronize()
        elapsed_s = time.perf_counter() - self._entered
        widths, peak = self._widths_of(size), self._memory.peak_bytes()
        ahead = int(self._copied_bytes * sum(widths) * size)
        extra = None if peak is None or self._held_bytes is None else max(1, peak - self._held_bytes) + ahead
        is_whole = size == sum(samples for runs in self._groups for samples, _ in runs)
        if self._learning is None:
            self._limits.clear()
            self.frontier.note(size, widths)
            if extra is None:
                self._can_measure = False
            else:
                self.frontier.measure(size, widths, extra, is_bound=self.start == 0)
            return
        self.peak_bytes = max(self.peak_bytes or 0, peak or 0) or None
        if (excess := self._memory.excess(peak)) is not None:
            if size <= _UNDIVIDED:
                raise torch.OutOfMemoryError(excess)
            self._note(Trial(size, fits=False, peak_bytes=peak, elapsed_s=elapsed_s), widths)
            if extra is not None and self.start:
                self.frontier.measure(size, widths, extra)
            self._learning.fail(size, widths)
            return
        self._learning.note(
            size,
            widths,
            extra,
            is_first=self.start == 0,
            is_whole=is_whole,
            gradient_bytes=gradient_bytes(self._parameters()),
        )
        self._note(Trial(size, fits=True, peak_bytes=peak, elapsed_s=elapsed_s), widths)

    def wait(self) -> None:
        """Record that the window now waits for other processes."""
        if self._tempo is not None:
            self._memory.synchronize()
        self._ended = time.perf_counter()

    def fail(self, size: int, *, may_wait: bool = False) -> bool:
        """Switch to smaller sizes after a micro-batch ran out of memory; return whether to try again.

        It may wait for memory where single samples have fitted before.
        """
        widths = self._widths_of(size)
        if self._learning is not None:
            elapsed_s = time.perf_counter() - self._entered
            self._note(Trial(size, fits=False, peak_bytes=None, elapsed_s=elapsed_s), widths)
        # A single remaining sample that fails proves nothing about larger sizes, which have fitted.
        most = size if size > 1 or self._learning is not None else self._limit(widths, self.set_plan.target_batch)
        if most == 1:
            # No smaller size is left, but something else may have taken the memory for a moment.
            tries, self._alone[self.start] = self._alone[self.start], self._alone[self.start] + 1
            may_wait &= not any(are_within(smaller, widths) for smaller in self._too_large)
            is_worth_it = wait_for_memory(tries, may_wait=may_wait)
            if not is_worth_it:
                self._too_large.add(widths)
            return is_worth_it
        if self._learning is not None:
            return self._learning.fail(size, widths)
        self.failed.append((most, widths))
        return self._shrink(most, widths)

    def adopt(self, failed: Iterable[tuple[int, Widths]]) -> bool:
        """Take over what ran out of memory on another process with as much of it; return whether sizes change here."""
        if self.is_learning:
            return False
        shrunk = False
        for size, widths in failed:
            if size > 1 and self._limit(widths, size) >= size:
                shrunk |= self._shrink(size, widths)
        return shrunk

    def shrink(self) -> bool:
        """Switch to smaller sizes before memory runs out; return whether there are any."""
        return self._learning is None and self._widths is not None and self._shrink(self.plan.micro_batch, self._widths)

    def end(self, sizes: Sequence[int], *, is_clean: bool, has_room: Callable[[int], bool]) -> None:
        """Record that a window has become an optimizer step, and choose the sizes of the next."""
        if self._learning is not None:
            self._memory.trim()
            groups = [(sum(samples for samples, _ in runs), _widest(runs)) for runs in self._groups]
            self._learning.end_window(groups, self._memory.reading().free_bytes, most=self._wanted.most)
            # A size that fitted before the optimizer's state existed may not fit with it.
            self._before_state = self._before_state or len(self._trials)
            if self._learning.is_done:
                self._conclude(self._learning, sizes)
            else:
                self.plan = self.set_plan = self._plan_of(max(sizes))
            return
        if not self._autotunes(is_clean=is_clean) and is_clean:
            self._grow(has_room)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _rests(self, start: int) -> list[Runs]:
        """Return what is left of each group from `start` on."""
        rests: list[Runs] = []
        for runs in self._groups:
            left: Runs = []
            for samples, widths in runs:
                skipped = min(start, samples)
                start -= skipped
                if samples > skipped:
                    left.append((samples - skipped, widths))
            if left:
                rests.append(left)
        return rests

    def _cut_group(self, runs: Runs) -> tuple[int, ...]:
        """Cut samples that can be joined."""
        samples, plan = sum(each for each, _ in runs), self._timed or self.plan
        if len(runs) == 1:
            if runs == [(plan.target_batch, self._widths)]:
                return plan.micro_batches
            return planner.cut(samples, self._limit(runs[0][1], samples), is_uniform=self._wanted.is_uniform)
        sizes = self._greedy(runs, samples)
        even = planner.balanced(samples, -(-samples // len(sizes)))
        return even if self._are_allowed(even, runs) else sizes

    def _greedy(self, runs: Runs, samples: int) -> tuple[int, ...]:
        """Cut samples of unlike width, as many into each micro-batch as its widest one allows."""
        sizes: list[int] = []
        size, widest = 0, runs[0][1]
        for samples_alike, widths in runs:
            rest = samples_alike
            while rest:
                wider = joined_widths(widest, widths) if size else widths
                room = self._limit(wider, samples) - size
                if room <= 0:
                    sizes.append(size)
                    size = 0
                    continue
                taken = min(room, rest)
                size, rest, widest = size + taken, rest - taken, wider
        return (*sizes, size)

    def _are_allowed(self, sizes: Sequence[int], runs: Runs) -> bool:
        starts = itertools.accumulate(sizes, initial=0)
        return all(
            size <= self._limit(widths_between(runs, start, start + size), size)
            for size, start in zip(sizes, starts, strict=False)
        )

    def _limit(self, widths: Widths, most: int) -> int:
        """Return the most samples of these widths that a micro-batch may have, at most `most`."""
        wanted, plan = self._wanted, self._timed or self.plan
        if not wanted.by_width:
            most = min(most, max(self.set_plan.micro_batch, wanted.fits))
        else:
            if plan.micro_batch < self._compared_to and self._widths is not None:
                # The clock asks for less than fits.
                most = min(most, max(1, plan.micro_batch * sum(self._widths) // sum(widths)))
            if self.frontier.surely(widths) < most:
                if widths not in self._limits:
                    self._limits[widths] = self._fitting(widths, most)
                most = min(most, self._limits[widths])
        return self._backoffs.limit(widths, self._capped(most))

    def _widths_of(self, size: int) -> Widths:
        """Return the widths of the micro-batch at `start`."""
        return widths_between([run for runs in self._groups for run in runs], self.start, self.start + size)

    def _fitting(self, widths: Widths, most: int) -> int:
        """Return how many samples of these widths fit, as far as is known."""
        found = self.frontier.largest(widths, self._free_beside_gradients(), sys.maxsize)
        if found < most:  # what a cache or the heap keeps counts as used
            self._memory.trim()
            found = self.frontier.largest(widths, self._free_beside_gradients(), sys.maxsize)
        return found

    def _free_beside_gradients(self) -> int:
        to_come = (p for p in self._parameters() if p.requires_grad and p.grad is None)
        return self._memory.reading().free_bytes - sum(p.nbytes for p in to_come)

    def _meet(self, widths: Widths) -> None:
        """Take samples of some widths for those of the plan."""
        before = self._widths_before
        self._widths = widths if before is None or len(before) != len(widths) else before
        if self._wanted.by_width and not self.is_learning and not self.frontier.fits:
            self.frontier.note(max(self.set_plan.micro_batch, self._wanted.fits), widths)
        if self._shrunk is not None:
            self._wait_to_grow(self.set_plan, self._shrunk.micro_batch)
            self._shrunk = None

    def _choose_measuring(self) -> None:
        """Decide whether micro-batches of the window are looked at."""
        sizes, self.start = self._sizes or (), 0
        if self._learning is None and self._wanted.by_width and self._can_measure:
            for size in sizes:
                self._is_measuring = self._is_measuring or not self.frontier.is_measured(self._widths_of(size))
                self.start += size
            self.start = 0
        is_careful = self._wanted.by_width and not self._memory.fails_cleanly
        self.measures = self._learning is not None or self._is_measuring or is_careful

    # --- learning -----------------------------------------------------------------------------------------------------

    def _cut_to_learn(self, learning: Search, start: int) -> Iterator[int]:
        """Yield the size of the next micro-batch, then the remaining sizes as they are without further learning."""
        self._memory.trim()
        runs, *others = self._rests(start)
        rest = sum(samples for samples, _ in runs)
        free_bytes = self._memory.reading().free_bytes
        size = self._capped(learning.next_size(rest, _widest(runs), free_bytes, is_first=start == 0))
        yield size
        for samples in [rest - size, *(sum(each for each, _ in other) for other in others)]:
            if samples:
                yield from planner.balanced(samples, size)

    def _note(self, trial: Trial, widths: Widths) -> None:
        """Record and report a trial if it adds information: a size below one that fits rarely does."""
        known = self._trials[self._before_state :]
        failed = min((one.size for one in known if not one.fits), default=math.inf)
        fits = max((one.size for one in known if one.fits and one.size < failed), default=0)
        is_reported = any((one.size, one.fits) == (trial.size, trial.fits) for one in known)
        is_answer = trial.fits and trial.size == self.frontier.surely(widths)
        if not is_reported and (fits < trial.size < failed or is_answer or not trial.fits):
            self._trials.append(trial)
            self._events.trial(trial)

    def _conclude(self, learning: Search, sizes: Sequence[int]) -> None:
        """End the search with what it has found for the widest samples of the last window."""
        self._learning = None
        widths = self._widths = _widest(itertools.chain.from_iterable(self._groups))
        frontier, line = self.frontier, self.frontier.line(widths)
        sure = frontier.surely(widths)
        if not sure:  # samples as wide were in first micro-batches alone, the last of which has just fitted
            sure = max(1, min(sizes[0], (frontier.too_many(widths) or sizes[0] + 1) - 1))
            frontier.note(sure, widths)
        begun_with = None if learning.failed_trials else self._wanted.begins_with
        largest = max(sizes) if begun_with is not None and begun_with >= max(sizes) else sure
        self.probe = ProbeResult(
            largest,
            tuple(self._trials),
            self._memory.reading().limit_bytes,
            None if line is None else max(0, int((self._held_bytes or 0) + line.fixed_bytes)),
            None if line is None else int(line.bytes_per_sample),
        )
        self._begin_with(self._plan_of(largest))
        if begun_with is not None and begun_with < sure:
            self._compared_to = sure  # by the clock of an earlier run
        frontier.forgive()
        if learning.failed_trials and line is not None:
            hoped = self._plan_of(line.largest_within(self._free_beside_gradients()))
            if hoped.micro_batch > self.plan.micro_batch:  # it has failed, although it is predicted to fit
                self.set_plan = hoped
                self._wait_to_grow(hoped, self.plan.micro_batch)
        self._events.planned(self.plan, self.probe, is_proven=self.plan.micro_batches == tuple(sizes))

    # --- the plan -----------------------------------------------------------------------------------------------------

    def _begin_with(self, plan: Plan) -> None:
        self.plan = self.set_plan = plan
        self._backoffs.clear()
        self._limits.clear()
        self._tempo = self._timed = self._sizes = None

    def _plan_of(self, most: int) -> Plan:
        wanted, target = self._wanted, self.plan.target_batch
        return planner.planned(target, max(1, self._capped(min(most, target))), is_uniform=wanted.is_uniform)

    def _capped(self, size: int) -> int:
        """Return a size that is allowed."""
        most = self._wanted.most
        return size if most is None else min(size, most)

    # --- after failures -----------------------------------------------------------------------------------------------

    def _wait_to_grow(self, plan: Plan, size: int) -> None:
        """Begin with a size, and grow to that of a plan later."""
        assert self._widths is not None
        backoff = self._backoffs.begin(self._widths, plan.target_batch, plan.micro_batch)
        backoff.grow(size)
        backoff.stay()

    def _shrink(self, failed: int, widths: Widths) -> bool:
        """Make micro-batches smaller whose samples are at least as wide; return whether there are smaller ones."""
        is_plans = widths == self._widths or not self._wanted.by_width
        largest = self.set_plan.micro_batch if is_plans else failed
        if not self._backoffs.fail(widths, failed, target_batch=self.plan.target_batch, largest=largest):
            return False
        if self._wanted.by_width:
            self.frontier.fail(failed, widths)
        self._change_size()
        if self._tempo is not None:
            self._compared_to = self.plan.micro_batch
            self._time(Autotune(self.plan.target_batch, self.plan.micro_batch))
        return True

    def _grow(self, has_room: Callable[[int], bool]) -> None:
        """Try larger sizes again where it is time to, after a window without failures."""
        present = (widths for runs in self._groups for _, widths in runs)
        for failed, backoff, larger in self._backoffs.succeed(present):
            each = (self.frontier.expected_bytes(larger, failed) or 0.0) / larger
            if has_room(int(each * (larger - backoff.size))):
                backoff.grow(larger)
                self.frontier.forgive()
                self._change_size()
            else:
                backoff.stay()

    def _change_size(self) -> None:
        """Let the plan be what the sizes of its widths have come to."""
        self._sizes = None
        self._limits.clear()
        size = self.set_plan.micro_batch
        if self._widths is not None:
            size = self._backoffs.limit(self._widths, size)
        plan = self.set_plan if size == self.set_plan.micro_batch else self._plan_of(size)
        if plan != self.plan:
            self.plan = plan
            self._events.planned(plan, None)

    # --- the clock ----------------------------------------------------------------------------------------------------

    def _autotunes(self, *, is_clean: bool) -> bool:
        """Return whether autotuning is active; if so, record the window's time unless memory ran out."""
        self._windows += 1
        if self._tempo is not None:
            runs = [run for group in self._groups for run in group]
            if is_clean and sum(samples for samples, _ in runs) >= self.plan.target_batch:
                self._memory.synchronize()
                work = sum(samples * sum(widths) for samples, widths in runs) / self.plan.target_batch
                self._tempo.note((self._ended or time.perf_counter()) - self._began, work)
            self._time(self._tempo)
            return True
        if self._times_after is None or self._windows < self._times_after or self.plan != self.set_plan:
            return False
        self._times_after, self._compared_to = None, self.plan.micro_batch
        self._time(Autotune(self.plan.target_batch, self.plan.micro_batch))
        return True

    def _time(self, tempo: Autotune) -> None:
        """Cut the next window as autotuning asks, or conclude."""
        self._sizes = None
        if not tempo.is_stable:
            self._tempo, self._timed = tempo, self._plan_of(tempo.size)
            return
        before = self.plan
        self._begin_with(self._plan_of(tempo.size))
        if self.plan != before:
            self._events.planned(self.plan, None)
        self.fastest = self.plan


def _widest(runs: Iterable[tuple[int, Widths]]) -> Widths:
    return max((widths for _, widths in runs), key=sum)
