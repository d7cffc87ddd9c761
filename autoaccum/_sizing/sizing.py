"""Controls the size of micro-batches from window to window: what is learned, what is measured, and what fails."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import TYPE_CHECKING

from torch import Tensor

from autoaccum._sizing.backoff import wait_for_memory
from autoaccum._sizing.clock import Clock
from autoaccum._sizing.cutter import Cutter
from autoaccum._sizing.cutting import Cutting
from autoaccum._sizing.frontier import are_within
from autoaccum._sizing.learner import Learner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Plan
    from autoaccum._sizing.cutting import SizingOptions
    from autoaccum._sizing.events import Events
    from autoaccum._sizing.frontier import Widths

# The fraction of a prediction taken as certain.
_CERTAIN = 0.9


class Sizing:
    """Cuts the windows of one run, based on the outcome of earlier ones.

    Attributes:
        cutter: Cuts by a plan, and knows what fits.
        learner: Chooses the sizes of the first windows.
        clock: Compares sizes that fit.
        measures: Whether `enter` and `leave` must be called for micro-batches of the current window.
        failures: What ran out of memory in this window, trials left out: samples and widths, for other processes.
        costs: The times that were measured.
    """

    def __init__(
        self,
        memory: MemoryBackend,
        parameters: Callable[[], Iterable[Tensor]],
        cutting: Cutting,
        wanted: SizingOptions,
        events: Events,
    ) -> None:
        self.measures = False
        self.failures: list[tuple[int, Widths]] = []
        self.costs = cutting.costs
        self._memory = memory
        self._wanted = wanted
        self.cutter = Cutter(memory, parameters, cutting, wanted, events)
        self.learner = Learner(self.cutter)
        self.clock = Clock(self.cutter, None if self.cutter.is_shrunk else wanted.times_after)
        self._alone: Counter[int] = Counter()  # how often this window's samples failed alone, by their indices
        self._too_large: set[Widths] = set()  # of samples that failed alone also after waiting
        self._is_measuring = False
        self._can_measure = True
        self._entered_at = 0.0
        self._held_bytes: int | None = None
        self._copied_bytes = 0.0  # of each element of the next micro-batch, while one computes

    @property
    def plan(self) -> Plan:
        """The current plan, for samples as wide as those that it was made for."""
        return self.cutter.plan

    @property
    def cutting(self) -> Cutting:
        """How windows are currently cut."""
        cutter = self.cutter
        return Cutting(
            cutter.plan,
            cutter.target_plan,
            cutter.frontier,
            is_found=not self.is_learning,
            is_timed=self.clock.is_over,
            compared_to=cutter.compared_to,
            widths=cutter.widths,
            costs=self.costs,
        )

    @property
    def is_learning(self) -> bool:
        """Whether current windows are trials."""
        return self.learner.is_active

    @property
    def is_stable(self) -> bool:
        """Whether windows are cut by the plan: neither trials nor timed."""
        return not (self.learner.is_active or self.clock.is_running)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is to be learned from windows that do not run out of memory: sizes stay as they are."""
        return not (self.learner.is_active or self.cutter.is_shrunk or self._is_measuring) and self.clock.is_over

    def replace_plan(self, plan: Plan) -> None:
        """Set a plan chosen by the caller."""
        self.learner.is_active = False
        self.clock.stop()
        self.cutter.replace_plan(plan)

    def grow_to(self, size: int) -> None:
        """Set a larger size chosen by the caller, and report it."""
        self.replace_plan(self.cutter.plan_of(size))
        self.cutter.events.planned(self.plan, None)

    # --- one window ---------------------------------------------------------------------------------------------------

    def begin(self, window: Window) -> None:
        """Inspect a window before it is cut."""
        self.clock.begin()
        self._alone.clear()
        self.failures.clear()
        self.learner.peak_bytes = None
        self._entered_at = time.perf_counter()
        self._copied_bytes = self._bytes_copied(window)
        cutter, is_learning = self.cutter, self.is_learning
        packs = getattr(window.split, "packs", None)
        if self._wanted.by_width and not self._wanted.is_uniform and packs not in (None, cutter.frontier.packs):
            cutter.frontier.begin_anew(packs=packs)
            cutter.replace_plan(cutter.plan)
            cutter.widths, self.learner = None, Learner(cutter)
            is_learning = self.is_learning
        cutter.begin(window.widths(), is_learning=is_learning)
        self._is_measuring = not is_learning and self._wanted.by_width and self._can_measure and self._is_news()
        is_careful = self._wanted.by_width and not self._memory.fails_cleanly
        self.measures = is_learning or self._is_measuring or is_careful

    def filling(self, window: Window) -> list[int] | None:
        """Return the order of a window's samples that fills packed micro-batches, given the widest first; else None."""
        if self.is_learning or not (self.cutter.packs and window.samples):
            return None
        return list(itertools.chain.from_iterable(self.cutter.packed(window.each_width())))

    def _bytes_copied(self, window: Window) -> float:
        """Return the bytes of an element of a window that is copied to a GPU, on the average; 0 if none is."""
        device = self._memory.device
        # The widths of a split with `cost` are no numbers of elements.
        if device.type != "cuda" or hasattr(window.split, "cost") or window.is_on(device):
            return 0.0
        tensors = window.tensors()
        elements = sum(map(Tensor.numel, tensors))
        return sum(tensor.nbytes for tensor in tensors) / elements if elements else 0.0

    def _is_news(self) -> bool:
        """Whether the window has a micro-batch of widths whose memory was not measured."""
        start = 0
        for size in self.cutter.cut():
            if not self.cutter.frontier.is_measured(self.cutter.widths_of(start, size)):
                return True
            start += size
        return False

    def cut(self, start: int) -> tuple[int, ...]:
        """Return the micro-batch sizes of the window from sample `start` on."""
        return tuple(self.learner.sizes(start)) if self.learner.is_active else self.cutter.cut(start)

    def enter(self, start: int, size: int) -> None:
        """Prepare for the micro-batch that begins with sample `start`; needed if `measures` is set.

        Raises:
            torch.OutOfMemoryError: Its expected memory is not available.
        """
        widths = self.cutter.widths_of(start, size)
        if self.is_learning:
            expected = self.learner.expected_bytes(size, widths)
        else:
            expected = _CERTAIN * (self.cutter.frontier.expected_bytes(size, widths) or 0.0)
        if self.is_learning or self._is_measuring:
            self._memory.reset_peak()
            self._held_bytes = self._memory.peak_bytes()
            self._entered_at = time.perf_counter()
        if size > 1:  # of a single sample only trying tells, since a prediction may be far too high
            self._memory.ensure(max(0, int(expected)))

    def leave(self, start: int, size: int) -> None:
        """Record that the micro-batch has completed; needed if `measures` is set.

        Raises:
            torch.OutOfMemoryError: It is above a soft limit, and can hardly be made smaller.
        """
        if not (self.is_learning or self._is_measuring):
            return
        self._memory.synchronize()
        elapsed_s = time.perf_counter() - self._entered_at
        widths, peak = self.cutter.widths_of(start, size), self._memory.peak_bytes()
        ahead = int(self._copied_bytes * sum(widths) * size)
        extra = None if peak is None or self._held_bytes is None else max(1, peak - self._held_bytes) + ahead
        if self.is_learning:
            self.costs.note(size, sum(widths), elapsed_s)  # not later, or a run that goes on would cut otherwise
            self.learner.ran(start, size, widths, peak=peak, extra=extra, elapsed_s=elapsed_s)
            return
        frontier = self.cutter.frontier
        self.cutter.forget_limits()
        frontier.note(size, widths)
        if extra is None:
            self._can_measure = False
        else:
            frontier.measure(size, widths, extra, is_bound=start == 0)

    def fail(self, start: int, size: int, *, may_wait: bool = False) -> bool:
        """Switch to smaller sizes after a micro-batch ran out of memory; return whether to try again.

        It may wait for memory where single samples have fitted before.
        """
        widths, is_learning = self.cutter.widths_of(start, size), self.is_learning
        if is_learning:
            self.learner.failed(size, widths, time.perf_counter() - self._entered_at)
        # A single remaining sample that fails proves nothing about larger sizes, which have fitted.
        most = size if size > 1 or is_learning else self.cutter.limit(widths, self.plan.target_batch)
        if most == 1:
            # No smaller size is left, but something else may have taken the memory for a moment.
            tries, self._alone[start] = self._alone[start], self._alone[start] + 1
            may_wait &= not any(are_within(smaller, widths) for smaller in self._too_large)
            is_worth_it = wait_for_memory(tries, may_wait=may_wait)
            if not is_worth_it:
                self._too_large.add(widths)
            return is_worth_it
        if is_learning:
            return self.learner.search.fail(size, widths)
        self.failures.append((most, widths))
        return self._shrink(most, widths)

    def adopt(self, failed: Iterable[tuple[int, Widths]]) -> bool:
        """Take over what ran out of memory on another process with as much of it; return whether sizes change here."""
        if self.is_learning:
            return False
        shrunk = False
        for size, widths in failed:
            if size > 1 and self.cutter.limit(widths, size) >= size:
                shrunk |= self._shrink(size, widths)
        return shrunk

    def shrink(self) -> bool:
        """Switch to smaller sizes before memory runs out; return whether there are any."""
        widths = self.cutter.widths
        return not self.is_learning and widths is not None and self._shrink(self.plan.micro_batch, widths)

    def _shrink(self, failed: int, widths: Widths) -> bool:
        is_smaller = self.cutter.fail(failed, widths)
        if is_smaller:
            self.clock.restart()
        return is_smaller

    def end(self, sizes: Sequence[int], *, is_clean: bool, has_room: Callable[[int], bool]) -> None:
        """Record that a window has become an optimizer step, and choose the sizes of the next.

        Args:
            sizes: Those of its micro-batches; none where it had no samples here.
            is_clean: Whether memory did not run out.
            has_room: Whether so many bytes more than earlier windows took are free.
        """
        if self.is_learning:
            if sizes:
                self.learner.end_window(sizes, self._held_bytes or 0)
        elif not self.clock.end(is_clean=is_clean) and is_clean:
            self.cutter.grow(has_room)
