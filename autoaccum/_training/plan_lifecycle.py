"""Makes the runner of one call of `fit`, and rebuilds it after more saves memory, a resume or a rollback."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoaccum import _oom
from autoaccum._callbacks import Callback
from autoaccum._data.batches import Window
from autoaccum._engine.does_not_fit import sample_of
from autoaccum._engine.events import Events
from autoaccum._engine.runner import WindowRunner
from autoaccum._engine.savings import AVOIDABLE
from autoaccum._sizing.sizing import Cutting, Sizing
from autoaccum._system.reason_file import RUNNING, Reason, write
from autoaccum._training.checkpoint_contents import Kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.noise_scale import NoiseScale
    from autoaccum._engine.savings import Savings
    from autoaccum._records import MemoryEvent, Plan, ProbeResult, StepReport, Trial
    from autoaccum._sizing.frontier import Widths
    from autoaccum._system.notices import Notices
    from autoaccum._training.first_plan import Finding
    from autoaccum._training.progress import TrainingProgress
    from autoaccum._training.rank_coordination import Coordinator


class _Noting(Callback):
    """Records plans as they change. It is a callback of its own, apart from the lifecycle, which owns and calls it.

    Args:
        finding: Keeps plans for the next run.

    Attributes:
        plans: All plans so far, each with the step from which it is in force.
    """

    def __init__(self, finding: Finding) -> None:
        self.plans: list[tuple[int, Plan]] = []
        self._finding = finding

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Record the plan, and what a probe found for the next run."""
        self.plans.append((step, plan))
        write(Reason(RUNNING, plan.micro_batch))  # if the kernel kills this process, `autoaccum run` halves that
        if probe is not None:
            self._finding.keep(probe)

    def on_trial(self, trial: Trial) -> None:
        """Tell `autoaccum run` how large the next trial may be."""
        write(Reason(RUNNING, trial.size * 2 if trial.fits else trial.size))

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:  # noqa: ARG002 - as the base has it
        """Delete the cached plan, which does not fit."""
        self._finding.forget()


