"""Finds the first plan of a run: set by the user, cached by an earlier run, probed, or learned in the first windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._data.batches import largest_first
from autoaccum._engine.probing import probe
from autoaccum._engine.replaced_forward import are_compiled
from autoaccum._records import SAMPLES, TOKENS
from autoaccum._sizing.cache import CacheEntry
from autoaccum._sizing.job_key import key_of
from autoaccum._sizing.planner import planned
from autoaccum._sizing.sizing import SizingOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._records import Plan, ProbeResult, Trial
    from autoaccum._sizing.cache import PlanCache
    from autoaccum._sizing.sizing import Cutting

# Timing cuts takes windows. If fewer than this are to come, the largest cut that fits is used instead; if their number
# is unknown, timing waits for this many first.
_WINDOWS_WORTH_TIMING = 40
_WINDOWS_BEFORE_TIMING = 10


class Finding:
    """Finds the plan by which to cut windows in one call of `fit`.

    Args:
        step: The training step.
        target_batch: Number of samples per window, or of tokens.
        cache: Keeps plans between runs; None to keep none.
        limit_bytes: Memory limit, as the memory backend counts it.
        cap: Upper bound on the micro-batch, set or found; None for no bound.
        saves: What saves memory, as `fit` takes it in `memory`.
        grows_from: The initial size if a size that does not fit would end the process. Nothing is then tried, and sizes
            grow by extrapolation from smaller ones. None if the process survives running out of memory.
    """

    def __init__(
        self,
        step: TrainingStep,
        target_batch: int,
        *,
        cache: PlanCache | None,
        limit_bytes: int | None,
        cap: int | None = None,
        grows_from: int | None = None,
        counts: str = SAMPLES,
        saves: Sequence[str] = (),
    ) -> None:
        self._counts = counts
        self._saves = saves
        options = step.options
        self.asked = options.micro_batch
        # A cap that no window reaches has no effect.
        self._cap = None if cap is None or cap >= target_batch else cap
        self._step = step
        self._target_batch = self._asked_for = target_batch
        self._is_auto = self.asked == "auto"
        self._grows_from = grows_from
        self._searches = self._is_auto and grows_from is None
        # A loss over the whole window needs to know the whole cut beforehand.
        self._tries_before = self._searches and options.loss_scope == "window"
        self._is_uniform = are_compiled(step.objective.modules)
        self._cache = cache if self._searches else None
        self._limit_bytes = limit_bytes
        self._loss_scope = options.loss_scope
        self._entry = CacheEntry(step.memory)

    def see(self, samples: int) -> None:
        """Take the samples of one window for those of each, where the target is in tokens."""
        if self._counts == TOKENS and samples:
            self._target_batch = samples

    def look_up(self, first: Window) -> tuple[str, ...] | None:
        """Look up an earlier run of the same job in the cache; return what memory="auto" saved memory by in it.

        Args:
            first: The first window.
        """
        if self._cache is None:
            return None
        largest = self._largest_of(first)
        key = key_of(
            self._step.objective.modules,
            largest.cut(0, largest.samples),
            optimizer=self._step.optimizer,
            memory=self._step.memory,
            precision=self._step.precision.name,
            target_batch=self._asked_for,
            limit_bytes=self._limit_bytes,
            loss_scope=self._loss_scope,
            cap=self._cap,
            saves=self._saves,
            counts=self._counts,
        )
        self._entry = CacheEntry(self._step.memory, self._cache, key)
        return self._entry.saves

    def begin(self, first: Window, on_trial: Callable[[Trial], None]) -> ProbeResult | None:
        """Search before training, if the loss runs over a whole window.

        Args:
            first: The first window.
            on_trial: Called with each trial.

        Raises:
            DoesNotFitError: Not even one sample fits.
        """
        if not self._tries_before:
            return None
        found = probe(
            self._step,
            self._largest_of(first),
            first.samples if self._cap is None else min(first.samples, self._cap),
            self._limit_bytes,
            on_trial,
            loss_scope=self._loss_scope,
            begins_with=None if self._entry.found is None else self._entry.found.micro_batch,
            frontier=self._entry.frontier,
        )
        self.keep(found)
        return found

    def _largest_of(self, first: Window) -> Window:
        return (largest_first(first) if self._loss_scope == "micro_batch" else first).largest()

    def begin_rung(self, rung: tuple[str, ...]) -> None:
        """Search for sizes with what memory="auto" saves memory by, or take those that were found with it."""
        self._entry.use(rung)

    def plan(self, probed: ProbeResult | None = None) -> Plan:
        """Return the initial plan; a single micro-batch per window if the first windows are to find a better plan."""
        target = self._target_batch
        found = self._grows_from or target if probed is None else probed.micro_batch
        most = self.asked if isinstance(self.asked, int) else found
        most = most if self._cap is None else min(most, self._cap)
        # Only whole windows are timed: on a shared machine, a single trial per size says little.
        return planned(target, min(most, target), is_uniform=self._is_uniform)

    @property
    def most_asked(self) -> int | None:
        """The largest micro-batch that the user allows; None for no bound."""
        asked = [most for most in (self.asked, self._cap) if isinstance(most, int)]
        return min(asked, default=None)

    @property
    def grows_to(self) -> int | None:
        """The largest size to grow to, if sizes grow by extrapolation from smaller ones; else None."""
        if self._grows_from is None or not self._is_auto:
            return None
        return self._target_batch if self._cap is None else self._cap

    def within_cap(self, earlier: Plan) -> Plan:
        """Return the plan of an earlier run if the cap allows it, else a plan within the cap."""
        return earlier if self._cap is None or earlier.micro_batch <= self._cap else self.plan()

    def wanted(self, windows_ahead: int | None, cutting: Cutting) -> SizingOptions:
        """Return the options for choosing sizes from now on.

        Args:
            windows_ahead: Number of windows still to come; None if unknown.
            cutting: The initial cut.
        """
        found = self._entry.found
        times_after = None
        if (
            self._is_auto
            and self._grows_from is None
            and not self._is_uniform
            and not cutting.is_timed
            and (found is None or found.fastest is None)
            and (windows_ahead is None or windows_ahead >= _WINDOWS_WORTH_TIMING)
        ):
            times_after = _WINDOWS_BEFORE_TIMING if windows_ahead is None else 0
        return SizingOptions(
            is_uniform=self._is_uniform,
            by_width=self._searches,
            learns=not cutting.is_found and self._searches and not self._tries_before,
            times_after=times_after,
            fits=self._fits,
            most=self._cap,
            **self._entry.experience,
        )

    @property
    def _fits(self) -> int:
        """A size that may be used though it exceeds the plan's."""
        if self._counts == TOKENS and isinstance(self.asked, int):
            return self.asked  # the first window may have held fewer samples
        found = self._entry.found
        return 0 if found is None or not self._tries_before else found.micro_batch

    # --- the cache ----------------------------------------------------------------------------------------------------

    def keep(self, result: ProbeResult | None = None, fastest: Plan | None = None) -> None:
        """Cache what a search has found, and the plan that autotuning has chosen."""
        self._entry.keep(result, fastest)

    def forget(self) -> None:
        """Delete the cached plan, which has turned out not to fit."""
        self._entry.forget()
