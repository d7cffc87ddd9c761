"""The runners of one call of `fit`, one after the other: what is known of sizes in, a runner that cuts by it out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum import _oom
from autoaccum._callbacks import Callback
from autoaccum._engine.runner import Runner
from autoaccum._training.checkpoint_contents import Cutting
from autoaccum.errors import DoesNotFitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.batches import Window
    from autoaccum._engine.compiling import Compiling
    from autoaccum._engine.fallback import Fallbacks
    from autoaccum._engine.step import TrainingStep
    from autoaccum._records import MemoryEvent, Plan, ProbeResult, StepReport, Trial
    from autoaccum._system.notices import Notices
    from autoaccum._training.finding import Finding
    from autoaccum._training.progress import Course
    from autoaccum._training.rank_coordination import Company


class _Noting(Callback):
    """Notes what becomes of plans: a callback apart from the runners, which hold it and whose runners call it.

    Args:
        finding: Keeps what was found for the next run.
        compiling: Compiles the model when sizes are known; None where that is not asked for.
        notices: Where choices made for the user are said.

    Attributes:
        plans: Every plan so far, each with the step from which on it holds.
    """

    def __init__(self, finding: Finding, compiling: Compiling | None, notices: Notices) -> None:
        self.plans: list[tuple[int, Plan]] = []
        self._finding = finding
        self._compiling = compiling
        self._notices = notices

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Note the plan."""
        self.plans.append((step, plan))
        if probe is not None:
            self._finding.note(probe)
            self.compile()

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:  # noqa: ARG002 - as the base has it
        """Forget a plan that does not hold."""
        self._finding.forget()

    def note_fastest(self, fastest: Plan) -> None:
        """Note the plan that the clock has chosen."""
        self._finding.note_fastest(fastest)
        self._notices.say(f"micro-batches of {fastest.micro_batch} samples are fastest by the clock")

    def compile(self) -> None:
        """Compile the model, now that the sizes are known."""
        if self._compiling is not None:
            self._compiling.begin()


