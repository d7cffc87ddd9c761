"""Decides how the windows of a call of `fit` are cut, and makes its runner.

The first plan is set by the user, remembered from an earlier run, resumed, tried before training, or learned in the
first windows. The runner is made anew after more saves memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoaccum import _oom
from autoaccum._callbacks import Callback
from autoaccum._data.batches import Window
from autoaccum._data.order import largest_first
from autoaccum._engine.does_not_fit import sample_of
from autoaccum._engine.probing import probe
from autoaccum._engine.window_runner import WindowRunner
from autoaccum._records import TOKENS, Plan
from autoaccum._saving.replaced_forward import are_compiled
from autoaccum._sizing.cache import CacheEntry, PlanCache
from autoaccum._sizing.cutting import Cutting, SizingOptions
from autoaccum._sizing.events import Events
from autoaccum._sizing.job_key import key_of
from autoaccum._sizing.planner import planned
from autoaccum._sizing.sizing import Sizing
from autoaccum._system.reason_file import RUNNING, Reason, write
from autoaccum._training.stopping import Observers
from autoaccum.errors import DoesNotFitError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autoaccum._data.loader_state import Position
    from autoaccum._records import MemoryEvent, ProbeResult, StepReport, Trial
    from autoaccum._training.fit_context import FitContext
    from autoaccum._training.progress import TrainingProgress

# Timing cuts takes windows. If fewer than this are to come, the largest cut that fits is used instead; if their number
# is unknown, timing waits for this many first.
_WINDOWS_WORTH_TIMING = 40
_WINDOWS_BEFORE_TIMING = 10


class _Record(Callback):
    """Records plans as they change. It is apart from the lifecycle, since callbacks are called by what that owns.

    Attributes:
        plans: All plans so far, each with the step from which it is in force.
        entry: What is remembered of this job for its next run.
    """

    def __init__(self, entry: CacheEntry) -> None:
        self.plans: list[tuple[int, Plan]] = []
        self.entry = entry

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Record the plan, and what a search found for the next run."""
        self.plans.append((step, plan))
        write(Reason(RUNNING, plan.micro_batch))  # if the kernel kills this process, `autoaccum run` halves that
        if probe is not None:
            self.entry.keep(probe)

    def on_trial(self, trial: Trial) -> None:
        """Tell `autoaccum run` how large the next trial may be."""
        write(Reason(RUNNING, trial.size * 2 if trial.fits else trial.size))

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:  # noqa: ARG002 - as the base has it
        """Forget the remembered plan, which does not fit."""
        self.entry.forget()


