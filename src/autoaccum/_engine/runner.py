"""One window in, exactly one optimizer update out; or an error, with everything as it was before the window.

Once the optimizer has stepped there is no way back: what fails then is raised as `UpdateCompleteError`, and the window
is not made again.

The cut may change under way when memory runs out; the gradient does not. Nothing is copied for this but buffers and
random state (and the optimizer's, once, before its first step), and nothing waits for the device that a hand-written
loop would not wait for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoaccum import _oom
from autoaccum._arguments import check_iterable, shown
from autoaccum._callbacks import check_callbacks
from autoaccum._data.batches import as_window
from autoaccum._engine import afterwards, devices, optimizers
from autoaccum._engine.accumulator import Accumulation
from autoaccum._engine.attempt import Again, Attempts, Made, left_behind, refuse_to_try_for_ever
from autoaccum._engine.batchnorm import BatchNorms, check_batchnorm
from autoaccum._engine.evaluation import Evaluator
from autoaccum._engine.probing import does_not_fit_text
from autoaccum._engine.step import assemble, drop_old_gradients
from autoaccum._engine.window_loss import check_loss_scope
from autoaccum._records import DeviceScalar, MemoryEvent, Plan, StepReport
from autoaccum._sizing.controller import Sizing, Told, Wanted
from autoaccum._sizing.headroom import Room
from autoaccum._snapshot import RandomState
from autoaccum._system.notices import Notices
from autoaccum.errors import DoesNotFitError, InvalidInputError, UpdateCompleteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import nn

    from autoaccum._callbacks import Callback
    from autoaccum._data.batches import Window
    from autoaccum._distributed.data_parallel import Joint
    from autoaccum._engine.optimizer_step import Update
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._engine.step import TrainingStep
    from autoaccum._loss.objective import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import ProbeResult, Trial


# What can be set on a runner; everything else would be ignored in silence.
_SETTABLE = ("plan", "optimizer")


@dataclass(slots=True)
class _Standing:
    """Where a runner stands: what it and what tells of it both know, so that neither has to hold the other.

    Attributes:
        windows: Windows done.
        oom_events: How often memory has run out.
        last_cut: Sizes of the last window's micro-batches.
        says_changes: Whether the user is told of lack of memory here: `fit` has its progress do that.
    """

    windows: int
    oom_events: int = 0
    last_cut: tuple[int, ...] = ()
    says_changes: bool = False


class _Telling(Told):
    """Passes on what a runner's sizing tells.

    Args:
        standing: Where the runner stands.
        callbacks: Told of trials and plans.
        notices: Where changes are said.
        room: Forgets what it has seen with another plan.
        on_settled: As for `Runner.of`.
    """

    def __init__(
        self,
        standing: _Standing,
        callbacks: Sequence[Callback],
        notices: Notices,
        room: Room,
        on_settled: Callable[[Plan], None],
    ) -> None:
        self._standing = standing
        self._callbacks = callbacks
        self._notices = notices
        self._room = room
        self._on_settled = on_settled

    def trial(self, trial: Trial) -> None:
        for callback in self._callbacks:
            callback.on_trial(trial)

    def planned(self, plan: Plan, probe: ProbeResult | None) -> None:
        done = self._standing.windows
        self._room.begin_anew()
        self.say(f"at most {plan.micro_batch} samples at once after step {done}")
        # What was learned has its proof in the window that is just done.
        since = done if probe is not None and plan.micro_batches == self._standing.last_cut else done + 1
        for callback in self._callbacks:
            callback.on_plan(plan, step=since, probe=probe)

    def settled(self, plan: Plan) -> None:
        self._on_settled(plan)

    def say(self, text: str) -> None:
        """Say what has changed, unless others do."""
        if self._standing.says_changes:
            self._notices.say(text, key=f"{text} {self._standing.oom_events}")


class Runner:
    """Trains window by window, for a loop of one's own.

        runner = autoaccum.Runner(model, optimizer, autoaccum.plan(100, 37), loss=loss)
        for window in autoaccum.windows(loader, 100):
            report = runner.step(window)

    Args:
        model: The model; it is moved to the device and stays there. Submodules keep their modes.
        optimizer: As for `fit`.
        plan: How a window is cut; it shrinks when memory runs out.
        loss: As for `fit`.
        device: As for `fit`.
        precision: As for `fit`.
        clip_grad_norm: As for `fit`.
        forward: As for `fit`.
        loss_reduction: As for `fit`.
        loss_scope: As for `fit`.
        batchnorm: As for `fit`.
        callbacks: Told when memory runs out and when the plan changes.
        notices: Where choices made for the user are said; None says them on stderr.

    Between two windows the model may change: which parameters there are, and which of them need a gradient, is looked
    at as each window begins. Its update is made from its own gradients: those that others have left in `.grad` before
    it (a backward pass of your own, another Runner whose loss goes through this one's model) are dropped, which is said
    once. Of the arguments, only `plan` and `optimizer` can be set afterwards.

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: The model itself does not fit on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | MakesOptimizer | None,
        plan: Plan,
        *,
        loss: Loss | Sequence[Loss] | None = None,
        device: str | torch.device | MemoryBackend | None = None,
        precision: str = "auto",
        clip_grad_norm: float | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        loss_reduction: str | None = None,
        loss_scope: str = "micro_batch",
        batchnorm: str = "keep",
        callbacks: Sequence[Callback] = (),
        notices: Notices | None = None,
    ) -> None:
        _check_plan(plan)
        check_callbacks(callbacks)
        check_loss_scope(loss_scope)
        check_batchnorm(batchnorm)
        if notices is not None and not isinstance(notices, Notices):
            raise InvalidInputError(
                f"notices={shown(notices)} must be autoaccum._system.notices.Notices, or None for stderr"
            )
        notices = notices or Notices()
        step = assemble(
            model,
            loss,
            optimizer,
            memory=devices.resolve(device, model, notices),
            precision_name=precision,
            forward=forward,
            loss_reduction=loss_reduction,
            clip_grad_norm=clip_grad_norm,
            notices=notices,
        )
        self._begin(step, plan, callbacks, notices, loss_scope=loss_scope, batchnorm=batchnorm)
        self._standing.says_changes = True

    def __setattr__(self, name: str, value: object) -> None:
        """Set `plan` or `optimizer`.

        Raises:
            InvalidInputError: It is something else, which would be ignored.
        """
        if not name.startswith("_") and name not in _SETTABLE:
            raise InvalidInputError(
                f"runner.{name} cannot be set, only {' and '.join(_SETTABLE)} can; make another Runner with what it is "
                "to be"
            )
        super().__setattr__(name, value)

    @classmethod
    def of(
        cls,
        step: TrainingStep,
        plan: Plan,
        *,
        callbacks: Sequence[Callback],
        notices: Notices,
        loss_scope: str = "micro_batch",
        batchnorm: str = "keep",
        wanted: Wanted = Wanted(),  # noqa: B008 - frozen
        bytes_per_sample: int | None = None,
        sample_bytes: int | None = None,
        before_update: Callable[[], None] = lambda: None,
        after_update: Callable[[bool], None] = lambda _: None,
        on_settled: Callable[[Plan], None] = lambda _: None,
        windows_done: int = 0,
        joint: Joint | None = None,
    ) -> Runner:
        """Make a runner of a training step that is put together already.

        Args:
            step: The training step.
            plan: How a window is cut.
            callbacks: As for the class.
            notices: As for the class.
            loss_scope: As for the class.
            batchnorm: As for the class.
            wanted: What is asked of the cut beyond the plan.
            bytes_per_sample: What a sample takes while it is worked on, where a probe has found it: then memory is
                asked for before each micro-batch on devices that cannot fail cleanly.
            sample_bytes: The size of the samples in which the plan counts, where an earlier call has found it.
            before_update: Called when all but the optimizer's step is done: what takes memory to be moved with an
                update gets it here, where a failure can still be taken back. It may be called again for one window.
            after_update: Called with whether the scaler skipped it as soon as an update is made, before an interrupt
                that waited for it is let through: what has to move with every update moves here.
            on_settled: Called with the plan that the clock has chosen.
            windows_done: Windows done before, where training goes on from a checkpoint.
            joint: Through which windows are made together with other processes; None where this is the only one.
        """
        runner = cls.__new__(cls)
        runner._begin(
            step,
            plan,
            callbacks,
            notices,
            loss_scope=loss_scope,
            batchnorm=batchnorm,
            wanted=wanted,
            bytes_per_sample=bytes_per_sample,
            sample_bytes=sample_bytes,
            before_update=before_update,
            after_update=after_update,
            on_settled=on_settled,
            windows_done=windows_done,
            joint=joint,
        )
        return runner

    def _begin(
        self,
        step: TrainingStep,
        plan: Plan,
        callbacks: Sequence[Callback],
        notices: Notices,
        *,
        loss_scope: str,
        batchnorm: str,
        wanted: Wanted = Wanted(),  # noqa: B008 - frozen
        bytes_per_sample: int | None = None,
        sample_bytes: int | None = None,
        before_update: Callable[[], None] = lambda: None,
        after_update: Callable[[bool], None] = lambda _: None,
        on_settled: Callable[[Plan], None] = lambda _: None,
        windows_done: int = 0,
        joint: Joint | None = None,
    ) -> None:
        self._step = step
        self._memory = step.memory
        self._callbacks = tuple(callbacks)
        self._notices = notices
        self._loss_scope = loss_scope
        self._after_update = after_update
        self._standing = _Standing(windows_done)
        self._room = Room(step.memory)
        self._telling = _Telling(self._standing, self._callbacks, notices, self._room, on_settled)
        self._norms = BatchNorms(step.objective.modules, batchnorm, notices)
        self._sizing = Sizing(
            step.memory,
            lambda: step.parameters,
            plan,
            wanted,
            bytes_per_sample=bytes_per_sample,
            sample_bytes=sample_bytes,
            told=self._telling,
        )
        self._joint = joint
        if joint is not None:
            joint.sizing = self._sizing
        is_part = joint is not None
        sending = None if joint is None else joint.overlap
        self._accumulation = Accumulation(
            step, self._sizing, loss_scope=loss_scope, norms=self._norms, is_part=is_part, sending=sending
        )
        self._evaluator: Evaluator | None = None
        self._made_before = step.updates.made
        self._coming = windows_done + 1
        self._has_moved = True
        self._has_lost_parameters = self._has_shrunk = self._is_at_work = False
        self._attempts = Attempts(
            step, self._accumulation, self._sizing, self._room, joint, before_update, begins=windows_done == 0
        )
        drop_old_gradients(step, notices)
        self._room.begin_anew()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, also where it was made here. Between two windows another one can be set, or what makes one."""
        return self._step.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer | MakesOptimizer) -> None:
        if optimizer is None or self._is_at_work:
            why = "within a window" if self._is_at_work else "to None"
            raise InvalidInputError(f"runner.optimizer cannot be set {why}; set an optimizer between two windows")
        self._step.use(optimizers.resolve(optimizer, self._step.objective.modules, self._notices))

    @property
    def oom_events(self) -> int:
        """How often memory has run out so far."""
        return self._standing.oom_events

    @property
    def has_lost_parameters(self) -> bool:
        """Whether a window that was given up has left parameters changed, which its error tells."""
        return self._has_lost_parameters

    @property
    def plan(self) -> Plan:
        """The plan in force; it shrinks when memory runs out, and grows back, at most to the one that was set."""
        return self._sizing.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        _check_plan(plan)
        self._sizing.set(plan)

    @property
    def set_plan(self) -> Plan:
        """The plan that was set or found, to which sizes grow back."""
        return self._sizing.set_plan

    @property
    def is_learning(self) -> bool:
        """Whether the present windows are trials."""
        return self._sizing.is_learning

    @property
    def bytes_per_sample(self) -> int | None:
        """What a sample takes while it is worked on, where that is known."""
        return self._sizing.bytes_per_sample

    @property
    def sample_bytes(self) -> int | None:
        """The size of the samples in which the plan counts; None where all count the same."""
        return self._sizing.sample_bytes

    @property
    def is_timed(self) -> bool:
        """Whether nothing about the cut is left to the clock."""
        return self._sizing.is_timed

    @property
    def windows_done(self) -> int:
        """Windows that have become an update so far, those before this runner included."""
        return self._standing.windows

    @property
    def is_past_return(self) -> bool:
        """Whether the update of the window that was begun last is made, here or by other processes."""
        return self._step.updates.made != self._made_before or self._attempts.is_decided

    def shrink_to(self, plan: Plan) -> None:
        """Begin with a plan that an earlier run had come to by failures; the one that was set stays to be reached."""
        self._sizing.shrink_to(plan)

    def step(self, window: Any) -> StepReport:
        """Make one update from one window.

        Args:
            window: One batch, or a sequence of the loader's batches (what `autoaccum.windows` yields, a `Window`,
                a list of batches). It need not have the plan's number of samples.

        Returns:
            What was done; `report.loss` waits for the device when it is read.

        Raises:
            InvalidInputError: The window or what the loss returns cannot be used.
            DoesNotFitError: Not even one sample at a time fits.
            DeviceLostError: The device can no longer be used by this process.
            StateDamagedError: The optimizer failed after it had begun to write.
            UpdateCompleteError: The optimizer has stepped, and what follows failed, be it a hook of the optimizer's or
                memory that ran out: the update is made, and this window must not be given again. Other errors of
                callbacks, and interrupts, that come after the update arrive as they are, with a note that says so.
        """
        report = self._step_with(as_window(window))
        assert report is not None
        return report

    def step_with_others(self, part: Window) -> StepReport | None:
        """Make one update from a window of which other processes have other parts; None where no part has a sample.

        Args:
            part: This process's part, which may be empty.

        Raises:
            RankFailedError: Another process cannot go on. And as `step`; then the others are still to be told.
        """
        return self._step_with(part)

    def _step_with(self, window: Window) -> StepReport | None:
        updates = self._step.updates
        self._made_before, self._coming = updates.made, self._standing.windows + 1
        self._attempts.is_decided, self._has_moved = False, False
        try:
            return self._report_of(window)
        except BaseException as error:
            if updates.made == self._made_before:
                raise
            # An assignment alone: whatever else fails, this window counts as done.
            self._standing.windows = self._coming
            self._step.clear_gradients()
            if _oom.is_device_lost(error):
                raise devices.lost(self._memory, error) from error
            said = afterwards.told(error, self._standing.windows, has_moved=self._has_moved)
            if said is error:
                raise
            try:
                raise said from (error.__cause__ if isinstance(error, UpdateCompleteError) else error)
            finally:
                del said  # else it and this frame, which holds the runner, would hold each other

    def _report_of(self, window: Window) -> StepReport | None:
        """Make a window's update, and return what was done."""
        started = time.perf_counter()
        work = self._accumulation
        self._look_at_parameters()
        if window.samples:
            self._sizing.begin(window)
        work.begin(window, None if self._joint is None else self._joint.begin(window))
        events: list[MemoryEvent] = []
        self._has_shrunk, learned = False, self._sizing.is_learning
        self._is_at_work = True
        try:
            outcome = self._try_until_done(work, window, events)
        except BaseException as error:
            if self._step.updates.made == self._made_before:  # else it came after the update: the window is done
                self._give_up(error, work, window)
            raise
        finally:
            micro_batches, recomputed = work.sizes, work.recomputed
            self._standing.last_cut = micro_batches
            self._is_at_work = False
            work.end()
        if outcome is None:
            return None
        if window.samples:
            self._look(clean=not events)
        update = outcome.update
        return StepReport(
            step=self._standing.windows,
            samples=window.samples if self._joint is None else self._joint.samples,
            micro_batches=micro_batches,
            oom_events=len(events),
            elapsed_s=time.perf_counter() - started,
            peak_bytes=self._sizing.peak_bytes if learned else self._room.peak_bytes,
            skipped=update.skipped,
            recomputed_samples=recomputed,
            device_losses={name: DeviceScalar(loss) for name, loss in outcome.losses.items()},
            device_reported={name: DeviceScalar(value) for name, value in outcome.reported.items()},
            device_grad_norm=None if update.grad_norm is None else DeviceScalar(update.grad_norm),
        )

    def _look_at_parameters(self) -> None:
        """See which parameters there are in this window, and that none has a gradient yet.

        Raises:
            InvalidInputError: There are others than at the start, where several processes train.
        """
        step = self._step
        if step.look():
            if self._joint is not None:
                self._joint.check_parameters()
            self._norms.search()
            self._accumulation.take_stock()
            self._attempts.check_again()
            self._say_what_stays()
        drop_old_gradients(step, self._notices)

    def _say_what_stays(self) -> None:
        """Say, once, that parameters which need a gradient are not the optimizer's, where they may have come since."""
        held = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        if left := sum(p.requires_grad and p not in held for p in self._step.parameters):
            self._notices.say(
                f"the model or the optimizer has changed: {left} parameters that need a gradient are not in the "
                "optimizer, so they stay as they are; optimizer.add_param_group(...) adds them",
                key="parameters that stay",
            )

    def _try_until_done(self, work: Accumulation, window: Window, events: list[MemoryEvent]) -> Made | None:
        """Try, in smaller and smaller cuts; return None where no process has a sample left."""
        while not isinstance(outcome := self._try(work, window), Made):
            if outcome is Again.OVER:
                return None
            # The handler has ended: inside it the traceback would still pin the activations.
            self._memory.release()
            if outcome is Again.AGAIN:
                continue
            self._has_shrunk = True
            if outcome.size is not None and self._sizing.is_learning:
                self._take_less(outcome)  # what is tried may fail, and is no lack of memory to speak of
                continue
            events.append(outcome)
            self._replan(events)
        return outcome

    def _give_up(self, error: BaseException, work: Accumulation, window: Window) -> None:
        """Put everything back as it was before a window, and say what its error does not.

        Raises:
            DeviceLostError: The device can no longer be used by this process.
            DoesNotFitError: Not even one sample at a time fits.
        """
        if _oom.is_device_lost(error):
            raise devices.lost(self._memory, error) from error
        if lost := work.undo():
            self._has_lost_parameters = True
            error.add_note(
                f"autoaccum: in this window the model has written {lost} of its parameters in its forward pass for "
                "the first time, and they are not as they were before; load them again"
            )
        if isinstance(error, ValueError):
            self._explain(error, window, of_one=self._has_shrunk and work.size == 1)

    def _explain(self, error: ValueError, window: Window, *, of_one: bool) -> None:
        """Say what a refusal of BatchNorm's, of a single value a channel, comes of.

        Args:
            error: The refusal, or any other error of this type.
            window: The window.
            of_one: Whether one sample was taken only because more ran out of memory.

        Raises:
            DoesNotFitError: It was.
        """
        if of_one:
            reason = f"one sample alone is refused: {error}"
            raise DoesNotFitError(does_not_fit_text(self._step, None, reason)) from error
        if window.samples == 1 and self._norms.need_several:
            error.add_note(
                "autoaccum: this window has one sample, and BatchNorm takes its statistics of more; "
                "last_window='drop' leaves a short last window out"
            )

    def evaluate(self, loader: Iterable[Any]) -> float:
        """Return the mean loss over a loader's samples, each counted once, without touching the training.

        Raises:
            InvalidInputError: The loader gives nothing, or the model gives no loss in evaluation mode.
            DoesNotFitError: Not even one sample at a time fits.
        """
        check_iterable("loader", loader)
        if self._evaluator is None:
            self._evaluator = Evaluator(self._step, loss_scope=self._loss_scope)
        before = RandomState(self._memory.device)
        before.take()
        loss = self._evaluator.run(loader, trained_size=self.plan.micro_batch).loss
        before.put_back()
        return loss

    def _try(self, work: Accumulation, window: Window) -> Made | MemoryEvent | Again:
        """Make the update, or return what happened if it was lack of memory, with what must be done again put back."""
        try:
            return self._attempts.make(window, self._note_update)
        except Exception as error:
            if self._step.updates.made != self._made_before:
                raise
            is_late = self._attempts.is_decided and _oom.is_oom(error)
            if self._joint is not None and is_late and not self._joint.ranks.is_in_pass:
                raise left_behind(error, self._joint.ranks.rank, self._standing.windows + 1) from error
            if self._joint is not None:
                self._joint.failed(error, work)
            if not (_oom.is_oom(error) or _oom.is_too_large(error)) or _oom.is_device_lost(error):
                raise
            if self._step.witness is not None:
                self._step.witness.see(
                    error,
                    phase=self._step.phase,
                    size=work.size,
                    step=self._standing.windows + 1,
                    is_trial=self._sizing.is_learning,
                )
            work.keep()
            event = MemoryEvent(self._step.phase, work.size, _oom.first_line(error))
            _oom.let_go(error)
            return event

    def _note_update(self, update: Update) -> None:
        self._standing.windows = self._coming
        self._step.clear_gradients()
        self._after_update(update.skipped)
        self._has_moved = True

    # --- how large micro-batches are ----------------------------------------------------------------------------------

    def _replan(self, events: list[MemoryEvent]) -> None:
        """Take a smaller cut after memory ran out, or give up."""
        event = events[-1]
        self._standing.oom_events += 1
        what = "" if event.size is None else f" of {event.size} samples"
        self._telling.say(f"out of memory in step {self._standing.windows + 1}, {event.phase}{what}: {event.message}")
        for callback in self._callbacks:
            callback.on_oom(event, step=self._standing.windows + 1)
        if event.size is None:
            refuse_to_try_for_ever(events, self._memory)
        else:
            self._take_less(event)

    def _take_less(self, event: MemoryEvent) -> None:
        assert event.size is not None
        if not self._sizing.fail(event.size):
            raise DoesNotFitError(does_not_fit_text(self._step, None, event.message))

    def _look(self, *, clean: bool) -> None:
        """See from time to time how memory is doing, and grow back or shrink before it runs out."""
        is_learning = self._sizing.is_learning
        if self._room.look(reads_peak=not is_learning) and not is_learning:
            self._notices.say("the allocator finds no room without giving back its cache; micro-batches get smaller")
            self._sizing.shrink()
        else:
            self._sizing.end(is_clean=clean, has_room=self._room.is_free)


def _check_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise InvalidInputError(f"plan={shown(plan)} is no autoaccum.Plan; autoaccum.plan(target, limit) makes one")
