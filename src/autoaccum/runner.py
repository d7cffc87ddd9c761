"""One window in, exactly one optimizer update out; or an error, with everything as it was before the window.

The cut may change under way when memory runs out; the gradient does not. Nothing is copied for this but buffers and
random state (and the optimizer's, once, before its first step), and nothing waits for the device that a hand-written
loop would not wait for.
"""

from __future__ import annotations

import itertools
import math
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

from autoaccum import devices, oom, signals
from autoaccum.accumulation import Accumulation
from autoaccum.batches import as_window
from autoaccum.batchnorm import BatchNorms
from autoaccum.errors import DoesNotFitError, InvalidInputError
from autoaccum.evaluation import Evaluator
from autoaccum.joint import ELSEWHERE
from autoaccum.notices import Notices
from autoaccum.probe import does_not_fit_text
from autoaccum.records import DeviceScalar, MemoryEvent, Plan, StepReport
from autoaccum.sizing import Sizing, Told, Wanted
from autoaccum.state import RandomState
from autoaccum.step import assemble, drop_old_gradients
from autoaccum.update import RESERVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import Tensor, nn

    from autoaccum.accumulation import Given
    from autoaccum.batches import Window
    from autoaccum.callbacks import Callback
    from autoaccum.joint import Joint
    from autoaccum.memory.base import MemoryBackend
    from autoaccum.objective import Loss
    from autoaccum.optimizers import MakesOptimizer
    from autoaccum.records import ProbeResult, Trial
    from autoaccum.step import TrainingStep
    from autoaccum.update import Update

# Asking for the peak and the allocator's retries costs as much as a small micro-step: not more often than this.
_LOOK_INTERVAL_S = 0.25
# One retry may be the first window's; looks in a row that find new ones show an allocator that goes on finding no room.
_LOOKS_AT_THRASHING = 2


# So often what the loss runs over is asked for; it takes many small steps, of which each can fail.
_TRIES_TO_WEIGH = 4

# What fails in these phases where no micro-batch is at work.
_WITHOUT_SIZE = {
    RESERVE: "memory for the optimizer's step",
    "weigh": "finding out what the loss runs over",
    "forward": "the loss over the whole window",
    "backward": "the loss over the whole window",
}


