"""Where the first plan of a run comes from: the user, an earlier run, a probe beforehand, or the first windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._engine.probing import probe
from autoaccum._sizing.cache import Key, PlanCache, Remembered
from autoaccum._sizing.controller import SizingOptions
from autoaccum._sizing.job_key import key_of
from autoaccum._sizing.offline_search import Line
from autoaccum._sizing.planner import TILE, plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._engine.step import TrainingStep
    from autoaccum._records import Plan, ProbeResult, Trial
    from autoaccum._sizing.controller import Cutting

# To be timed, cuts take windows; where there are few, the largest that fits has to do. Where it is not known how many
# there will be, so many go before.
_WINDOWS_WORTH_TIMING = 40
_WINDOWS_BEFORE_TIMING = 10


class Finding:
    """Finds how windows are to be cut in one call of `fit`.

    Args:
        step: The training step.
        target_batch: Samples a window.
        micro_batch: As for `fit`, and so are the next two.
        probe: How sizes are found where `micro_batch` is "auto".
        strategy: How windows are cut; None for "fastest" where sizes are found out, else "balanced".
        cache: Where plans are kept; None where they are not.
        limit_bytes: Memory to stay within, in the memory backend's terms.
        loss_scope: As for `fit`.
        forward: As for `fit`.
        cap: The most samples at once, whatever is asked or found; None where nothing says so.
        grows_from: The size to begin with where a size that does not fit would end the process: then nothing is tried,
            and sizes grow by what smaller ones show. None where failures can be survived.
    """

    def __init__(
        self,
        step: TrainingStep,
        target_batch: int,
        *,
        micro_batch: int | str,
        probe: str,
        strategy: str | None,
        cache: PlanCache | None,
        limit_bytes: int | None,
        loss_scope: str,
        forward: Callable[[nn.Module, Any], Any] | None,
        cap: int | None = None,
        grows_from: int | None = None,
    ) -> None:
        self.asked = micro_batch
        # One that no window reaches is none.
        self._cap = None if cap is None or cap >= target_batch else cap
        self._step = step
        self._target_batch = target_batch
        self._is_auto = micro_batch == "auto"
        # A loss over the whole window has to know the whole cut beforehand.
        self._probe = "before" if probe == "inline" and loss_scope == "window" else probe
        self._grows_from = grows_from
        if grows_from is not None:
            self._probe = probe = "off"
        self._strategy = strategy or ("fastest" if self._is_auto and grows_from is None else "balanced")
        self._multiple_of = TILE if self._is_auto and step.precision.name != "fp32" else 1
        self._cache = cache if self._is_auto and probe != "off" else None
        self._limit_bytes = limit_bytes
        self._loss_scope = loss_scope
        self._forward = forward
        self._key: Key | None = None
        self._remembered: Remembered | None = None

    def begin(self, first: Window, on_trial: Callable[[Trial], None]) -> ProbeResult | None:
        """Look for an earlier run of the same job, and search beforehand where that was asked for.

        Args:
            first: The first window.
            on_trial: Told of each trial.

        Raises:
            DoesNotFitError: Not even one sample fits.
        """
        if not self._is_auto:
            return None
        largest = _largest_batch(first)
        most = first.samples if self._cap is None else min(first.samples, self._cap)
        if self._cache is not None:
            self._key = key_of(
                self._step.objective.modules,
                largest,
                optimizer=self._step.optimizer,
                memory=self._step.memory,
                precision=self._step.precision.name,
                target_batch=self._target_batch,
                limit_bytes=self._limit_bytes,
                loss_scope=self._loss_scope,
                cap=self._cap,
            )
            self._remembered = self._cache.find(self._key)
        if self._probe != "before":
            return None
        found = probe(
            self._step,
            largest,
            most,
            self._limit_bytes,
            on_trial,
            loss_scope=self._loss_scope,
            begins_with=None if self._remembered is None else self._remembered.micro_batch,
        )
        self.note(found)
        return found

    def begin_anew(self) -> None:
        """Find out by the windows to come, since a step takes another memory now; earlier runs say nothing of it."""
        self._cache = self._remembered = None
        if self._loss_scope != "window" and self._probe == "before":
            self._probe = "inline"

    def plan(self, probed: ProbeResult | None = None) -> Plan:
        """Return the plan to begin with; where the first windows are to teach a better one, it is that of no cut."""
        target = self._target_batch
        found = self._grows_from or target if probed is None else probed.micro_batch
        most = self.asked if isinstance(self.asked, int) else found
        most = most if self._cap is None else min(most, self._cap)
        # The fastest is found by whole windows: a single trial of each size says little on a machine that others use.
        strategy = "balanced" if self._strategy == "fastest" else self._strategy
        return plan(target, min(most, target), strategy=strategy, multiple_of=self._multiple_of)

    @property
    def most_asked(self) -> int | None:
        """The most samples at once that the user allows; None where that is left to the library."""
        asked = [most for most in (self.asked, self._cap) if isinstance(most, int)]
        return min(asked, default=None)

    @property
    def grows_to(self) -> int | None:
        """The largest size that is wanted, where sizes grow by what smaller ones show; None where they do not."""
        if self._grows_from is None or not self._is_auto:
            return None
        return self._target_batch if self._cap is None else self._cap

    def within_cap(self, earlier: Plan) -> Plan:
        """Return the plan of an earlier run, or one that the cap allows where that does not."""
        return earlier if self._cap is None or earlier.micro_batch <= self._cap else self.plan()

    def wanted(self, windows_ahead: int | None, cutting: Cutting) -> SizingOptions:
        """Return what is asked of the cut from now on.

        Args:
            windows_ahead: Windows that are to come, where that is known.
            cutting: How windows are cut at first.
        """
        remembered = self._remembered
        line = None
        if remembered is not None and remembered.bytes_per_sample:
            line = Line(0.0, remembered.bytes_per_sample)  # what was held then is not what is held now
        fastest = None if remembered is None else remembered.fastest
        times_after = None
        if (
            not cutting.is_timed
            and fastest is None
            and (windows_ahead is None or windows_ahead >= _WINDOWS_WORTH_TIMING)
        ):
            times_after = _WINDOWS_BEFORE_TIMING if windows_ahead is None else 0
        return SizingOptions(
            strategy=self._strategy,
            multiple_of=self._multiple_of,
            by_bytes=self._is_auto and self._probe != "off",
            learns=not cutting.is_found and self._is_auto and self._probe == "inline",
            times_after=times_after,
            fits=0 if remembered is None or self._probe != "before" else remembered.micro_batch,
            fitted_before=0 if remembered is None else remembered.micro_batch,
            begins_with=None if remembered is None else fastest or remembered.micro_batch,
            line=line,
            most=self._cap,
        )

    # --- what is kept for the next run --------------------------------------------------------------------------------

    def note(self, found: ProbeResult) -> None:
        """Keep what a search has found."""
        before = self._remembered
        if before is not None and found.micro_batch <= before.micro_batch and all(trial.fits for trial in found.trials):
            return  # confirmed, by as much of it as an even cut takes
        self._keep(Remembered(found.micro_batch, found.fixed_bytes, found.bytes_per_sample))

    def note_fastest(self, fastest: Plan) -> None:
        """Keep what the clock has chosen."""
        if self._remembered is not None and fastest.micro_batch <= self._remembered.micro_batch:
            found = self._remembered
            self._keep(Remembered(found.micro_batch, found.fixed_bytes, found.bytes_per_sample, fastest.micro_batch))

    def forget(self) -> None:
        """Forget what has turned out not to fit."""
        if self._cache is not None and self._key is not None:
            self._cache.forget(self._key)
            self._key = None

    def _keep(self, remembered: Remembered) -> None:
        self._remembered = remembered
        if self._cache is not None and self._key is not None:
            with self._step.memory.lifted():
                self._cache.keep(self._key, remembered)


def _largest_batch(window: Window) -> Any:
    """Return the samples of a window that are largest, and of those as many as stand in one batch."""
    sizes, costs = window.groups(), window.sample_bytes()
    largest = max(range(len(sizes)), key=lambda group: (costs[group], sizes[group]))
    begin = sum(sizes[:largest])
    return window.cut(begin, begin + sizes[largest])
