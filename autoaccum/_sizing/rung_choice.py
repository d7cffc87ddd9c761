"""Chooses what to save memory by, from the seconds of windows trained with each possibility. Pure arithmetic, no torch.

A *rung* is what is in force together: a tuple of names as `fit` takes them in `memory`. The first is the empty one. The
ladder is climbed as long as a rung lets a window be cut into fewer micro-batches; a loss in chunks stays in force above
its own rung only if windows were faster with it, or do not fit without. The few fastest, and the lowest, are then run
again, so that other work on the machine does not decide: it only makes windows slower, so the faster half counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Rung = tuple[str, ...]

# A rung's windows are timed from the second one on: the first may allocate and compile.
WINDOWS_TO_JUDGE = 2
WINDOWS_AGAIN = 2
# Rungs within this factor of the fastest are run again, as is the lowest, which computes the least.
CLOSE = 1.1
# Of two equally fast rungs, the lower one is chosen.
EQUALLY_FAST = 1.02


@dataclass
class Judged:
    """What is known of a rung.

    Attributes:
        micro_batches: The largest micro-batch of each process; empty until they are found.
        is_whole: Whether every process takes its window at once.
        fits: Whether one sample at a time fits, and the model and its loss bear it.
        is_refused: Whether they do not bear it.
        seconds: What its windows took, per window.
        peak_bytes: The highest peak; None if unknown.
    """

    micro_batches: tuple[int, ...] = ()
    is_whole: bool = False
    fits: bool = True
    is_refused: bool = False
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def pace(self) -> float:
        """The mean of the faster half of its seconds."""
        return mean(sorted(self.seconds)[: (len(self.seconds) + 1) // 2])


class RungChoice:
    """Chooses the rung of each window.

    Args:
        levels: What can be added, from the cheapest on, as names of `memory`; "chunked_loss" is the first if there.
        measures: Whether rungs are compared by the clock; else the next one is taken only where nothing fits.

    Attributes:
        rung: The rung of the next window.
        judged: All rungs that were in force so far.
        is_settled: Whether `rung` is final unless it turns out not to fit.
    """

    def __init__(self, levels: Sequence[str], *, measures: bool) -> None:
        self._levels = tuple(levels)
        self._left = list(self._levels)
        self._chunked: str | None = None
        self.rung: Rung = ()
        self.judged: dict[Rung, Judged] = {(): Judged()}
        self._again: list[Rung] = []
        self._warms_up = True
        self.is_settled = not measures or not self._levels

    def settle(self, rung: Rung) -> None:
        """Take a rung that is known to be the one.

        Args:
            rung: The rung; it consists of the levels.
        """
        self._left, self.judged = self._above(rung), {}
        self._go_to(rung)
        self._again, self.is_settled = [], True

    def found(self, micro_batches: Sequence[int], *, is_whole: bool) -> None:
        """Record how finely windows are cut with the present rung; choose another rung if this one gains nothing."""
        judged = self.judged[self.rung]
        if self.is_settled or judged.micro_batches:
            return
        judged.micro_batches, judged.is_whole = tuple(micro_batches), is_whole
        self._warms_up = False  # the windows that found them did
        if len(self.judged) == 1 and is_whole:
            self.is_settled = True
        elif self._gains_nothing():
            self._climb_or_compare()

    def note(self, seconds: float, peak_bytes: int | None) -> None:
        """Record what a window with the present rung took; choose the rung of the next."""
        if self.is_settled:
            return
        if self._warms_up:
            self._warms_up = False
            return
        judged = self.judged[self.rung]
        judged.seconds.append(seconds)
        if peak_bytes is not None:
            judged.peak_bytes = max(judged.peak_bytes or 0, peak_bytes)
        if self._again:
            if len(judged.seconds) >= WINDOWS_TO_JUDGE + WINDOWS_AGAIN:
                self._compare()
        elif len(judged.seconds) >= WINDOWS_TO_JUDGE:
            self._climb_or_compare()

    def does_not_fit(self, rung: Rung, *, is_refused: bool = False) -> bool:
        """Record that not one sample fits with a rung; return whether there is another to go on with.

        Args:
            rung: The rung.
            is_refused: Whether the model or its loss does not bear what it adds to the lower ones.
        """
        judged = self.judged.setdefault(rung, Judged())
        judged.fits, judged.is_refused = False, is_refused
        if is_refused and self._chunked == rung[-1]:
            self._chunked = None
        if rung != self.rung:
            self._again = [one for one in self._again if one != rung]
            return True
        if self._left:
            self._go_to(self._with(self._left.pop(0)))
            return True
        if self._timed() and (is_refused or not self.is_settled):
            self.is_settled = False
            self._compare()
            return True
        if is_refused and () not in self.judged:  # an earlier run has chosen what is refused now
            self._go_to(())
            return True
        return False

    # --- the ladder ---------------------------------------------------------------------------------------------------

    def _gains_nothing(self) -> bool:
        """Whether windows are cut as finely as without this rung, so that it can only take longer."""
        if self.rung == () or self.rung[-1].startswith("chunked_loss"):
            return False
        found = self.judged[self.rung].micro_batches
        others = [one.micro_batches for rung, one in self.judged.items() if rung != self.rung and one.seconds]
        return any(all(mine <= theirs for mine, theirs in zip(found, other, strict=True)) for other in others)

    def _climb_or_compare(self) -> None:
        if self._left and not self.judged[self.rung].is_whole:
            self._go_to(self._with(self._left.pop(0)))
        else:
            self._compare()

    def _with(self, level: str) -> Rung:
        """Return the rung that a level makes."""
        if level.startswith("chunked_loss"):
            self._chunked = level
            return (level,)
        base = () if self._chunked is None or self._is_slower_in_chunks(self._chunked) else (self._chunked,)
        if level != "offload":
            return (*base, level)
        blocks = self.judged.get((*base, "checkpoint"))
        is_borne = "checkpoint" in self._levels and (blocks is None or not blocks.is_refused)
        return (*base, *(("checkpoint",) if is_borne else ()), level)

    def _is_slower_in_chunks(self, chunked: str) -> bool:
        plain, less = self.judged.get((), Judged()), self.judged.get((chunked,), Judged())
        if not plain.fits or not plain.seconds:
            return False
        return not less.seconds or less.pace > plain.pace

    def _above(self, rung: Rung) -> list[str]:
        """Return the levels above a rung."""
        self._chunked = next((name for name in rung if name.startswith("chunked_loss")), None)
        return list(self._levels[self._levels.index(rung[-1]) + 1 :] if rung else self._levels)

    def _go_to(self, rung: Rung) -> None:
        self.rung, self._warms_up = rung, True
        self.judged.setdefault(rung, Judged())

    # --- the comparison -----------------------------------------------------------------------------------------------

    def _timed(self) -> dict[Rung, Judged]:
        return {rung: one for rung, one in self.judged.items() if one.fits and one.seconds}

    def _compare(self) -> None:
        """Run the next of the closest again, or settle."""
        timed = self._timed()
        if not timed:  # the first rung that fits gains nothing over those that do not
            self.is_settled = True
            return
        best = min(one.pace for one in timed.values())
        lowest = next(iter(timed))
        close = [rung for rung, one in timed.items() if rung == lowest or one.pace <= best * CLOSE]
        self._again = [rung for rung in close if len(timed[rung].seconds) < WINDOWS_TO_JUDGE + WINDOWS_AGAIN]
        if len(close) > 1 and self._again:
            self._go_to(self._again[0])
            return
        chosen = next(rung for rung, one in timed.items() if one.pace <= best * EQUALLY_FAST)
        self._left, self._again, self.is_settled = self._above(chosen), [], True
        self._go_to(chosen)