class Runners:
    """Makes a runner to begin with, and another where a step is to take less memory, or training goes back.

    Args:
        step: The training step.
        course: Where training stands; it moves with every update.
        callbacks: Told what happens.
        notices: Where choices made for the user are said.
        finding: Finds how windows are to be cut.
        fallbacks: Make a step take less memory where not even one sample fits.
        compiling: Compiles the model when sizes are known; None where that is not asked for.
        company: The other processes of this training; None where this is the only one.
        loss_scope: As for `fit`.
        batchnorm: As for `fit`.

    Attributes:
        callbacks: All that are told, first the one that notes the plans.
        current: The runner in force, from `begin` on.
    """

    current: Runner

    def __init__(
        self,
        step: TrainingStep,
        course: Course,
        callbacks: Sequence[Callback],
        notices: Notices,
        *,
        finding: Finding,
        fallbacks: Fallbacks,
        compiling: Compiling | None,
        company: Company | None,
        loss_scope: str,
        batchnorm: str,
    ) -> None:
        self._noting = _Noting(finding, compiling, notices)
        self.callbacks: tuple[Callback, ...] = (self._noting, *callbacks)
        self._step = step
        self._course = course
        self._notices = notices
        self._finding = finding
        self._fallbacks = fallbacks
        self._compiling = compiling
        self._company = company
        self._loss_scope = loss_scope
        self._batchnorm = batchnorm
        self._largest: Plan | None = None  # to grow back to, where a runner begins with a smaller plan
        # Whether an earlier runner has found how windows are to be cut.
        self._is_found = self._is_timed = False
        self._bytes_per_sample: int | None = None
        self._sample_bytes: int | None = None
        self._earlier_oom_events = 0

    @property
    def plans(self) -> tuple[tuple[int, Plan], ...]:
        """Every plan, each with the step from which on it held."""
        return tuple(self._noting.plans) or ((self._course.moment.windows + 1, self.current.plan),)

    @property
    def oom_events(self) -> int:
        """How often memory has run out, in earlier calls too."""
        return self._earlier_oom_events + self.current.oom_events

    # --- the plan to begin with ---------------------------------------------------------------------------------------

    def find(self, first: Window) -> tuple[Plan, ProbeResult | None]:
        """Return the plan to begin with, and by what it was found where that was done beforehand.

        Args:
            first: This process's part of the first window.

        Raises:
            DoesNotFitError: Not even one sample fits.
        """
        probed = self._probe(first) if first.samples else None
        if self._company is not None:
            self._company.tell_plans(None if probed is None else self._finding.plan(probed))
        self._bytes_per_sample = None if probed is None else probed.bytes_per_sample
        return self._finding.plan(probed), probed

    def take_up(self, cutting: Cutting | None) -> Plan:
        """Return the plan to go on with.

        Args:
            cutting: How windows were cut in an earlier call; None where other processes cut them.
        """
        if cutting is None:
            return self._finding.plan()
        self._noting.plans, self._earlier_oom_events = list(cutting.plans), cutting.oom_events
        self._bytes_per_sample, self._sample_bytes = cutting.bytes_per_sample, cutting.sample_bytes
        self._is_found, self._is_timed = cutting.is_found, cutting.is_timed
        if self._finding.asked not in ("auto", cutting.asked):
            return self._noted(self._finding.plan())
        self._largest = self._finding.within_cap(cutting.largest)
        plan = self._finding.within_cap(cutting.plan)
        return plan if plan == cutting.plan else self._noted(plan)

    def begin(self, plan: Plan) -> None:
        """Make a runner that begins with a plan."""
        self.current = Runner.of(
            self._step,
            self._largest or plan,
            callbacks=self.callbacks,
            notices=self._notices,
            loss_scope=self._loss_scope,
            batchnorm=self._batchnorm,
            wanted=self._finding.wanted(self._course.windows_ahead, is_found=self._is_found, is_timed=self._is_timed),
            bytes_per_sample=self._bytes_per_sample,
            sample_bytes=self._sample_bytes,
            before_update=self._course.before_update,
            after_update=self._course.after_update,
            on_settled=self._noting.note_fastest,
            windows_done=self._course.moment.windows,
            joint=None if self._company is None else self._company.joint,
        )
        self.current.shrink_to(plan)

    def tell_beginning(self, plan: Plan, probed: ProbeResult | None) -> None:
        """Tell of the plan that training begins with, unless the first windows are to find a better one."""
        if self.current.is_learning:
            return
        self._noting.compile()
        for callback in self.callbacks[1:] if self._noting.plans else self.callbacks:
            callback.on_plan(plan, step=self._course.moment.windows + 1, probe=probed)

    def _probe(self, first: Window) -> ProbeResult | None:
        try:
            return self._finding.begin(first, self._tell_trial)
        except DoesNotFitError as error:
            if not self._falls_back(error):
                raise
            _oom.let_go(error)
        return self._probe(first)

    def _tell_trial(self, trial: Trial) -> None:
        for callback in self.callbacks:
            callback.on_trial(trial)

    # --- windows ------------------------------------------------------------------------------------------------------

    def step(self, part: Window) -> StepReport | None:
        """Make the update of a window, with less memory for a step where not even one sample fits.

        Args:
            part: The window, or this process's part of it.

        Returns:
            What was done; None where no process has a sample of it.
        """
        try:
            return self.current.step(part) if self._company is None else self.current.step_with_others(part)
        except DoesNotFitError as error:
            # Of an update that is made, here or by the others, there is nothing left to try with less memory.
            if self.current.is_past_return or not self._falls_back(error):
                raise
            _oom.let_go(error)
        # After the handler: inside it the traceback still pins the activations.
        self._step.memory.release()
        self._earlier_oom_events += self.current.oom_events
        self._is_found, self._bytes_per_sample, self._largest = False, None, None
        self.begin(self._finding.plan())
        return self.step(part)

    def cutting(self) -> Cutting:
        """Return how windows are cut now, for a checkpoint."""
        return Cutting(
            self.current.plan,
            self.current.set_plan,
            tuple(self._noting.plans),
            self._finding.asked,
            self.current.bytes_per_sample,
            self.oom_events,
            self.current.sample_bytes,
            not self.current.is_learning,
            self.current.is_timed,
        )

    def begin_anew(self) -> None:
        """Make another runner that cuts as the present one does, where training has gone back to an earlier moment."""
        former = self.current
        self._earlier_oom_events += former.oom_events
        self._largest = former.set_plan
        self._is_found, self._is_timed = not former.is_learning, former.is_timed
        self._bytes_per_sample, self._sample_bytes = former.bytes_per_sample, former.sample_bytes
        next_step = self._course.moment.windows + 1
        self._noting.plans = [(since, earlier) for since, earlier in self._noting.plans if since <= next_step]
        if not self._noting.plans or self._noting.plans[-1][1] != former.plan:
            self._noted(former.plan)
        self.begin(former.plan)

    def end(self) -> None:
        """Give the model back as it was written."""
        if self._compiling is not None:
            self._compiling.end()
        self._fallbacks.end()

    def _falls_back(self, error: DoesNotFitError) -> bool:
        """Make a step take less memory; return whether there was a way left."""
        in_force = tuple(self._fallbacks.ways)
        has_fallen_back = self._fallbacks.next()
        if self._fallbacks.found_no_blocks:
            self._notices.say("the model has no repeated blocks to checkpoint (fallback='checkpoint')")
        if has_fallen_back:
            self._notices.say(f"not even one sample fits; from now on {self._fallbacks.ways[-1]} (fallback=)")
            self._finding.begin_anew()
        elif in_force:
            error.add_note(f"autoaccum: in force already: {'; '.join(in_force)}")
        return has_fallen_back

    # --- what is noted ------------------------------------------------------------------------------------------------

    def _noted(self, plan: Plan) -> Plan:
        """Note a plan that holds from the next window on, and return it."""
        self._noting.plans.append((self._course.moment.windows + 1, plan))
        return plan
