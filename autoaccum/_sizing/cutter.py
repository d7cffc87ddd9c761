"""Cuts windows into micro-batches: by a plan, by what is known to fit, and by what has failed.

Samples have widths, as in `frontier.py`: shorter ones go in larger micro-batches than longer ones.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

from autoaccum._sizing import packing, planner
from autoaccum._sizing.backoff import Backoffs
from autoaccum._sizing.costs import fitted
from autoaccum._sizing.frontier import joined_widths, mean_widths_between, widths_between

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Plan
    from autoaccum._sizing.cutting import Cutting, SizingOptions
    from autoaccum._sizing.events import Events
    from autoaccum._sizing.frontier import Runs, Widths


class Cutter:
    """Cuts windows, and follows what fits and what fails.

    Attributes:
        plan: The current plan, for samples as wide as those that it was made for.
        target_plan: The plan that sizes grow back to.
        timed: The plan in place of the current one while it is timed; None otherwise.
        compared_to: The largest size whose windows were timed; 0 if none was.
        frontier: What is known to fit.
        widths: Those that the plan was made for; None before the first window.
        groups: The samples of the current window that can be joined, with their widths.
        memory, parameters, wanted, events: As given; the learner and the clock read them here.
    """

    def __init__(
        self,
        memory: MemoryBackend,
        parameters: Callable[[], Iterable[Tensor]],
        cutting: Cutting,
        wanted: SizingOptions,
        events: Events,
    ) -> None:
        found = cutting.frontier if cutting.is_found else None
        self.frontier = found or wanted.frontier
        self.plan = self.target_plan = cutting.largest_plan
        self.timed: Plan | None = None
        self.compared_to = cutting.compared_to
        self.widths: Widths | None = None
        self.groups: list[Runs] = []
        self.memory = memory
        self.parameters = parameters
        self.wanted = wanted
        self.events = events
        self._costs = cutting.costs
        self._widths_before = cutting.widths
        self._sizes: tuple[int, ...] | None = None  # of the current window
        self._backoffs = Backoffs()
        self._limits: dict[Widths, int] = {}  # as memory has them, until more is known
        self._shrunk = cutting.plan if cutting.plan.micro_batch < self.plan.micro_batch else None  # after failures
        self.plan = self._shrunk or self.plan

    @property
    def is_shrunk(self) -> bool:
        """Whether sizes are smaller than planned after failures, and may grow back."""
        return bool(self._backoffs) or self._shrunk is not None

    # --- plans --------------------------------------------------------------------------------------------------------

    def replace_plan(self, plan: Plan) -> None:
        """Begin anew with a plan."""
        self.plan = self.target_plan = plan
        self.timed = self._shrunk = self._sizes = None
        self._backoffs.clear()
        self._limits.clear()

    def time(self, plan: Plan) -> None:
        """Cut windows by another plan for a while, whose time is measured."""
        self.timed, self._sizes = plan, None

    def plan_of(self, most: int) -> Plan:
        """Return the plan of micro-batches of at most so many samples."""
        target = self.plan.target_batch
        return planner.planned(target, max(1, self.capped(min(most, target))), is_uniform=self.wanted.is_uniform)

    def capped(self, size: int) -> int:
        """Return a size that is allowed."""
        most = self.wanted.most
        return size if most is None else min(size, most)

    # --- one window ---------------------------------------------------------------------------------------------------

    def begin(self, groups: list[Runs], *, is_learning: bool) -> None:
        """Begin a window of samples with these widths, by groups that can be joined."""
        self.groups, self._sizes = groups, None
        if self.widths is None:
            self._meet(widest(itertools.chain.from_iterable(groups)), is_learning=is_learning)

    def cut(self, start: int = 0) -> tuple[int, ...]:
        """Return the micro-batch sizes of the window from sample `start` on."""
        if start == 0 and self._sizes is not None:
            return self._sizes
        sizes = tuple(itertools.chain.from_iterable(map(self._cut_group, self.rests(start))))
        if start == 0:
            self._sizes = sizes
        return sizes

    def rests(self, start: int) -> list[Runs]:
        """Return what is left of each group from sample `start` on."""
        rests: list[Runs] = []
        for runs in self.groups:
            left: Runs = []
            for samples, widths in runs:
                skipped = min(start, samples)
                start -= skipped
                if samples > skipped:
                    left.append((samples - skipped, widths))
            if left:
                rests.append(left)
        return rests

    @property
    def packs(self) -> bool:
        """Whether micro-batches are filled up to the tokens that fit: not where sizes are given."""
        return self.frontier.packs and self.wanted.by_width and not self.wanted.is_uniform

    def widths_of(self, start: int, size: int) -> Widths:
        """Return the widths of a micro-batch of the window."""
        between = mean_widths_between if self.packs else widths_between
        return between([run for runs in self.groups for run in runs], start, start + size)

    def limit(self, widths: Widths, most: int) -> int:
        """Return the most samples of these widths that a micro-batch may have, at most `most`."""
        if self.wanted.by_width:
            most = self._within_memory(widths, most)
        else:
            most = min(most, max(self.target_plan.micro_batch, self.wanted.fits))
        return self._backoffs.limit(widths, self.capped(most))

    def _within_memory(self, widths: Widths, most: int) -> int:
        """Return how many samples of these widths memory and the clock allow, at most `most`."""
        plan = self.timed or self.plan
        if plan.micro_batch < self.compared_to and self.widths is not None:
            # The clock asks for less than fits.
            most = min(most, max(1, plan.micro_batch * sum(self.widths) // sum(widths)))
        if self.frontier.surely(widths) < most:
            if widths not in self._limits:
                self._limits[widths] = self._fitting(widths, most)
            most = min(most, self._limits[widths])
        return most

    def free_beside_gradients(self) -> int:
        """Return the bytes that are free once all gradients exist."""
        to_come = (p for p in self.parameters() if p.requires_grad and p.grad is None)
        return self.memory.reading().free_bytes - sum(p.nbytes for p in to_come)

    def forget_limits(self) -> None:
        """Read anew how much fits, since more is known."""
        self._limits.clear()

    def _cut_group(self, runs: Runs) -> tuple[int, ...]:
        """Cut samples that can be joined."""
        samples, plan = sum(each for each, _ in runs), self.timed or self.plan
        if self.packs:
            tokens = [sum(widths) for alike, widths in runs for _ in range(alike)]
            return packing.in_turn(tokens, self._within_memory((1,), sum(tokens)), self.wanted.most)
        if len(runs) == 1:
            if runs == [(plan.target_batch, self.widths)]:
                return plan.micro_batches
            return planner.cut(samples, self.limit(runs[0][1], samples), is_uniform=self.wanted.is_uniform)
        cost, sorts = fitted(self._costs.measured()), runs == sorted(runs, key=lambda run: run[1], reverse=True)
        if cost.fixed and sorts and self.wanted.by_width and not self.wanted.is_uniform:
            known = [[(sum(widths), self.limit(widths, samples))] * alike for alike, widths in runs]
            each, limits = zip(*itertools.chain.from_iterable(known), strict=True)
            return cost.cheapest(each, limits)
        sizes = self._greedy(runs, samples)
        even = planner.balanced(samples, -(-samples // len(sizes)))
        return even if self._are_allowed(even, runs) else sizes

    def packed(self, each: Sequence[int]) -> list[list[int]]:
        """Return which samples go together where they are packed, given the tokens of each, the most first."""
        return packing.best_fit(each, self._within_memory((1,), sum(each)), self.wanted.most)

    def _greedy(self, runs: Runs, samples: int) -> tuple[int, ...]:
        """Cut samples of unlike width, as many into each micro-batch as its widest one allows."""
        sizes: list[int] = []
        size, widest_so_far = 0, runs[0][1]
        for samples_alike, widths in runs:
            rest = samples_alike
            while rest:
                wider = joined_widths(widest_so_far, widths) if size else widths
                room = self.limit(wider, samples) - size
                if room <= 0:
                    sizes.append(size)
                    size = 0
                    continue
                taken = min(room, rest)
                size, rest, widest_so_far = size + taken, rest - taken, wider
        return (*sizes, size)

    def _are_allowed(self, sizes: Sequence[int], runs: Runs) -> bool:
        starts = itertools.accumulate(sizes, initial=0)
        return all(
            size <= self.limit(widths_between(runs, start, start + size), size)
            for size, start in zip(sizes, starts, strict=False)
        )

    def _fitting(self, widths: Widths, most: int) -> int:
        """Return how many samples of these widths fit, as far as is known."""
        found = self.frontier.largest(widths, self.free_beside_gradients(), sys.maxsize)
        if found < most:  # what a cache or the heap keeps counts as used
            self.memory.trim()
            found = self.frontier.largest(widths, self.free_beside_gradients(), sys.maxsize)
        return found

    def _meet(self, widths: Widths, *, is_learning: bool) -> None:
        """Take samples of some widths for those of the plan."""
        before = self._widths_before
        self.widths = widths if before is None or len(before) != len(widths) else before
        if self.wanted.by_width and not is_learning and not self.frontier.fits:
            self.frontier.note(max(self.target_plan.micro_batch, self.wanted.fits), widths)
        if self._shrunk is not None:
            self.grow_later(self.target_plan, self._shrunk.micro_batch)
            self._shrunk = None

    # --- after failures -----------------------------------------------------------------------------------------------

    def fail(self, failed: int, widths: Widths) -> bool:
        """Make micro-batches smaller whose samples are at least as wide; return whether there are smaller ones."""
        is_plans = widths == self.widths or not self.wanted.by_width
        largest = self.target_plan.micro_batch if is_plans else failed
        if not self._backoffs.fail(widths, failed, target_batch=self.plan.target_batch, largest=largest):
            return False
        if self.wanted.by_width:
            self.frontier.fail(failed, widths)
        self._change_size()
        return True

    def grow_later(self, plan: Plan, size: int) -> None:
        """Begin with a size, and grow to that of a plan later."""
        assert self.widths is not None
        self.target_plan = plan
        backoff = self._backoffs.begin(self.widths, plan.target_batch, plan.micro_batch)
        backoff.grow(size)
        backoff.stay()

    def grow(self, has_room: Callable[[int], bool]) -> None:
        """Try larger sizes again where it is time to, after a window without failures."""
        present = (widths for runs in self.groups for _, widths in runs)
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
        size = self.target_plan.micro_batch
        if self.widths is not None:
            size = self._backoffs.limit(self.widths, size)
        plan = self.target_plan if size == self.target_plan.micro_batch else self.plan_of(size)
        if plan != self.plan:
            self.plan = plan
            self.events.planned(plan, None)


def widest(runs: Iterable[tuple[int, Widths]]) -> Widths:
    """Return the widths of the widest of some samples."""
    return max((widths for _, widths in runs), key=sum)
