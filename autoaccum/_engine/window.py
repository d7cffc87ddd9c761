"""Computes the gradient of one window after the other, and restores the state before a window that fails.

    try:
        engine.begin(window, is_made=..., on_change=...)
        while True:
            with engine.attempt():
                given = engine.gradient()
                ...  # make an optimizer step of it, or add it to earlier gradients
                break
    except BaseException as error:
        engine.give_up(error)
        raise
    finally:
        engine.end()

What fails within an attempt is undone. If it was lack of memory, the next attempt has smaller micro-batches; if a loss
is not what is known of it, the next one checks it. Anything else ends the window. Nothing is undone once it `is_made`.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._engine import devices
from autoaccum._engine.batchnorm import BatchNorms
from autoaccum._engine.does_not_fit import (
    ONE_SAMPLE,
    sample_does_not_fit,
    sample_of,
    whole_does_not_fit,
)
from autoaccum._engine.due_checks import DueChecks
from autoaccum._engine.gradients import PartResult, Progress
from autoaccum._engine.micro_batches import MicroBatches
from autoaccum._engine.out_of_memory import TRIES_TO_WEIGH, Phase, damage_text, resolvable_oom
from autoaccum._engine.peers import BeginAgain
from autoaccum._engine.window_checks import (
    GradientChecks,
    refuse_hooks,
    warn_of_hooks,
    warn_of_moving_state,
)
from autoaccum._loss.knowledge import RecheckWindow
from autoaccum._loss.settling import NotSettled, Totals
from autoaccum._oom import first_line, is_device_lost
from autoaccum._records import DeviceScalar
from autoaccum._sizing.headroom import Headroom
from autoaccum._sizing.planner import format_cut
from autoaccum._system import signals
from autoaccum.errors import AutoaccumError, DoesNotFitError, InvalidInputError, StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import WindowResult
    from autoaccum._engine.noise_scale import NoiseScale
    from autoaccum._engine.peers import Peers
    from autoaccum._engine.savepoint import SavedState
    from autoaccum._records import MemoryEvent, Plan
    from autoaccum._sizing.events import Events
    from autoaccum._sizing.sizing import Sizing
    from autoaccum._system.notices import Notices

# Attempts at work whose memory does not depend on the micro-batches' sizes.
_TRIES = 2
# Seconds from which saving the random state of Python and NumPy, which takes 42 microseconds, is not worth leaving out.
_LONG_S = 0.05
# What torch, and models that check their inputs, raise for numbers of samples that they do not take.
_OF_SHAPES = (RuntimeError, IndexError, ValueError, AssertionError)
# What BatchNorm says of a single value per channel.
_REFUSES_ONE = "Expected more than 1 value per channel"


class Engine:
    """Computes gradients of windows.

    Attributes:
        sizing: Cuts windows.
        checks: Says which windows are due for all checks.
        checks_all: Whether the current window is due for all checks.
        at: How far the current window is.
        oom_events: The failures of the current window for lack of memory, without those of trials.
        repeats: Why the current window was begun again, each time.
        has_lost_parameters: Whether a window that was given up has left parameters changed, as its error states.
        is_at_work: Whether a window has begun and not ended.
        is_half_done: Whether a window was neither finished nor restored, both of which a second interrupt can prevent.
    """

    def __init__(
        self,
        step: GradientStep,
        sizing: Sizing,
        events: Events,
        notices: Notices,
        *,
        peers: Peers,
        noise: NoiseScale | None = None,
        owns_gradients: bool = True,
    ) -> None:
        self._step = step
        self.sizing = sizing
        self._events = events
        self._notices = notices
        self._peers = peers
        self._owns_gradients = owns_gradients
        self._takes_whole = step.options.loss_scope == "window"
        self._room = Headroom(step.memory)
        peers.before_reset(self._room.note_peak)
        self._norms = BatchNorms(step.objective.modules, step.options.batchnorm, notices)
        self._saved: SavedState | None = None  # before the current window; None until it is saved
        self._to_overwrite: SavedState | None = None  # by the next `save`, which uses its memory again
        self.checks = DueChecks(step, is_part=peers.is_part)
        self._micro_batches = MicroBatches(step, sizing, norms=self._norms, peers=peers, noise=noise)
        self._is_steady = self.checks_all = self.has_lost_parameters = False
        self.is_at_work = self._is_begun = self.is_half_done = False
        self.oom_events: list[MemoryEvent] = []
        self.repeats: list[str] = []
        self.at = Progress()
        # Of the current window: what its micro-batches have given, and why the last attempt lacked memory.
        self._given: PartResult | None = None
        self._lack: MemoryEvent | None = None
        self._has_failed = False
        self._warnings_reported = 0
        self._last_oom: int | None = None  # the window in which memory last ran out, by the windows done before it
        self._windows_are_long, self._sizes_are_fixed = True, False
        self._plan: Plan | None = None
        self._begun_kinds: Any = None  # the `kinds` of the known window whose groups the sizing has

    # --- a window -----------------------------------------------------------------------------------------------------

    def begin(
        self,
        window: Window,
        *,
        is_made: Callable[[], bool],
        on_change: Callable[[], None],
        measures_noise: bool = False,
    ) -> None:
        """Begin a window.

        Args:
            window: The window, or this process's part of it, which may be empty.
            is_made: Whether the optimizer step is made, or the gradient added: nothing may be undone any more.
            on_change: Called when parameters, or which of them are trained, have changed.
            measures_noise: Whether to measure the noise of its gradient.
        """
        self._versions_of_data = window.versions()
        self._window, self._is_made, self._on_change = window, is_made, on_change
        self.is_at_work = True
        self._prepare(window, measures_noise=measures_noise)
        self._is_begun = True

    def end(self) -> None:
        """Release the window, whether it is complete or given up."""
        if not self.is_at_work:
            return
        if self._norms.rescales:
            self._norms.restore()
        if self._window.versions() != self._versions_of_data:
            self._step.transfer.copy_always()
        self._given = None
        self.is_at_work = self._is_begun = False
        del self._window, self._is_made, self._on_change

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Undo what fails in this block where another attempt can help, which is to follow it then.

        Other errors pass, and `give_up` restores.
        """
        if self._has_failed:  # only now: while an error is handled, its traceback still pins the activations
            self._step.memory.release()
            self._has_failed = False
            if self._lack is not None:
                event, self._lack = self._lack, None
                self._answer_lack(event)
        try:
            yield
            self.is_half_done = False
        except (RecheckWindow, NotSettled, BeginAgain) as error:
            self._has_failed = True
            self._prepare_rerun(error)
            self.repeats.append(first_line(error))
        except Exception as error:
            if self._is_made():
                raise
            self._has_failed = True
            self._lack = event = self._undone(error)
            self.repeats.append("out of memory: " + event.phase + (f" of {event.size} samples" if event.size else ""))

    def gradient(self) -> PartResult:
        """Return the results of all micro-batches, which are run unless only what follows them has failed.

        Their gradient is in `.grad`, which has to hold none before the window.
        """
        self._peers.begin_attempt()
        if self._given is None:
            if self._saved is None:
                self._step.stage.phase = Phase.SAVE
                self._saved = self._to_overwrite = self._step.savepoint.save(
                    self._to_overwrite,
                    copies_all=self.checks_all and self.checks.is_first(),
                    is_thorough=self.checks_all,
                    with_host_random=self._windows_are_long,
                )
            self.is_half_done = True
            given = self._run_checked(self._saved) if self.checks_all else self._run(self._saved)
            if given.skipped_leaves:
                given.fill_zero_gradients()
            self._given = given
            if self._norms.is_there and not self.sizing.is_learning:
                self._norms.announce(self.at.sizes)  # only sizes that will be used again
        return self._given

    def _prepare(self, window: Window, *, measures_noise: bool) -> None:
        """Prepare the micro-batches of a window."""
        step = self._step
        self._measures_noise, self._totals = measures_noise, None
        self._has_grad_mode = torch.is_grad_enabled()
        self.at, self.oom_events, self.repeats = Progress(), [], []
        self._given = self._lack = self._saved = None
        self._has_failed = False
        step.stage.start = 0
        step.objective.begin_window()
        self.checks_all = bool(window.samples) and self.checks.are_due(window)
        self._is_steady = bool(window.samples) and not (self.checks_all or self.sizing.is_learning)
        if step.memory.is_soft:
            step.memory.exclude_loader_batches(window.data_bytes())
            if not self._is_steady:  # what loaders, callbacks and evaluations took is not the window's
                self._room.measure(tuple(map(tuple, window.widths())))
        if self._is_steady:
            step.memory.stop_measuring()
        if self.checks_all:
            self._refresh()
        self._tell_sizing(window)
        self._totals = self._peers.begin(window, self.sizing)

    def _refresh(self) -> None:
        """Look up the model's current parameters and layers."""
        if self._step.refresh():
            self._on_change()
            self._peers.check_parameters()
        if not self._owns_gradients:
            refuse_hooks(self._step.parameters)
        self._norms.search()

    def _tell_sizing(self, window: Window) -> None:
        """Tell the sizing what a window is made of, unless it knows from the last one."""
        sizing = self.sizing
        if not self._sizes_are_fixed or sizing.plan is not self._plan:
            self._plan, self._sizes_are_fixed = sizing.plan, sizing.is_settled
            self._room.follow(sizing.plan)
        is_known = window.kinds is not None and window.kinds is self._begun_kinds
        if window.samples and not (is_known and self._is_steady and self._sizes_are_fixed):
            self._begun_kinds = None
            sizing.begin(window)
            self._begun_kinds, self._sizes_are_fixed = window.kinds, self._sizes_are_fixed and sizing.is_settled
            if self.checks_all:
                self._tell_of_batches_apart(window)

    def _run(self, before: SavedState) -> PartResult:
        """Run the micro-batches."""
        given = self._micro_batches.run(
            self._window, self.at, before, self._totals, checks_all=self.checks_all, measures_noise=self._measures_noise
        )
        self._step.objective.knowledge.warn_if_unchecked()
        return given

    def _run_checked(self, before: SavedState) -> PartResult:
        """Run the micro-batches with all checks."""
        step = self._step
        if step.passes is None:  # sharded gradients are not in `.grad` before they are reduced
            step.watch = GradientChecks(step.parameters, owns_gradients=self._owns_gradients)
        try:
            given = self._run(before)
            if step.watch is not None and not self._takes_whole:
                step.watch.check()
        finally:
            step.watch = None
        moved = before.learn_moved()
        self.checks.learn(self._window)
        if len(self.at.sizes) > 1:
            if not self.sizing.is_learning:  # windows may fit at once
                warn_of_moving_state(step.objective, moved)
            warn_of_hooks(step.parameters, self._notices)
        return given

    def learn_from_window(self, elapsed_s: float) -> None:
        """Tell the sizing what a finished window of so many seconds has shown; the next is cut when it runs."""
        sizing = self.sizing
        self._windows_are_long = elapsed_s > _LONG_S
        is_learning = not self._sizes_are_fixed and sizing.is_learning
        shortage = self._room.shortage(self.at.sizes, reads_peak=not is_learning)
        if shortage is not None and not is_learning:
            smaller = "; micro-batches get smaller" if sizing.shrink() else ""
            self._notices.say(f"{shortage}{smaller}", key="shortage")
            self._sizes_are_fixed = False
        elif self.oom_events or not self._sizes_are_fixed or sizing.plan is not self._plan:
            sizing.end(self.at.sizes, is_clean=not self.oom_events, has_room=self._room.is_free)

    def use(self, peers: Peers) -> None:
        """Make windows with other processes, or with the same in another way, from now on."""
        self._peers = self._micro_batches.peers = peers
        peers.before_reset(self._room.note_peak)

    # --- an attempt failed: restore, and begin again ------------------------------------------------------------------

    def _prepare_rerun(self, error: RecheckWindow | NotSettled | BeginAgain) -> None:
        """Restore the window, whose loss is not what is known of it, so that it runs again."""
        if self._window.versions() != self._versions_of_data:
            raise InvalidInputError(
                f"the window has to run again ({first_line(error)}), and the model has changed its input in place; let "
                "the model work on a copy (inputs.clone())"
            )
        if isinstance(error, BeginAgain):
            self._totals = error.totals
            self.restore()
            return
        if isinstance(error, RecheckWindow):
            if not self._step.objective.knowledge.may_ask:
                raise error.error from None
            self._step.objective.knowledge.ask_for_check()
            self._totals = self._totals if self._peers.is_part else None  # of what was known before
        else:
            self._totals = Totals(error.weights, self._window.samples, is_exact=True)
        self.restore()
        self.checks_all, self._is_steady = True, False
        self._refresh()

    def _undone(self, error: Exception) -> MemoryEvent:
        """Return which lack of memory an error is, once the state before the window is restored.

        Call it from the handler that caught the error, which keeps nothing alive afterwards.

        Raises:
            Exception: The error itself, unless it is lack of memory that smaller micro-batches can resolve.
        """
        step, peers = self._step, self._peers
        size = peers.lacking_size(error, self.at.size)
        phase = step.stage.phase
        event = resolvable_oom(
            error,
            phase,
            size,
            step.witness,
            has_moved=self._window.versions() != self._versions_of_data,
            step=self._events.windows + 1,
            is_trial=self.sizing.is_learning,
        )
        if event is None:
            raise  # noqa: PLE0704 - the error that is being handled
        if peers.is_part:
            self._totals = peers.totals  # by what others know, losses may be weighed otherwise
        if peers.is_awaited or phase is not Phase.RESERVE:  # in which nothing was touched
            self.restore()
        return event

    def restore(self) -> None:
        """Restore the state before the window."""
        step, at = self._step, self.at
        with signals.deferred():
            step.drop_progress()
            if self._saved is not None:
                if step.optimizer_steps is not None:
                    step.savepoint.wrote(step.optimizer_steps.take_undone())
                self._saved.restore()
            at.recomputed += min(at.done + (at.size or 0), self._window.samples)
            if self._given is not None:
                self._given.outputs.clear()
            # The stage keeps the first sample of the micro-batch that failed: `_answer_lack` asks for it.
            at.done, at.size, at.sizes, self._given = 0, None, (), None
            self.is_half_done = False

    def _answer_lack(self, event: MemoryEvent) -> None:
        """Report lack of memory, and choose smaller micro-batches; where none ran, leave the sizes for another attempt.

        Raises:
            DoesNotFitError: There are none, or they do not help; or attempts at the same sizes are used up.
            StateDamagedError: Something was written that cannot be restored.
        """
        if event.phase != Phase.RESERVE and (damage := self._damage()):
            raise StateDamagedError(f"memory ran out after {damage}, and begin with smaller micro-batches")
        self._last_oom, self._sizes_are_fixed = self._events.windows, False
        if event.size is None or not self.sizing.is_learning:  # trials are expected to fail
            self.oom_events.append(event)
            self._events.ran_out(event)
        if event.size is None:
            self._refuse_endless_tries(event)
        elif not self.sizing.fail(self._step.stage.start, event.size, may_wait=self._events.windows > 0):
            raise self._sample_does_not_fit(event.message, event.phase)
        self._room.follow(self.sizing.plan)

    def _refuse_endless_tries(self, event: MemoryEvent) -> None:
        """Give up if memory runs out repeatedly while no micro-batch is being processed.

        Unscaling, clipping and the optimizer do not depend on the sizes, so they are retried only once, after the
        caches are released.
        """
        tries = TRIES_TO_WEIGH if event.phase == Phase.WEIGH else _TRIES
        in_a_row = itertools.takewhile(lambda earlier: earlier.size is None, reversed(self.oom_events))
        # If another rank lacks memory, its own limit on attempts ends this training too.
        if event.phase != Phase.ELSEWHERE and sum(earlier.phase == event.phase for earlier in in_a_row) >= tries:
            raise whole_does_not_fit(self._step, event.message, event.phase, tries)

    def _sample_does_not_fit(self, reason: str, phase: str) -> DoesNotFitError:
        is_here = phase != Phase.ELSEWHERE
        sample = sample_of(self._window, self._step.stage.start) if is_here else ONE_SAMPLE
        refused = sample_does_not_fit(self._step, reason, sample=sample, phase=phase)
        if is_here:
            refused.where = self._window, self._step.stage.start
        return refused

    def _damage(self) -> str:
        """Return what the restored window has written that cannot be restored, in words; "" for nothing."""
        names = [] if self._saved is None else self._saved.damage()
        self.has_lost_parameters |= bool(names)
        return damage_text(names) if names else ""

    # --- no way to go on: give the window up --------------------------------------------------------------------------

    def give_up(self, error: BaseException) -> None:
        """Restore the state before the window, if it is not final, and add to the error what it does not say itself.

        Raises:
            DeviceLostError: This process can no longer use the device.
            DoesNotFitError: Not even one sample at a time fits.
        """
        if not self._is_begun:
            return
        if self._is_made():
            self.is_half_done = False
            return
        if is_device_lost(error):
            raise devices.lost(self._step.memory, error) from error
        torch.set_grad_enabled(self._has_grad_mode)  # which an interrupt within torch's own no_grad can leave off
        size, sizes, phase = self.at.size, self.at.sizes, self._step.stage.phase
        self.restore()
        if isinstance(error, StateDamagedError):
            return
        if isinstance(error, DoesNotFitError):
            self._step.objective.check_anew()
        if damage := self._damage():
            error.add_note(f"autoaccum: it came after {damage}")
        is_own = isinstance(error, AutoaccumError)  # which says what to do
        if isinstance(error, ValueError) and not is_own and self._explain_refused_sample(error, size, sizes):
            return
        is_of_size = phase in (Phase.FORWARD, Phase.BACKWARD) and size is not None and size < self._window.samples
        if is_of_size and isinstance(error, _OF_SHAPES) and not is_own:
            error.add_note(
                f"autoaccum: it came in a micro-batch of {size} of the window's {self._window.samples} samples; if "
                "more do not raise it, write the model and the loss for any number of samples (squeeze(-1) for "
                "squeeze(), which takes away the dimension of a single sample), pass a micro_batch= that divides "
                "the batch into sizes that work, or a split= that keeps rows together which belong together"
            )

    def _explain_refused_sample(self, error: ValueError, size: int | None, sizes: tuple[int, ...]) -> bool:
        """Return whether a layer, mostly BatchNorm, refuses a single sample, and explain it.

        Raises:
            DoesNotFitError: A single sample was used only because more ran out of memory, in this window or before.
        """
        refuses_one = self._norms.need_several and _REFUSES_ONE in str(error)
        is_of_more = self._window.samples > 1 and size == 1
        if is_of_more and (self._last_oom == self._events.windows or (self._last_oom is not None and refuses_one)):
            raise self._sample_does_not_fit(f"one sample alone is refused: {error}", self._step.stage.phase) from error
        if refuses_one:
            error.add_note(
                f"autoaccum: the micro-batches {format_cut(sizes)} of this window leave one of a single sample, and "
                "BatchNorm takes its statistics of more; another micro_batch avoids it, and of a short last window "
                "drop_last=True (of fit, autoaccum.windows or the DataLoader)"
            )
        return refuses_one

    # --- what is reported ---------------------------------------------------------------------------------------------

    def _tell_of_batches_apart(self, window: Window) -> None:
        """Report once if micro-batches are smaller than the plan because batches cannot be joined."""
        largest, planned = max(window.groups()), self.sizing.plan.micro_batch
        if largest < planned <= window.samples and not self.sizing.is_learning:
            self._notices.say(
                f"the loader's batches differ in shape and cannot be joined, so micro-batches hold {largest} samples "
                f"at most, and not {planned} as planned; larger batches of the loader would fill them, or lists of "
                "samples (collate_fn=list) with split=autoaccum.ListOfSamples(your_collator)",
                key="batches apart",
            )

    def reported(self, reduced: WindowResult) -> dict[str, Any]:
        """Return what the report on a window that is complete says of it, by the names of its fields."""
        said, room, trial_peak = self._step.objective.knowledge.said.texts, self._room, self.sizing.learner.peak_bytes
        new, self._warnings_reported = said[self._warnings_reported :], len(said)
        return {
            "samples": reduced.samples,
            "micro_batches": self.at.sizes,
            "oom_events": len(self.oom_events),
            # With the plan in force, or of the window whose micro-batches were trials.
            "peak_bytes": room.peak_bytes if trial_peak is None else trial_peak,
            "recomputed_samples": self.at.recomputed,
            "repeats": tuple(self.repeats),
            "device_losses": {name: DeviceScalar(loss) for name, loss in reduced.losses.items()},
            "device_reported": {name: DeviceScalar(value) for name, value in reduced.reported.items()},
            "warnings": tuple(new),
        }