class PlanLifecycle:
    """Makes the first runner, and a new one after more saves memory.

    Args:
        call: The call of `fit`.
        progress: Tracks the state of the loop; it advances with every optimizer step.

    Attributes:
        observers: All callbacks, the one that records the plans first.
        current: The current runner; set by `begin`.
        skipped_samples: Number of samples that did not fit alone and were left out.
    """

    current: WindowRunner

    def __init__(self, call: FitContext, progress: TrainingProgress) -> None:
        self._call, self._progress, self._notices, self._savings = call, progress, call.notices, call.savings
        self._step = step = call.step
        self._target_batch = target = call.world.target_batch
        self._asked = step.options.micro_batch
        deals = call.world.deals and call.grows_from is None  # so that windows may exceed this rank's share
        self._cap = call.cap if call.cap is None or call.cap < target or deals else None
        self._searches = self._asked == "auto" and call.grows_from is None
        # A loss over the whole window needs to know the whole cut beforehand.
        self._tries_before = self._searches and step.options.loss_scope == "window"
        self._is_uniform = are_compiled(step.objective.modules)
        self._record = _Record(CacheEntry(step.memory))
        self.observers = Observers((self._record, *call.callbacks), step.memory)
        self._earlier_oom_events = 0
        self._fastest: Plan | None = None  # once it has been recorded
        self.skipped_samples = 0
        self._left_out: tuple[Position | None, int] = (None, 0)  # samples, and where the loader stood then

    @property
    def has_begun(self) -> bool:
        """Whether there is a runner."""
        return "current" in vars(self)

    @property
    def plan(self) -> Plan:
        """The plan in force; before there is a runner, the one to begin with as far as it is known."""
        return self.current.sizing.plan if self.has_begun else self._first_plan()

    @property
    def plans(self) -> tuple[tuple[int, Plan], ...]:
        """All plans, each with the step from which it was in force."""
        return tuple(self._record.plans) or ((self._progress.state.windows + 1, self.plan),)

    @property
    def oom_events(self) -> int:
        """Number of times memory ran out, including earlier calls."""
        return self._earlier_oom_events + (self.current.events.oom_events if self.has_begun else 0)

    @property
    def most_asked(self) -> int | None:
        """The largest micro-batch that the user allows; None for no bound."""
        return min((most for most in (self._asked, self._cap) if isinstance(most, int)), default=None)

    @property
    def largest_size(self) -> int | None:
        """The largest size to grow to, if sizes grow by extrapolation from smaller ones; else None."""
        if self._call.grows_from is None or self._asked != "auto":
            return None
        return self._target_batch if self._cap is None else self._cap

    # --- the plan to begin with ---------------------------------------------------------------------------------------

    def find(self, first: Window) -> tuple[Cutting, ProbeResult | None]:
        """Return the initial cut, and the probe's result if there was a probe before training.

        Args:
            first: This process's part of the first window.

        Raises:
            DoesNotFitError: Not even one sample fits.
        """
        self._see(first.samples)
        if first.samples:
            self._look_up(first)
        self._begin_levels(self._record.entry.saves if self._searches and first.samples else None)
        probed = self._probe(first) if first.samples and self._tries_before else None
        return Cutting.of(self._first_plan(probed)), probed

    def resume(self, kept: Mapping[str, Any] | None) -> Cutting:
        """Return how windows are cut after a resume.

        Args:
            kept: What `kept` was in the run of the checkpoint; None if other processes wrote it.
        """
        state = self._progress.state
        self._see(round(state.samples / max(state.windows, 1)))
        has_chosen = self._begin_levels(None if kept is None else kept["memory"])
        if kept is None:
            return Cutting.of(self._first_plan())
        self._record.plans = [(since, Plan(sum(sizes), tuple(sizes))) for since, sizes in kept["plans"]]
        self._earlier_oom_events, self.skipped_samples = kept["oom_events"], kept["skipped_samples"]
        cutting = before = Cutting.of_state(kept)
        if self._asked not in ("auto", kept["asked"]):
            plan = self._first_plan()
            cutting = replace(cutting, plan=plan, largest_plan=plan)
        elif (
            self._asked != kept["asked"]
            or (self._savings.is_auto and not has_chosen)
            or (kept["cap"] or math.inf) < (self._cap or math.inf)
        ):
            # Not known is what fits beyond the number or the cap of the call before, or with what saves memory now.
            cutting = Cutting.of(self._first_plan())
        else:
            within = [self._within_cap(one) for one in (cutting.plan, cutting.largest_plan)]
            cutting = replace(cutting, plan=within[0], largest_plan=within[1])
        if cutting.plan != before.plan:
            self._note(cutting.plan)
        return cutting

    def _see(self, samples: int) -> None:
        """Take the samples of one window for those of each, where the target is in tokens."""
        if self._call.counts == TOKENS and samples:
            self._target_batch = samples

    def _largest_of(self, first: Window) -> Window:
        return (largest_first(first) if self._step.options.loss_scope == "micro_batch" else first).largest()

    def _look_up(self, first: Window) -> None:
        """Look up what an earlier run of the same job has found."""
        if not self._searches:
            return
        step, call, largest = self._step, self._call, self._largest_of(first)
        key = key_of(
            step.objective.modules,
            largest.cut(0, largest.samples),
            optimizer=step.optimizer,
            memory=step.memory,
            precision=step.precision.name,
            target_batch=call.world.target_batch,
            limit_bytes=call.limit_bytes,
            loss_scope=step.options.loss_scope,
            cap=self._cap,
            saves=call.saves,
            counts=call.counts,
        )
        if call.world.deals:  # more samples than this rank's share may fit
            key = replace(key, target_batch=None)
        self._record.entry = CacheEntry(step.memory, PlanCache(self._notices), key)

    def _probe(self, first: Window) -> ProbeResult:
        """Search before training, since the loss runs over a whole window."""

        def search() -> ProbeResult:
            entry = self._record.entry
            return probe(
                self._step,
                self._largest_of(first),
                first.samples if self._cap is None else min(first.samples, self._cap),
                self._call.limit_bytes,
                self.observers.on_trial,
                begins_with=None if entry.found is None else entry.found.micro_batch,
                frontier=entry.frontier,
            )

        found = self._savings.run(search, on_escalate=self._note_level)
        self._record.entry.keep(found)
        return found

    def _first_plan(self, probed: ProbeResult | None = None) -> Plan:
        """Return the initial plan; a single micro-batch per window if the first windows are to find a better plan."""
        target = self._target_batch
        found = (self._call.grows_from or target) if probed is None else probed.micro_batch
        most = self._asked if isinstance(self._asked, int) else found
        # Only whole windows are timed: on a shared machine, a single trial per size says little.
        return planned(target, min(most, target, self._cap or target), is_uniform=self._is_uniform)

    def _within_cap(self, earlier: Plan) -> Plan:
        return earlier if self._cap is None or earlier.micro_batch <= self._cap else self._first_plan()

    def _begin_levels(self, known: tuple[str, ...] | None) -> bool:
        """Begin with what saves memory in an earlier run; return whether that is the same here."""
        if not self._savings.is_auto:
            return False
        self._savings.begin(known)
        self._note_level()
        return self._savings.names == known

    def _note_level(self) -> None:
        self._record.entry.use(self._savings.names)

    # --- the runner ---------------------------------------------------------------------------------------------------

    def begin(self, cutting: Cutting) -> None:
        """Make the runner that cuts windows by `cutting`."""
        step, windows_done = self._step, self._progress.state.windows
        events = Events(step.memory, [self.observers], windows=windows_done)
        self.current = WindowRunner(
            step,
            Sizing(step.memory, lambda: step.parameters, cutting, self._wanted(cutting), events),
            events,
            self._notices,
            peers=self._call.world.peers,
            allocate_ahead=self._progress.prepare,
            step_made=self._progress.step_made,
            noise=self._call.noise,
        )

    def _wanted(self, cutting: Cutting) -> SizingOptions:
        """Return the options for choosing sizes from now on."""
        found, ahead = self._record.entry.found, self._progress.windows_ahead
        is_timed = cutting.is_timed or (found is not None and found.fastest is not None)
        times_after = None
        if self._searches and not self._is_uniform and not is_timed:
            if ahead is None:
                times_after = _WINDOWS_BEFORE_TIMING
            elif ahead >= _WINDOWS_WORTH_TIMING:
                times_after = 0
        fits = 0  # a size that may be used though it exceeds the plan's
        if (self._call.counts == TOKENS or self._call.world.deals) and isinstance(self._asked, int):
            fits = self._asked  # windows may hold other numbers of samples than the plan's
        elif found is not None and self._tries_before:
            fits = found.micro_batch
        return SizingOptions(
            is_uniform=self._is_uniform,
            by_width=self._searches,
            learns=not cutting.is_found and self._searches and not self._tries_before,
            times_after=times_after,
            fits=fits,
            most=self._cap,
            **self._record.entry.experience,
        )

    def tell_beginning(self, plan: Plan, probed: ProbeResult | None) -> None:
        """Notify callbacks of the initial plan, unless the first windows are to find a better one, or none comes."""
        if self.current.sizing.is_learning or (self._progress.is_over and self._record.plans):
            return
        known, since = list(self._record.plans), self._progress.state.windows + 1
        self.observers.on_plan(plan, step=since, probe=probed)
        self._record.plans = known or self._record.plans  # after a resume, the checkpoint's

    def step(self, part: Window) -> StepReport | None:
        """Make a window's optimizer step, saving more memory or leaving the sample out if not even one sample fits.

        Args:
            part: The window, or this process's part of it.

        Returns:
            The window's report; None if no process has any of its samples, or none is left.
        """
        report, rest = self._tried(part)
        while rest is not None:
            report, rest = self._tried(rest)
        return report

    def _tried(self, part: Window) -> tuple[StepReport | None, Window | None]:
        """Return the report of a window's optimizer step, or the window without a sample that is left out."""
        try:
            report = self._savings.run(
                lambda: self.current.step(part),
                on_escalate=self._begin_again,
                # Once the optimizer step is made, here or on other ranks, nothing can help.
                is_past_return=lambda: self.current.is_past_return,
            )
        except DoesNotFitError as error:
            rest = None if self.current.is_past_return else self._rest(error)
            if rest is None:
                raise
            _oom.clear_traceback_frames(error)
        else:
            self._note_fastest()
            return report, None
        # After the handler: inside it, the traceback still pins the activations.
        self._step.memory.release()
        return None, rest if rest.samples else None

    def _begin_again(self) -> None:
        """Search for sizes anew, since other ones fit where more saves memory."""
        self._note_level()
        self._earlier_oom_events += self.current.events.oom_events
        plan = self._first_plan()
        self.begin(Cutting(plan, plan, is_timed=self.current.sizing.cutting.is_timed))

    def _rest(self, error: DoesNotFitError) -> Window | None:
        """Return a window without the sample that does not fit alone; None if that is not to be left out.

        It is not where nothing was trained yet and nothing would be left: then nothing may ever fit.
        """
        if error.where is None or self._step.options.on_too_large != "skip":
            return None
        window, place = error.where
        spans = (*window.part(0, place).spans, *window.part(place + 1, window.samples).spans)
        if not spans and not self._progress.state.windows:
            return None
        self.skipped_samples += 1
        self._left_out = (self._progress.state.position, self._left_out_now + 1)
        sample = sample_of(window, place)
        self._notices.say(f"{sample} does not fit and is left out (on_too_large='skip')", key=f"too large {sample}")
        rest = Window.of_spans(spans, window.split, window.used)
        if window.places is not None or len(window.groups()) > 1:  # else all are alike
            places = range(window.samples) if window.places is None else window.places
            rest.places = [*places[:place], *places[place + 1 :]]
        return rest

    @property
    def _left_out_now(self) -> int:
        """How many samples are left out of the window that has begun."""
        position, number = self._left_out
        return number if position is self._progress.state.position else 0

    def _note_fastest(self) -> None:
        """Record the plan that autotuning has chosen, once."""
        fastest = self.current.sizing.clock.fastest
        if fastest is not None and fastest is not self._fastest:
            self._fastest = fastest
            self._record.entry.keep(fastest=fastest)
            self._notices.say(f"micro-batches of {fastest.micro_batch} samples are fastest by the clock")

    @property
    def kept(self) -> dict[str, Any]:
        """The present cut and all plans, as a checkpoint stores them."""
        return {
            **self.current.sizing.cutting.state(),
            "plans": [[since, list(plan.micro_batches)] for since, plan in self._record.plans],
            "asked": self._asked,
            "oom_events": self.oom_events,
            "skipped_samples": self.skipped_samples - self._left_out_now,  # which a resume tries again
            "memory": self._savings.names if self._savings.is_auto else None,
            "cap": self._cap,
        }

    def _note(self, plan: Plan) -> None:
        """Record a plan that takes effect with the next window."""
        self._record.plans.append((self._progress.state.windows + 1, plan))
