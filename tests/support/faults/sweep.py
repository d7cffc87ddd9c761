"""Goes through the operators of a step and lets each fail in turn, and judges what is left behind.

A case of `fault_cases` is trained from its seed again and again, each time with a fault at another operator, and held
against a training that was given the reported cuts from the start and met no fault. Whatever is not as promised is
written down as a mismatch.
"""

import random
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import autoaccum
from support.faults.cases import SAMPLES, WINDOWS
from support.faults.modes import InterruptAt, InterruptAtLine, differences
from support.faults.training import BACKWARD, FORWARD, UPDATE, FailInTurn, LackAt, Listing, play

# The window that most faults are for: the first has settled what is found out and made lazily.
_WINDOW = 1
# The first in which everything that is kept across windows is there.
_COUNTED = 2


@dataclass
class Tally:
    operators: int = 0  # operators of the swept window
    injected: int = 0  # faults that were injected
    survived: int = 0  # windows that became an update in another cut, or the same, bit for bit
    refused: int = 0  # windows that raised and left everything as it was before
    finished: int = 0  # interrupts that waited until the update was made
    # By operator at which the optimizer failed: how often that was told as damage.
    damaged: Counter = field(default_factory=Counter)
    mismatches: list = field(default_factory=list)  # whatever is not as promised, in words
    seconds: float = 0.0  # how long it took

    def add(self, other):
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Budget:
    """How many faults of each kind a sweep injects; all operators where there are no more."""

    memory: int = 300  # memory runs out in a window like any other
    first: int = 100  # in the first window, which settles what is found out and made lazily
    troubled: int = 100  # in a window after one in which memory ran out, where gradients are taken aside
    twice: int = 40  # memory runs out, and again in the retry
    smallest: int = 6  # memory runs out in every attempt
    errors: int = 40  # the user's code raises an error of its own
    interrupts: int = 40  # an interrupt arrives
    counted: int = 4  # of the first kind, those at which what is alive is counted
    lines: int = 40  # an interrupt arrives between two lines of the library, in each of two windows