class PlanLifecycle:
    """Makes the first runner, and a new one after more saves memory or when training goes back to an earlier moment.

    Args:
        step: The training step.
        progress: Tracks the moment; it advances with every update.
        callbacks: Callbacks to notify.
        notices: Reports choices made for the user.
        finding: Finds the plan by which to cut windows.
        savings: Saves memory in steps.
        world: The processes of this training.
        noise: The gradient noise scale to measure; None without `noise_scale`.

    Attributes:
        callbacks: All callbacks, the one that records the plans first.
        current: The current runner; set by `begin`.
        skipped_samples: Number of samples that did not fit alone and were left out.
    """

    current: WindowRunner

    def __init__(
        self,
        step: TrainingStep,
        progress: TrainingProgress,
        callbacks: Sequence[Callback],
        notices: Notices,
        *,
        finding: Finding,
        savings: Savings,
        world: Coordinator,
        noise: NoiseScale | None,
    ) -> None:
        self._noise = noise
        self._noting = _Noting(finding)
        self.callbacks: tuple[Callback, ...] = (self._noting, *callbacks)
        self._step = step
        self._progress = progress
        self._notices = notices
        self._finding = finding
        self._savings = savings
        self._world = world
        self._earlier_oom_events = 0
        self._fastest: Plan | None = None  # once it has been recorded
        self.skipped_samples = 0
        self._resumed_widths: Widths | None = None  # of the checkpoint's samples, if all of them had the same

    @property
    def has_begun(self) -> bool:
        """Whether there is a runner."""
        return "current" in vars(self)

    @property
    def plan(self) -> Plan:
        """The plan in force; before there is a runner, the one to begin with as far as it is known."""
        return self.current.sizing.plan if self.has_begun else self._finding.plan()

    @property
    def plans(self) -> tuple[tuple[int, Plan], ...]:
        """All plans, each with the step from which it was in force."""
        return tuple(self._noting.plans) or ((self._progress.moment.windows + 1, self.plan),)

    @property
    def oom_events(self) -> int:
        """Number of times memory ran out, including earlier calls."""
        return self._earlier_oom_events + (self.current.oom_events if self.has_begun else 0)

    # --- the plan to begin with ---------------------------------------------------------------------------------------

    def save_memory(self) -> None:
        """Activate what saves memory from the start."""
        self._savings.apply()

    def find(self, first: Window) -> tuple[Cutting, ProbeResult | None]:
        """Return the initial cut, and the probe's result if there was a probe before training.

        Args:
            first: This process's part of the first window.

        Raises:
            DoesNotFitError: Not even one sample fits.
        """
        self._finding.see(first.samples)
        known = self._finding.look_up(first) if first.samples else None
        self._begin_rungs(known)
        probed = self._probe(first) if first.samples else None
        plan = self._finding.plan(probed)
        return Cutting.of(plan), probed

    def take_up(self, kept: Kept | None) -> Cutting:
        """Return how windows are cut after a resume.

        Args:
            kept: The cut and plans stored in the checkpoint; None if other processes wrote it.
        """
        moment = self._progress.moment
        self._finding.see(round(moment.samples / max(moment.windows, 1)))
        chosen = None if kept is None else kept.memory
        has_chosen = self._begin_rungs(chosen)
        if kept is None:
            return Cutting.of(self._finding.plan())
        self._noting.plans, self._earlier_oom_events = list(kept.plans), kept.oom_events
        self.skipped_samples = kept.skipped_samples
        widths = set() if kept.cutting.frontier is None else kept.cutting.frontier.widths
        self._resumed_widths = widths.pop() if len(widths) == 1 else None
        if self._finding.asked not in ("auto", kept.asked):
            plan = self._noted(self._finding.plan())
            return replace(kept.cutting, plan=plan, grows_to=plan)
        if self._savings.is_auto and not has_chosen:  # what was saved by is not known, and with it what fits
            return Cutting.of(self._noted(self._finding.plan()))
        plan = self._finding.within_cap(kept.cutting.plan)
        if plan != kept.cutting.plan:
            self._noted(plan)
        return replace(kept.cutting, plan=plan, grows_to=self._finding.within_cap(kept.cutting.grows_to))

    def _begin_rungs(self, known: tuple[str, ...] | None) -> bool:
        """Begin with what saves memory in an earlier run; return whether that is the same here."""
        if not self._savings.is_auto:
            return False
        self._savings.begin(known)
        self._use_rung()
        return self._savings.names == known

    def _use_rung(self) -> None:
        self._savings.remove()
        self._savings.apply()
        self._finding.begin_rung(self._savings.names)

    def begin(self, cutting: Cutting) -> None:
        """Make the runner that cuts windows by `cutting`."""
        step, windows_done = self._step, self._progress.moment.windows
        wanted = self._finding.wanted(self._progress.windows_ahead, cutting)
        events = Events(self.callbacks, windows=windows_done)
        self.current = WindowRunner(
            step,
            Sizing(step.memory, lambda: step.parameters, cutting, wanted, events),
            events,
            self._notices,
            peers=self._world.peers,
            prepare=self._progress.prepare,
            update_made=self._progress.update_made,
            noise=self._noise,
        )

    def tell_beginning(self, plan: Plan, probed: ProbeResult | None) -> None:
        """Notify callbacks of the initial plan, unless the first windows are to find a better one."""
        if self.current.sizing.is_learning:
            return
        for callback in self.callbacks[1:] if self._noting.plans else self.callbacks:
            callback.on_plan(plan, step=self._progress.moment.windows + 1, probe=probed)

    def _probe(self, first: Window) -> ProbeResult | None:
        try:
            return self._finding.begin(first, self._tell_trial)
        except AVOIDABLE as error:
            if not self._climbs(error):
                raise
            _oom.let_go(error)
        return self._probe(first)

    def _tell_trial(self, trial: Trial) -> None:
        for callback in self.callbacks:
            callback.on_trial(trial)

    # --- windows ------------------------------------------------------------------------------------------------------

    def step(self, part: Window) -> StepReport | None:
        """Make the update of a window, saving more memory or leaving the sample out if not even one sample fits.

        Args:
            part: The window, or this process's part of it.

        Returns:
            The window's report; None if no process has any of its samples, or none is left.
        """
        rest: Window | None = None
        if self._resumed_widths is not None and part.samples:
            self._compare_widths(part)
        try:
            report = self.current.step(part)
        except AVOIDABLE as error:
            # Once the update is made, here or on other ranks, nothing can help.
            if self.current.is_past_return:
                raise
            if not self._climbs(error):
                rest = self._rest(error)
                if rest is None:
                    raise
            _oom.let_go(error)
        else:
            self._note_fastest()
            return report
        if rest is not None:
            self._step.memory.release()
            return self.step(rest) if rest.samples else None
        # After the handler: inside it, the traceback still pins the activations.
        self._step.memory.release()
        self._begin_with(self._finding.plan())
        return self.step(part)

    def _compare_widths(self, first: Window) -> None:
        """Search for sizes anew, and say so, if samples have another size than those of the checkpoint."""
        before, self._resumed_widths = self._resumed_widths, None
        found = {widths for runs in first.widths() for _, widths in runs}
        if before in found or before is None:
            return
        self._notices.say(
            f"samples have {sum(max(found, key=sum)):,} elements now, and had {sum(before):,} when the checkpoint was "
            "written; micro-batch sizes are searched for anew"
        )
        self._begin_with(self._finding.plan())

    def _begin_with(self, plan: Plan) -> None:
        self._earlier_oom_events += self.current.oom_events
        self.begin(Cutting(plan, plan, is_timed=self.current.sizing.cutting.is_timed))

    def _rest(self, error: Exception) -> Window | None:
        """Return a window without the sample that does not fit alone; None if that is not to be left out.

        It is not where nothing was trained yet and nothing would be left: then nothing may ever fit.
        """
        where = getattr(error, "where", None)
        if where is None or self._step.options.on_too_large != "skip":
            return None
        window, place = where
        spans = (*window.part(0, place).spans, *window.part(place + 1, window.samples).spans)
        if not spans and not self._progress.moment.windows:
            return None
        self.skipped_samples += 1
        sample = sample_of(window, place)
        self._notices.say(f"{sample} does not fit and is left out (on_too_large='skip')", key=f"too large {sample}")
        return Window.of_spans(spans, window.split, window.used)

    def _note_fastest(self) -> None:
        """Record the plan that autotuning has chosen, once."""
        fastest = self.current.sizing.fastest
        if fastest is not None and fastest is not self._fastest:
            self._fastest = fastest
            self._finding.keep(fastest=fastest)
            self._notices.say(f"micro-batches of {fastest.micro_batch} samples are fastest by the clock")

    @property
    def kept(self) -> Kept:
        """The present cut and all plans, as a checkpoint stores them."""
        chosen = self._savings.names if self._savings.is_auto else None
        return Kept(
            self.current.sizing.cutting,
            tuple(self._noting.plans),
            self._finding.asked,
            self.oom_events,
            self.skipped_samples,
            chosen,
        )

    @property
    def memory(self) -> tuple[str, ...]:
        """What saves memory, by names of `memory`."""
        return self._savings.names

    def begin_anew(self) -> None:
        """Make a new runner with the present cut, after training has gone back to an earlier moment."""
        former = self.current.sizing.cutting
        self._earlier_oom_events += self.current.oom_events
        next_step = self._progress.moment.windows + 1
        self._noting.plans = [(since, earlier) for since, earlier in self._noting.plans if since <= next_step]
        if not self._noting.plans or self._noting.plans[-1][1] != former.plan:
            self._noted(former.plan)
        self.begin(former)

    def end(self) -> None:
        """Give the model back as the user wrote it."""
        self._savings.remove()

    def _climbs(self, error: Exception) -> bool:
        """Save memory in another way, if one may avoid an error; return whether there was one."""
        if not self._savings.climb(error):
            return False
        self._use_rung()
        return True

    # --- records of plans ---------------------------------------------------------------------------------------------

    def _noted(self, plan: Plan) -> Plan:
        """Record a plan that takes effect with the next window, and return it."""
        self._noting.plans.append((self._progress.moment.windows + 1, plan))
        return plan
