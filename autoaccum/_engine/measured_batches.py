"""Adds gradients of batches while memory="auto" chooses what saves memory, in a loop of the user's own."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from autoaccum._engine.block_costs import measured
from autoaccum._engine.rungs import work_of
from autoaccum._oom import let_go
from autoaccum._system import signals

if TYPE_CHECKING:
    from autoaccum._data.batches import Window
    from autoaccum._engine.accumulator import GradientAccumulator
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.rungs import Rungs
    from autoaccum._engine.step_savings import StepSavings
    from autoaccum._records import BackwardReport


class MeasuredBatches:
    """Adds gradients of batches, saving memory by what is fastest.

    Args:
        accumulating: Adds the gradients.
        savings: Saves memory within each batch.
        step: Computes them.
        measures: Whether batches can be compared.
        is_alone: Whether no other process computes the gradients.
    """

    def __init__(
        self,
        accumulating: GradientAccumulator,
        savings: StepSavings,
        step: GradientStep,
        *,
        measures: bool,
        is_alone: bool,
    ) -> None:
        self._accumulating = accumulating
        self._savings = savings
        self._step = step
        self._memory = step.memory
        self._measures = measures
        self._is_alone = is_alone
        self._has_begun = False

    def add(self, window: Window) -> BackwardReport:
        """Add the gradient of a window to `.grad`.

        Args:
            window: The window, or this process's part of it.

        Raises:
            AutoaccumError: As for `Accumulator.backward`.
        """
        rungs = self._savings.rungs
        if rungs is None:
            with self._savings.in_force():
                return self._accumulating.add(window)
        if not self._has_begun:
            self._begin(rungs, window)
        if not rungs.is_measuring:
            return self._added(rungs, window)
        before = self._accumulating.sizing
        was_trial = before is None or before.is_learning
        self._memory.synchronize()
        started = time.perf_counter()
        report = self._added(rungs, window)
        self._memory.synchronize()
        seconds = time.perf_counter() - started
        # While processes wait for each other, their interrupts wait anyway.
        with signals.held() if self._is_alone else nullcontext():
            self._judge(rungs, report, work_of(window), was_trial=was_trial, seconds=seconds)
        return report

    def _begin(self, rungs: Rungs, window: Window) -> None:
        known, tried = self._accumulating.remembered(window)
        look = partial(measured, self._step, window)
        is_known = rungs.begin(known, None, measures=self._measures, look=look, tried=tried)
        if is_known or rungs.is_measuring:
            self._accumulating.begin_rung(
                rungs.rung, compares=rungs.is_measuring, is_chosen=is_known, tried=rungs.tried
            )
        self._has_begun = True

    def _added(self, rungs: Rungs, window: Window) -> BackwardReport:
        """Add the gradient, saving more where not even one sample fits."""
        while True:
            self._accumulating.look_up(window)
            try:
                with self._savings.in_force():
                    return self._accumulating.add(window)
            except Exception as error:
                if not rungs.may_avoid(error) or not self._savings.climb(error):
                    raise
                let_go(error)
            self._memory.release()
            self._accumulating.begin_rung(rungs.rung, compares=rungs.is_measuring, is_chosen=False)

    def _judge(self, rungs: Rungs, report: BackwardReport, work: int, *, was_trial: bool, seconds: float) -> None:
        """Choose with all processes what saves memory in the next batch."""
        former, sizing = rungs.rung, self._accumulating.sizing
        assert sizing is not None
        if not rungs.after_window(report, sizing.cutting, work, was_trial=was_trial, seconds=seconds):
            return
        if rungs.rung != former:
            self._memory.release()
        self._accumulating.begin_rung(
            rungs.rung, compares=rungs.is_measuring, is_chosen=not rungs.is_measuring, tried=rungs.tried
        )