class _Telling(Told):
    """Passes on what a runner's sizing tells."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def trial(self, trial: Trial) -> None:
        for callback in self._runner._callbacks:
            callback.on_trial(trial)

    def planned(self, plan: Plan, probe: ProbeResult | None) -> None:
        self._runner._tell_plan(plan, probe)

    def settled(self, plan: Plan) -> None:
        self._runner._on_settled(plan)


class _Again(Enum):
    """What becomes of a window where this process did not fail."""

    AGAIN = "some process has to do its part again"
    OVER = "no process has a sample left"


# The window's losses by name, and what became of the update.
_Outcome = tuple[dict[str, "Tensor"], "Update"]


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

    Attributes:
        optimizer: The optimizer, also where it was made here.
        oom_events: How often memory has run out so far.
        has_lost_parameters: Whether a window that was given up has left parameters changed, which its error tells.

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
        if not isinstance(plan, Plan):
            raise InvalidInputError(f"plan={plan!r} is no autoaccum.Plan; autoaccum.plan(target, limit) makes one")
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
        self._says_changes = True

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
        after_update: Callable[[bool], None] = lambda _: None,
        on_settled: Callable[[Plan], None] = lambda _: None,
        windows_done: int = 0,
        joint: Joint | None = None,
    ) -> None:
        self.oom_events = 0
        self.has_lost_parameters = False
        self.optimizer = step.optimizer
        self._step = step
        self._memory = step.memory
        self._callbacks = tuple(callbacks)
        self._notices = notices
        self._loss_scope = loss_scope
        self._on_settled = on_settled
        self._after_update = after_update
        norms = self._norms = BatchNorms(step.objective.modules, batchnorm, notices)
        self._sizing = Sizing(
            step, plan, wanted, bytes_per_sample=bytes_per_sample, sample_bytes=sample_bytes, told=_Telling(self)
        )
        self._joint = joint
        if joint is not None:
            joint.sizing = self._sizing
        is_part = joint is not None
        sending = None if joint is None else joint.overlap
        self._accumulation = Accumulation(
            step, self._sizing, loss_scope=loss_scope, norms=norms, is_part=is_part, sending=sending
        )
        self._says_changes = False  # to be told of lack of memory: `fit` has its progress do that
        self._evaluator: Evaluator | None = None
        self._done = windows_done
        self._checked = self._has_shrunk = False
        self._looked_at = -math.inf
        self._peak_bytes: int | None = None
        self._retries: int | None = None
        self._thrashing = 0
        drop_old_gradients(step, notices)
        self._watch_peak_anew()

    @property
    def plan(self) -> Plan:
        """The plan in force; it shrinks when memory runs out, and grows back, at most to the one that was set."""
        return self._sizing.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
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
        started, before = time.perf_counter(), self._done
        work = self._accumulation
        if window.samples:
            self._sizing.begin(window)
        work.begin(window, None if self._joint is None else self._joint.begin(window))
        events: list[MemoryEvent] = []
        self._has_shrunk, learned = False, self._sizing.is_learning
        try:
            outcome = self._try_until_done(work, window, events)
        except BaseException as error:
            if self._done > before:
                raise  # an interrupt that waited for the update: the window is done
            if oom.is_device_lost(error):
                raise devices.lost(self._memory, error) from error
            if lost := work.undo():
                self.has_lost_parameters = True
                error.add_note(
                    f"autoaccum: in this window the model has written {lost} of its parameters in its forward pass for "
                    "the first time, and they are not as they were before; load them again"
                )
            if isinstance(error, ValueError):
                self._explain(error, window, of_one=self._has_shrunk and work.size == 1)
            raise
        finally:
            micro_batches, recomputed = work.sizes, work.recomputed
            self._last_cut = micro_batches
            work.end()
        if outcome is None:
            return None
        if window.samples:
            self._look(clean=not events)
        losses, update = outcome
        return StepReport(
            step=self._done,
            samples=window.samples if self._joint is None else self._joint.samples,
            micro_batches=micro_batches,
            oom_events=len(events),
            elapsed_s=time.perf_counter() - started,
            peak_bytes=self._sizing.peak_bytes if learned else self._peak_bytes,
            skipped=update.skipped,
            recomputed_samples=recomputed,
            device_losses={name: DeviceScalar(loss) for name, loss in losses.items()},
            device_grad_norm=None if update.grad_norm is None else DeviceScalar(update.grad_norm),
        )

    def _try_until_done(self, work: Accumulation, window: Window, events: list[MemoryEvent]) -> _Outcome | None:
        """Try, in smaller and smaller cuts; return None where no process has a sample left."""
        while not isinstance(outcome := self._try(work, window), tuple):
            if outcome is _Again.OVER:
                return None
            # The handler has ended: inside it the traceback would still pin the activations.
            self._memory.release()
            if outcome is _Again.AGAIN:
                continue
            self._has_shrunk = True
            if outcome.size is not None and self._sizing.is_learning:
                self._take_less(outcome)  # what is tried may fail, and is no lack of memory to speak of
                continue
            events.append(outcome)
            self._replan(events)
        return outcome

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
        if self._evaluator is None:
            self._evaluator = Evaluator(self._step, loss_scope=self._loss_scope)
        before = RandomState(self._memory.device)
        before.take()
        loss = self._evaluator.run(loader, trained_size=self.plan.micro_batch).loss
        before.put_back()
        return loss

    def _try(self, work: Accumulation, window: Window) -> _Outcome | MemoryEvent | _Again:
        """Make the update, or return what happened if it was lack of memory, with what must be done again put back."""
        try:
            if self._joint is not None:
                self._joint.prepare(window)
            given = work.run(aside=self._sizing.is_troubled and self._has_room_for_gradients())
            if self._joint is not None:
                return self._finish_with_others(self._joint, work, window, given)
            losses = given.corrected_losses()
            if not self._checked:
                self._check_first(losses)
            # An interrupt waits until the window is done: inside the optimizer it would leave half an update.
            with signals.held():
                update = self._step.updates.make(given.correction)
                self._note_update(update)
        except Exception as error:
            if self._joint is not None:
                self._joint.failed(error, work)
            if not (oom.is_oom(error) or oom.is_too_large(error)) or oom.is_device_lost(error):
                raise
            if self._step.witness is not None:
                self._step.witness.see(
                    error,
                    phase=self._step.phase,
                    size=work.size,
                    step=self._done + 1,
                    is_trial=self._sizing.is_learning,
                )
            work.keep()
            event = MemoryEvent(self._step.phase, work.size, oom.first_line(error))
            oom.let_go(error)
            return event
        return losses, update

    def _finish_with_others(self, joint: Joint, work: Accumulation, window: Window, given: Given) -> _Outcome | _Again:
        """Agree with the other processes, add up what all have, and make the update."""
        updates = self._step.updates
        if window.samples:
            joint.seconds = self._sizing.wait(is_timed=joint.is_timed, synchronize=joint.synchronize)
        else:
            joint.seconds = 0.0
        updates.reserve(joint.expected_gradients())
        try:
            if not joint.agree(window, work, given):
                return _Again.AGAIN
            if not joint.samples:
                return _Again.OVER
            alone = joint.add_up(given, self._check_first if not self._checked else lambda _: None)
            if not joint.all_ready(alone):
                if alone.failure is not None:
                    raise alone.failure
                work.start_over(joint.share)
                return _Again.AGAIN
            with signals.held():
                update = self._committed(alone.norm)
                self._note_update(update)
        finally:
            updates.let_go()
        return alone.losses, update

    def _committed(self, norm: Tensor | None) -> Update:
        """Step the optimizer, as all others do now: where memory lacks for it, once more, with the caches let go."""
        try:
            return self._step.updates.commit(norm)
        except Exception as error:
            if not oom.is_oom(error) or oom.is_device_lost(error):
                raise
            oom.let_go(error)
        self._memory.release()
        try:
            return self._step.updates.commit(norm)
        except Exception as error:
            if not oom.is_oom(error) or oom.is_device_lost(error):
                raise
            # The others have made the update, so this window cannot be tried again.
            raise DoesNotFitError(
                f"the optimizer's step does not fit on {self._memory.name} ({oom.first_line(error)}); try an optimizer "
                "with less state, foreach=False, or a smaller model"
            ) from error

    def _note_update(self, update: Update) -> None:
        self._step.clear_gradients()
        self._done += 1
        self._after_update(update.skipped)

    def _check_first(self, losses: dict[str, Tensor]) -> None:
        """Refuse a loss that is not a number from the start, before the first update spreads it."""
        values = {name: loss.item() for name, loss in losses.items()}
        if not all(map(math.isfinite, values.values())):
            found = ", ".join(f"{name}={value}" for name, value in values.items())
            raise InvalidInputError(
                f"the loss is not finite from the start ({found}); look for NaN in the inputs, log(0) or a division "
                "by 0 in the loss, or too large initial weights"
            )
        if not self._step.holds_gradients():
            raise InvalidInputError("the backward pass left no gradient on any parameter of the model")
        self._checked = True

    # --- how large micro-batches are ----------------------------------------------------------------------------------

    def _replan(self, events: list[MemoryEvent]) -> None:
        """Take a smaller cut after memory ran out, or give up."""
        event = events[-1]
        self.oom_events += 1
        what = "" if event.size is None else f" of {event.size} samples"
        self._say(f"out of memory in step {self._done + 1}, {event.phase}{what}: {event.message}")
        for callback in self._callbacks:
            callback.on_oom(event, step=self._done + 1)
        if event.size is None:
            # Unscaling, clipping and the optimizer do not depend on the cut: once more, with the caches let go.
            tries = _TRIES_TO_WEIGH if event.phase == "weigh" else 2
            in_a_row = itertools.takewhile(lambda earlier: earlier.size is None, reversed(events))
            # What another rank lacks ends its own tries, and so this training.
            if event.phase != ELSEWHERE and sum(earlier.phase == event.phase for earlier in in_a_row) >= tries:
                what = _WITHOUT_SIZE.get(event.phase, f"the {event.phase} step")
                raise DoesNotFitError(
                    f"{what} does not fit on {self._memory.name} even with no activations alive ({event.message}); try "
                    "an optimizer with less state, foreach=False, or a smaller model"
                )
            return
        self._take_less(event)

    def _take_less(self, event: MemoryEvent) -> None:
        assert event.size is not None
        if not self._sizing.fail(event.size):
            raise DoesNotFitError(does_not_fit_text(self._step, None, event.message))

    def _tell_plan(self, plan: Plan, probe: ProbeResult | None) -> None:
        self._watch_peak_anew()
        self._say(f"at most {plan.micro_batch} samples at once after step {self._done}")
        # What was learned has its proof in the window that is just done.
        since = self._done if probe is not None and plan.micro_batches == self._last_cut else self._done + 1
        for callback in self._callbacks:
            callback.on_plan(plan, step=since, probe=probe)

    def _say(self, text: str) -> None:
        if self._says_changes:
            self._notices.say(text, key=f"{text} {self.oom_events}")

    def _look(self, *, clean: bool) -> None:
        """See from time to time how memory is doing, and grow back or shrink before it runs out."""
        now = time.perf_counter()
        if now - self._looked_at >= _LOOK_INTERVAL_S:
            self._looked_at = now
            if not self._sizing.is_learning:
                self._peak_bytes = self._memory.peak_bytes()
            if self._is_thrashing() and not self._sizing.is_learning:
                self._notices.say(
                    "the allocator finds no room without giving back its cache; micro-batches get smaller"
                )
                self._sizing.shrink()
                return
        self._sizing.end(is_clean=clean, has_room=self._is_free)

    def _is_thrashing(self) -> bool:
        retries = self._memory.alloc_retries()
        risen = self._retries is not None and retries > self._retries
        self._retries = retries
        self._thrashing = self._thrashing + 1 if risen else 0
        return self._thrashing >= _LOOKS_AT_THRASHING

    def _has_room_for_gradients(self) -> bool:
        """Whether the gradients of one micro-batch may lie beside those of the window."""
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self._step.parameters):
            return False  # the user's own hooks expect the window's gradients in .grad
        trained = (p for p in self._step.parameters if p.requires_grad)
        return self._is_free(sum(p.numel() * p.element_size() for p in trained))

    def _is_free(self, extra_bytes: int) -> bool:
        """Whether a window could take so much more than those before it with this plan."""
        reading = self._memory.reading()
        needed = 0 if self._peak_bytes is None else max(0, self._peak_bytes - reading.used_bytes)
        return reading.free_bytes >= needed + extra_bytes

    def _watch_peak_anew(self) -> None:
        self._memory.reset_peak()
        self._peak_bytes = None
        self._looked_at = -math.inf