class Sweep:
    """All faults of one case.

    Args:
        case: The case.
        shift: Shifts a sample of the operators, so that those of many cases together come near to all.
    """

    def __init__(self, case, shift=0):
        self.case = case
        self.tally = Tally()
        self._shift = shift
        self._clean = {}

    def run(self, budget):
        started = time.perf_counter()
        parts = self._parts()
        self.tally.operators = self._operators = len(parts[_WINDOW])
        work = [part for part in parts[_WINDOW] if part in (FORWARD, BACKWARD)]
        self.memory(_WINDOW, self._chosen(parts[_WINDOW], budget.memory))
        self.memory(0, self._chosen(parts[0], budget.first))
        if budget.troubled:
            troubled = self._parts({_WINDOW: LackAt(1)})[_WINDOW + 1]
            self.memory(_WINDOW + 1, self._chosen(troubled, budget.troubled), {_WINDOW: 1})
        self.twice(self._chosen(work, budget.twice), len(work))
        self.smallest(self._chosen(work[: len(work) // SAMPLES], budget.smallest))
        self.errors(self._chosen(parts[_WINDOW], budget.errors))
        self.interrupts(self._chosen(parts[_WINDOW], budget.interrupts))
        self.counted(self._chosen(parts[_COUNTED], budget.counted))
        self.lines(budget.lines)
        self.tally.seconds += time.perf_counter() - started
        return self.tally

    def memory(self, window, points, earlier=None):
        for point in points:
            fault = LackAt(point)
            faults = {number: LackAt(at) for number, at in (earlier or {}).items()}
            played = play(self.case, faults | {window: fault}, windows=min(window + 2, WINDOWS))
            self.judge(played, window, fault, f"operator {point} of window {window}")

    def twice(self, points, operators):
        """Let memory run out at each of the points, and once more: right after it, and somewhere in the retry."""
        chance = random.Random(self._shift)  # noqa: S311 - no secret
        for number, point in enumerate(points):
            second = chance.randint(1, operators)
            fault = FailInTurn(point, second, None) if number % 2 else LackAt(point, point + 1 + second % 8)
            played = play(self.case, {_WINDOW: fault})
            self.judge(played, _WINDOW, fault, f"operators {point} and then {second}")

    def smallest(self, points):
        """Let every attempt run out of memory, down to one sample (which BatchNorm may refuse by itself)."""
        for point in points:
            fault = FailInTurn(point)
            played = play(self.case, {_WINDOW: fault})
            where = f"operator {point} of every attempt"
            self.tally.injected += fault.hits
            if not isinstance(played.error, autoaccum.DoesNotFitError):
                self._wrong(where, f"no DoesNotFitError but {played.error!r}")
            else:
                self._judge_untouched(played, _WINDOW, where)

    def errors(self, points):
        for point in points:
            mine = LookupError("the user's own")
            fault = LackAt(point, error=mine)
            played = play(self.case, {_WINDOW: fault}, again=True)
            self.judge_error(played, fault, mine, f"an error at operator {point}")

    def interrupts(self, points):
        """Interrupt at each of the points, and then go on: with the same window, or the next if it was done."""
        for point in points:
            fault = InterruptAt(point)
            self._interrupt({_WINDOW: fault}, fault, f"an interrupt at operator {point}")

    def lines(self, most):
        """Interrupt between the library's own lines: in a window like any other, and in one of trouble.

        The last line comes after the update.
        """

        def trouble():
            """A fault after which micro-batches are smaller, and one among these, before the optimizer steps."""
            return {_WINDOW: LackAt(1), _WINDOW + 1: [FailInTurn(self._operators // 4, None)]}

        # What goes by the clock does not run or always does, so that the same lines run each time.
        with mock.patch.multiple(time, perf_counter=lambda: 0.0, monotonic=lambda: 0.0):
            for window, faults in ((_WINDOW, lambda: {_WINDOW: []}), (_WINDOW + 1, trouble)):
                listing, listed = InterruptAtLine("autoaccum"), faults()
                listed[window].append(listing)
                play(self.case, listed)
                steps = range(min(most, listing.count))
                points = [1 + (self._shift + step * listing.count // len(steps)) % listing.count for step in steps]
                for point in sorted({*points, listing.count}) if points else ():
                    fault, given = InterruptAtLine("autoaccum", point), faults()
                    given[window].append(fault)
                    self._interrupt(given, fault, f"an interrupt at line {point} of window {window}")

    def _interrupt(self, faults, fault, where):
        """Judge a training that was interrupted by one of its faults, in the last window that has any."""
        played = play(self.case, faults, again=True)
        self.tally.injected += fault.hits
        where = f"{where} ({fault.where})"
        if not isinstance(played.error, KeyboardInterrupt):
            self._wrong(where, f"it did not arrive: {played.error!r}")
            return
        if played.finished:
            self.tally.finished += 1
        else:
            self._judge_untouched(played, max(faults), where)
        self._judge_windows(played, 0, where)

    def counted(self, points):
        expected = {}
        for point in points:
            fault = LackAt(point)
            played = play(self.case, {_COUNTED: fault}, counted=True)
            where = f"operator {point}, counted"
            if played.error is not None:
                continue
            self.tally.injected += fault.hits
            cuts = tuple(played.cuts)
            if cuts not in expected:
                expected[cuts] = play(self.case, cuts=cuts, counted=True).alive_after
            if played.alive_after != expected[cuts]:
                self._wrong(where, f"alive: (tensors, bytes) {played.alive_after} instead of {expected[cuts]}")
            for alive, keeps in played.alive_between:
                extra = alive - played.alive_before[_COUNTED]
                if extra > 0 and not keeps:
                    self._wrong(where, f"{extra} bytes of the failed attempt are alive while the next one is planned")

    # --- judging ------------------------------------------------------------------------------------------------------

    def judge(self, played, window, fault, where):
        """Judge a training in which memory ran out once or more in a window."""
        self.tally.injected += fault.hits
        if isinstance(played.error, autoaccum.StateDamagedError):
            self._judge_damage(played, fault, where)
        elif isinstance(played.error, autoaccum.DoesNotFitError) and _may_give_up(played):
            self._judge_untouched(played, window, where)
        elif played.error is not None:
            self._wrong(where, f"raised {played.error!r}")
        elif not bool(fault.hits - _asked(fault)) <= played.events[window] <= fault.hits:
            self._wrong(where, f"{played.events[window]} events are told of {fault.hits}")
        elif not 0 <= played.recomputed[window] <= fault.hits * 2 * SAMPLES:
            self._wrong(where, f"{played.recomputed[window]} samples are told to be done again")
        else:
            self.tally.survived += 1
            self._judge_windows(played, window, where)

    def judge_error(self, played, fault, mine, where):
        """Judge a training in which an error of the user's own was raised, and the window then given again."""
        self.tally.injected += fault.hits
        if isinstance(played.error, autoaccum.StateDamagedError) and played.error.__cause__ is mine:
            self._judge_damage(played, fault, where)
        elif played.error is None and _asked(fault):
            self.tally.survived += 1
            self._judge_windows(played, 0, where)
        # Where a loss is computed for fewer samples, an error that says so has the user's as its cause.
        elif played.error is not mine and not (
            isinstance(played.error, autoaccum.InvalidInputError) and played.error.__cause__ is mine
        ):
            self._wrong(where, f"it did not arrive: {played.error!r}")
        else:
            self._judge_traceback(mine, fault, where)
            self._judge_untouched(played, _WINDOW, where)
            self._judge_windows(played, 0, where)

    def _judge_windows(self, played, window, where):
        """Compare with a training that was given the same cuts and met no fault, from a window on."""
        clean = self._clean_of(tuple(played.cuts))
        for number in range(window, len(played.cuts)):
            off = differences(played.states[number + 1], clean.states[number + 1])
            if off:
                self._wrong(where, f"after window {number}, cut {played.cuts[number]}: {', '.join(off)} differ")
            if played.figures[number] not in (None, clean.figures[number]):
                self._wrong(where, f"window {number} reports {played.figures[number]}, not {clean.figures[number]}")

    def _judge_untouched(self, played, window, where):
        self.tally.refused += 1
        if off := differences(played.left, played.states[window]):
            self._wrong(where, f"{', '.join(off)} not as before the window")

    def _judge_damage(self, played, fault, where):
        if played.part != UPDATE and not (self.case.kind.writes_parameters and len(played.cuts) == 0):
            self._wrong(where, f"StateDamagedError in {played.part!r}: {played.error}")
        self.tally.damaged[fault.where if played.part == UPDATE else "a parameter that the model writes"] += 1

    def _judge_traceback(self, error, fault, where):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code is not type(fault).fail.__code__ or frame.f_locals.get("self") is not fault:
            self._wrong(where, "the error's traceback is not whole")

    def _wrong(self, where, what):
        self.tally.mismatches.append(f"{self.case}, {where}: {what}")

    # --- what to compare with -----------------------------------------------------------------------------------------

    def _clean_of(self, cuts):
        if cuts not in self._clean:
            self._clean[cuts] = played = play(self.case, cuts=cuts, windows=len(cuts))
            if played.error is not None or tuple(played.cuts) != cuts:
                self._wrong(f"without a fault in {cuts}", repr(played.error))
        return self._clean[cuts]

    def _parts(self, earlier=None):
        """Return for each window the parts in which its operators are."""
        lists = {number: Listing() for number in range(_WINDOW + 2) if number not in (earlier or {})}
        play(self.case, lists | (earlier or {}))
        return {number: listing.parts for number, listing in lists.items()}

    def _chosen(self, parts, most):
        """Return operators: all, or a third at the ends of parts and the rest spread evenly."""
        every = range(1, len(parts) + 1)
        if len(every) <= most:
            return every
        ends = [n for n in every if n in (1, len(every)) or len(set(parts[n - 2 : n + 1])) > 1]
        wanted = ((ends, most // 3), (every, most - most // 3))
        return sorted({of[(self._shift + i * len(of) // most) % len(of)] for of, most in wanted for i in range(most)})


def _asked(fault):
    """How often a fault hit what may be left out if it fails, of which nothing need be told."""
    return getattr(fault, "asked", 0)


def _may_give_up(played):
    """Whether nothing smaller was left to try."""
    sizes = [size for size, _ in played.fell]
    # BatchNorm refuses a single value a channel, which is what an uneven rest can come to.
    is_one = played.fell[-1] == (1, 1) or sizes[-2:] == [None, None]
    return is_one or "one sample alone is refused" in str(played.error)
