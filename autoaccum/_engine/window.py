"""Computes the gradient of one window after the other, and makes one again, in smaller micro-batches, that has failed.

`Engine.run` is the story of a window. Before it, a savepoint is taken. Its micro-batches run on the steady path where
everything is known, otherwise on the careful one. What the caller does with the gradient (an update, or adding it to
earlier ones) belongs to the window as long as it can be undone. If anything fails until then, the savepoint is
restored; if it was lack of memory, the window begins again with smaller micro-batches.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from autoaccum._engine import devices
from autoaccum._engine.batchnorm import BatchNorms
from autoaccum._engine.careful import CarefulPath
from autoaccum._engine.does_not_fit import (
    ONE_SAMPLE,
    sample_does_not_fit,
    sample_of,
    whole_does_not_fit,
)
from autoaccum._engine.gradient_checks import GradientChecks, refuse_hooks, tell_of_hooks
from autoaccum._engine.gradients import PartResult, Progress
from autoaccum._engine.lack_of_memory import resolvable_lack, told_damage
from autoaccum._engine.moving_layers import tell_of_moving_layers
from autoaccum._engine.phases import Phase
from autoaccum._engine.savepoint import Savepoint
from autoaccum._engine.steady import NotSteadyError, SteadyPath
from autoaccum._loss.loss_weights import NotCheckedError
from autoaccum._oom import is_device_lost
from autoaccum._sizing.headroom import Headroom
from autoaccum._sizing.planner import format_cut
from autoaccum._system import signals
from autoaccum.errors import DoesNotFitError, StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._engine.events import Events
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.noise_scale import NoiseScale
    from autoaccum._engine.peers import GradientPeers, SharedWeights
    from autoaccum._records import MemoryEvent, Plan
    from autoaccum._sizing.frontier import Widths
    from autoaccum._sizing.sizing import Sizing
    from autoaccum._system.notices import Notices

_T = TypeVar("_T")
# Attempts at trying the loss on a few samples; it takes many small steps, and each can fail.
_TRIES_TO_WEIGH = 4
_TRIES = 2
# Seconds from which saving the random state of Python and NumPy, which takes 42 microseconds, is not worth leaving out.
_LONG_S = 0.05
# What BatchNorm says of a single value per channel.
_REFUSES_ONE = "Expected more than 1 value per channel"


class Engine:
    """Computes gradients of windows.

    Args:
        step: The training step.
        sizing: Cuts the windows.
        events: Counts windows and reports out-of-memory errors.
        notices: Reports choices made on the user's behalf.
        peers: The processes that make the windows together.
        noise: The gradient noise scale to measure; None without `noise_scale`.
        elsewhere: Where the user may change gradients, for messages.
        owns_gradients: Whether gradients between windows are this engine's, so that the loss may reach parameters of
            others, whose gradients are dropped.

    Attributes:
        steady: The path of windows that need no check.
        is_due: Whether the current window is due for all checks.
        at: How far the current window is.
        lacks: What has failed in the current window for lack of memory, without trials.
        has_lost_parameters: Whether a window that was given up has left parameters changed, as its error states.
    """

    def __init__(
        self,
        step: GradientStep,
        sizing: Sizing,
        events: Events,
        notices: Notices,
        *,
        peers: GradientPeers,
        noise: NoiseScale | None = None,
        elsewhere: str = "between windows",
        owns_gradients: bool = True,
    ) -> None:
        modules, device = step.objective.modules, step.memory.device
        self._step = step
        self._sizing = sizing
        self._events = events
        self._notices = notices
        self._peers = peers
        self._elsewhere = elsewhere
        self._owns_gradients = owns_gradients
        self._takes_whole = step.options.loss_scope == "window"
        self._room = Headroom(step.memory)
        self._norms = BatchNorms(modules, step.options.batchnorm, notices)
        saved = None if step.is_sharded else lambda: step.parameters
        self._savepoint = Savepoint(modules, device, step.objective.functions, parameters=saved)
        self.steady = SteadyPath(step, sizing, is_part=peers.is_part)
        self._careful = CarefulPath(
            step,
            sizing,
            self._savepoint,
            norms=self._norms,
            peers=peers,
            takes_whole=self._takes_whole,
            noise=noise,
        )
        self._warnings = 0  # that were reported
        self.lacks: list[MemoryEvent] = []
        self.has_lost_parameters = False
        self.at = Progress()
        self._given: PartResult | None = None
        self._ran_out = self._ran_out_before = False
        self._is_steady = self.is_due = self._is_saved = self._is_restored = False
        self._windows_are_long, self._sizes_are_fixed = True, False
        self._plan: Plan | None = None
        self._begun_kinds: Any = None  # the `kinds` of the known window whose groups the sizing has

    # --- the story of a window ----------------------------------------------------------------------------------------

    def run(
        self,
        window: Window,
        finish: Callable[[PartResult], _T | None],
        *,
        is_decided: Callable[[], bool],
        on_change: Callable[[], None],
        measures_noise: bool = False,
    ) -> _T:
        """Compute a window's gradient in `.grad`, which holds none, and finish the window with it.

        Args:
            window: The window, or this process's part of it, which may be empty.
            finish: Called with what was computed; None to begin again, since another process lacks memory.
            is_decided: Whether nothing may be repeated any more, whatever fails.
            on_change: Called when parameters, or which of them are trained, have changed.
            measures_noise: Whether to measure the noise of its gradient.

        Raises:
            DoesNotFitError: Not even one sample at a time fits.
            DeviceLostError: This process can no longer use the device.
            StateDamagedError: The window failed after something was written that cannot be restored.
        """
        self._begin(window, on_change, measures_noise=measures_noise)
        try:
            while (done := self._attempt(finish, is_decided, on_change)) is None:
                pass
        except BaseException as error:  # no way to go on: the window is given up
            if not is_decided():
                self._give_up(error)
            raise
        finally:
            self._end()
        return done

    def _begin(self, window: Window, on_change: Callable[[], None], *, measures_noise: bool) -> None:
        """Choose the path of a window, and its micro-batches."""
        step, sizing = self._step, self._sizing
        self._window, self._measures_noise = window, measures_noise
        self.at, self._given, self._share = Progress(), None, None
        self._is_saved = self._is_restored = False
        self._dropped: list[nn.Parameter] = []
        self._has_checked_again = False
        self.lacks = []
        self._ran_out_before, self._ran_out = self._ran_out_before or self._ran_out, False
        self._has_gradients = torch.is_grad_enabled()
        self._is_steady = self._is_admitted(window)
        if step.memory.is_soft:
            if self._is_steady:
                step.memory.stop_measuring()
            else:  # what loaders, callbacks and evaluations took is not the window's
                self._room.measure()
        if not self._is_steady:
            step.objective.begin_window()
        elif step.objective.weights.has_left:
            step.objective.weights.look_back()
        if self.is_due:
            self._look(on_change)
        self._versions_of_data = window.versions()
        if not self._sizes_are_fixed or sizing.plan is not self._plan:
            self._plan, self._sizes_are_fixed = sizing.plan, sizing.is_quiet
            self._room.follow(sizing.plan)
        is_begun = window.kinds is not None and window.kinds is self._begun_kinds
        if window.samples and not (is_begun and self._is_steady and self._sizes_are_fixed):
            self._begun_kinds = None
            sizing.begin(window)
            self._begun_kinds, self._sizes_are_fixed = window.kinds, self._sizes_are_fixed and sizing.is_quiet
            if self.is_due:
                self._tell_of_batches_apart(window)
        self._share = self._peers.begin(window, sizing)
        if self._is_steady and self._peers.samples_to_try is not None:  # on which all ranks try their losses now
            self._is_steady = False
            step.objective.begin_window()

    def _look(self, on_change: Callable[[], None]) -> None:
        """Look for the model's current parameters and layers."""
        if self._step.look():
            on_change()
            self._peers.check_parameters()
        if not self._owns_gradients:
            refuse_hooks(self._step.parameters)
        self._norms.search()

    def _tell_of_batches_apart(self, window: Window) -> None:
        """Report once if batches that cannot be joined keep micro-batches smaller than the plan."""
        largest, planned = max(window.groups()), self._sizing.plan.micro_batch
        if len(window.groups()) > 1 and largest < planned and not self._sizing.is_learning:
            self._notices.say(
                f"the loader's batches differ in shape and cannot be joined, so micro-batches hold {largest} samples "
                f"at most, and not {planned} as planned; larger batches of the loader would fill them, or lists of "
                "samples (collate_fn=list) with split=autoaccum.ListOfSamples(your_collator)",
                key="batches apart",
            )

    def use(self, peers: GradientPeers) -> None:
        """Make windows with other processes, or with the same in another way, from now on."""
        self._peers = self._careful.peers = peers

    def _is_admitted(self, window: Window) -> bool:
        """Whether a window takes the steady path; if not, whether it is due for checks is noted."""
        if not window.samples:
            self.is_due = False
            return False
        is_admitted = self.steady.admits(window)
        self.is_due = not is_admitted and self.steady.is_due
        may = not (self._measures_noise or self._norms.rescales)
        return is_admitted and may

    def _attempt(
        self, finish: Callable[[PartResult], _T | None], is_decided: Callable[[], bool], on_change: Callable[[], None]
    ) -> _T | None:
        """Compute the gradient and finish the window; None if it has to begin again."""
        lack = None
        try:
            self._peers.begin_attempt()
            return finish(self._gradient())
        except (NotSteadyError, NotCheckedError) as error:
            if isinstance(error, NotCheckedError):
                if self._has_checked_again and not error.is_known:
                    raise error.said from None
                if not error.is_known:
                    self._has_checked_again, self._step.objective.weights.is_checked = True, False
            self._restore()
            self.steady.forget()
            self._is_steady, self.is_due = False, True
            self._look(on_change)
        except Exception as error:
            if is_decided():
                raise
            self._peers.failed(error, self, self._events.windows + 1)
            lack = self._undo(error)
        self._begin_again(lack)
        return None

    def _gradient(self) -> PartResult:
        """Return the results of all micro-batches, which are run unless only what follows them has failed."""
        if self._given is not None:
            return self._given
        step, at = self._step, self.at
        if not self._is_saved:
            step.stage.phase = Phase.SAVE
            is_first = self.is_due and self.steady.is_first()
            self._savepoint.take(copies_all=is_first, is_thorough=self.is_due, with_host_random=self._windows_are_long)
            self._is_saved = True
        if self._is_steady:
            self._given = self.steady.run(self._window, at)
        else:
            self._given = self._run_carefully(at)
        return self._given

    def _run_carefully(self, at: Progress) -> PartResult:
        """Run the micro-batches on the careful path, with all checks if they are due."""
        step, checks = self._step, None
        if self.is_due and step.passes is None:  # sharded gradients are not in `.grad` before they are reduced
            step.watch = checks = GradientChecks(
                step.parameters, self._elsewhere, refuses_strangers=not self._owns_gradients
            )
        try:
            given = self._careful.run(
                self._window, at, self._share, is_first=self.is_due, measures_noise=self._measures_noise
            )
            if checks is not None and not self._takes_whole:
                checks.check()
            step.objective.weights.tell_supposed()
        finally:
            step.watch = None
        if self.is_due:
            moved = self._savepoint.settle()
            tell_of_moving_layers(step.objective.modules, moved, at.sizes, self._notices)
            self.steady.learn(self._window, given)
            if len(at.sizes) > 1:
                tell_of_hooks(step.parameters, self._notices)
        return given

    def _end(self) -> None:
        """Release the window."""
        if self._norms.rescales:
            self._norms.put_back()
        if self._window.versions() != self._versions_of_data:
            self._step.transfer.copy_always()
        self._given = None
        del self._window

    def complete(self, elapsed_s: float) -> None:
        """Learn from a window that is finished, and choose the sizes of the next.

        Args:
            elapsed_s: How long it took.
        """
        sizing = self._sizing
        self._windows_are_long = elapsed_s > _LONG_S
        is_learning = not self._sizes_are_fixed and sizing.is_learning
        shortage = self._room.shortage(self.at.sizes, reads_peak=not is_learning)
        if shortage is not None and not is_learning:
            smaller = "; micro-batches get smaller" if sizing.shrink() else ""
            self._notices.say(f"{shortage}{smaller}", key="shortage")
            self._sizes_are_fixed = False
        elif self.lacks or not self._sizes_are_fixed:
            sizing.end(self.at.sizes, is_clean=not self.lacks, has_room=self._room.is_free)

    # --- failures -----------------------------------------------------------------------------------------------------

    def _undo(self, error: Exception) -> MemoryEvent:
        """After lack of memory, restore the state before the window. Call from the handler that caught the error.

        Returns:
            What happened, once the error no longer keeps anything alive.

        Raises:
            Exception: The error itself, unless it is lack of memory that smaller micro-batches can resolve.
        """
        step = self._step
        phase = step.phase
        event = resolvable_lack(
            error,
            phase,
            self.at.size,
            step.witness,
            has_moved=self._window.versions() != self._versions_of_data,
            step=self._events.windows + 1,
            is_trial=self._sizing.is_learning,
        )
        if event is None:
            raise  # noqa: PLE0704 - the error that is being handled
        if phase is not Phase.RESERVE:  # in which nothing was touched
            self._restore()
        return event

    def _restore(self) -> None:
        """Restore the state before the window."""
        at = self.at
        with signals.held():
            if not self._owns_gradients and not self.is_due:
                self._dropped = self._step.gradients_of_new()
            self._step.abandon()
            self._step.objective.put_back_modes()
            self._step.objective.weights.forget_window()
            if self._is_saved:
                self._savepoint.restore()
                self._is_restored = True
            if self._is_steady:  # which does not keep it up to date
                self._sizing.start = at.done
            at.recomputed += min(at.done + (at.size or 0), self._window.samples)
            at.done, at.size, at.sizes, self._given = 0, None, (), None

    def start_over(self, share: SharedWeights | None = None) -> None:
        """Restore the state before the window, since its parts do not fit together.

        Args:
            share: What is known of the weights of all parts.
        """
        self._share = share
        self._restore()

    def _begin_again(self, lack: MemoryEvent | None) -> None:
        """Release the caches, and choose smaller micro-batches after lack of memory.

        Call this after the handler of the error: inside it the traceback still pins the activations.

        Raises:
            DoesNotFitError: There are none, or they do not help.
            StateDamagedError: Something was written that cannot be restored.
        """
        self._step.memory.release()
        if lack is None:
            return
        if damage := self._damage():
            raise StateDamagedError(f"memory ran out after {damage}, and begin with smaller micro-batches")
        self._ran_out, self._sizes_are_fixed = True, False
        self.steady.cut_anew()
        if lack.size is None or not self._sizing.is_learning:  # trials are expected to fail
            self.lacks.append(lack)
            self._events.ran_out(lack)
        if lack.size is None:
            self._refuse_to_try_for_ever(lack)
        elif not self._sizing.fail(lack.size, may_wait=self._events.windows > 0):
            sample = ONE_SAMPLE if lack.phase == Phase.ELSEWHERE else sample_of(self._window, self._sizing.start)
            refused = sample_does_not_fit(self._step, lack.message, sample=sample, phase=lack.phase)
            if lack.phase != Phase.ELSEWHERE:
                refused.where = self._window, self._sizing.start
            raise refused
        self._room.follow(self._sizing.plan)

    def adopt(self, failed: Iterable[tuple[int, Widths]]) -> None:
        """Make micro-batches smaller that ran out of memory on another process with as much memory."""
        if self._sizing.adopt(failed):
            self._sizes_are_fixed = False
            self.steady.cut_anew()

    def _damage(self) -> str:
        """Return what the failed window has written that cannot be restored, in words; "" for nothing."""
        if self._dropped:
            return (
                f"gradients of {len(self._dropped)} parameters, the first of shape {tuple(self._dropped[0].shape)}, "
                "were dropped, also those of earlier batches, because the model got these parameters since it was last "
                "looked at: clear all gradients, repeat the batches of this step"
            )
        names = self._savepoint.damage() if self._is_restored else []
        if not names:
            return ""
        self.has_lost_parameters = True
        return told_damage(names)

    def _refuse_to_try_for_ever(self, lack: MemoryEvent) -> None:
        """Give up if memory runs out repeatedly while no micro-batch is being processed.

        Unscaling, clipping and the optimizer do not depend on the sizes, so they are retried only once, after the
        caches are released.
        """
        tries = _TRIES_TO_WEIGH if lack.phase == Phase.WEIGH else _TRIES
        in_a_row = itertools.takewhile(lambda earlier: earlier.size is None, reversed(self.lacks))
        # If another rank lacks memory, its own limit on attempts ends this training too.
        if lack.phase != Phase.ELSEWHERE and sum(earlier.phase == lack.phase for earlier in in_a_row) >= tries:
            raise whole_does_not_fit(self._step, lack.message, lack.phase, tries)

    def _give_up(self, error: BaseException) -> None:
        """Restore the state before the window, and add notes to the error on what it does not say itself.

        Raises:
            DeviceLostError: This process can no longer use the device.
            DoesNotFitError: Not even one sample at a time fits.
        """
        if is_device_lost(error):
            raise devices.lost(self._step.memory, error) from error
        if isinstance(error, StateDamagedError):
            self._restore()
            return
        torch.set_grad_enabled(self._has_gradients)  # which an interrupt within torch's own no_grad can leave off
        size, sizes = self.at.size, self.at.sizes
        self._restore()
        if isinstance(error, DoesNotFitError):
            self._step.objective.check_anew()
        if damage := self._damage():
            error.add_note(f"autoaccum: it came after {damage}")
        if isinstance(error, ValueError):
            self._explain(error, size, sizes)

    def _explain(self, error: ValueError, size: int | None, sizes: tuple[int, ...]) -> None:
        """Explain BatchNorm's rejection of a single value per channel.

        Raises:
            DoesNotFitError: A single sample was used only because more ran out of memory, in this window or before.
        """
        refuses_one = self._norms.need_several and _REFUSES_ONE in str(error)
        if self._window.samples == 1 and self._norms.need_several:
            error.add_note(
                "autoaccum: this window has one sample, and BatchNorm takes its statistics of more; "
                "drop_last=True (of fit, autoaccum.windows or the DataLoader) leaves a short last one out",
            )
        elif size == 1 and (self._ran_out or (self._ran_out_before and refuses_one)):
            reason = f"one sample alone is refused: {error}"
            sample = sample_of(self._window, self._sizing.start)
            raise sample_does_not_fit(self._step, reason, sample=sample, phase=self._step.phase) from error
        elif size == 1 and refuses_one:
            error.add_note(
                f"autoaccum: the micro-batches {format_cut(sizes)} of this window leave one of a single sample, and "
                "BatchNorm takes its statistics of more; another micro_batch avoids it",
            )

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the last window's micro-batches."""
        return self.at.sizes

    @property
    def size(self) -> int | None:
        """That of the micro-batch which is running; None for none."""
        return self.at.size

    @size.setter
    def size(self, size: int | None) -> None:
        self.at.size = size

    def warnings(self) -> tuple[str, ...]:
        """Return what was said of the loss since the last call."""
        said = self._step.objective.weights.warnings
        if len(said) == self._warnings:
            return ()
        new, self._warnings = said[self._warnings :], len(said)
        return tuple(new)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory with the plan in force, or of the window whose micro-batches are trials."""
        return self._room.peak_bytes if self._sizing.peak_bytes is None else self._sizing.peak_bytes
