"""Recovers a window after memory ran out, or abandons it.

If memory ran out, the part to be repeated is restored (`put_back`), the caches are released, and the rest of the window
is cut smaller (`cut_smaller`). Any other error ends the window, with model, optimizer and random state as they were
before it (`give_up`).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from autoaccum import _oom
from autoaccum._data.splits import whole_as_samples
from autoaccum._engine import devices
from autoaccum._engine.phases import Phase
from autoaccum._engine.probing import does_not_fit_text
from autoaccum._memory.limits import format_bytes
from autoaccum._records import MemoryEvent
from autoaccum._sizing.planner import format_cut
from autoaccum._system import exceptions
from autoaccum.errors import DoesNotFitError

if TYPE_CHECKING:
    from autoaccum._data.batches import Window
    from autoaccum._engine.batchnorm import BatchNorms
    from autoaccum._engine.events import Events
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.micro_batches import MicroBatches
    from autoaccum._sizing.headroom import Headroom
    from autoaccum._sizing.sizing import Sizing
    from autoaccum._system.notices import Notices

# Attempts at finding out what the loss runs over; it takes many small steps, and each can fail.
_TRIES_TO_WEIGH = 4
_TRIES = 2
# What BatchNorm says of a single value per channel.
_REFUSES_ONE = "Expected more than 1 value per channel"

# What to report as failed in these phases if no micro-batch was being processed.
_WITHOUT_SIZE = {
    Phase.RESERVE: "memory for the optimizer's step",
    Phase.WEIGH: "finding out what the loss runs over",
    Phase.FORWARD: "the loss over the whole window",
    Phase.BACKWARD: "the loss over the whole window",
    Phase.ADD: "adding the gradient to earlier ones",
}
# In these, nothing is kept for a backward pass.
_OF_THE_OPTIMIZER = (Phase.RESERVE, Phase.UNSCALE, Phase.CLIP, Phase.OPTIMIZER)


class Recovery:
    """Recovers the windows of one run from lack of memory.

    Args:
        step: The training step.
        work: The micro-batches of the window.
        sizing: Cuts the window.
        room: Tracks how much memory windows leave free.
        events: Notified when memory runs out.
        norms: The step's BatchNorm layers.

    Attributes:
        lacks: Out-of-memory events in the current window, without trials.
        has_lost_parameters: Whether an abandoned window has left parameters changed, as its error states.
    """

    def __init__(
        self,
        step: GradientStep,
        work: MicroBatches,
        sizing: Sizing,
        room: Headroom,
        events: Events,
        norms: BatchNorms,
    ) -> None:
        self.lacks: list[MemoryEvent] = []
        self.has_lost_parameters = False
        self._step = step
        self._work = work
        self._sizing = sizing
        self._room = room
        self._events = events
        self._norms = norms
        self._has_failed = False
        self._had_failed = False

    def begin(self) -> None:
        """Begin a window."""
        self.lacks = []
        self._had_failed = self._had_failed or self._has_failed
        self._has_failed = False

    def put_back_or_raise(self, error: Exception) -> MemoryEvent:
        """Restore what has to be repeated. Call from the handler that caught the error.

        Returns:
            What happened, once the error no longer keeps anything alive.

        Raises:
            Exception: The error itself, unless it is lack of memory that a smaller cut can resolve.
        """
        step, work = self._step, self._work
        if not (_oom.is_oom(error) or _oom.is_too_large(error)) or _oom.is_device_lost(error):
            raise  # noqa: PLE0704 - the error that is being handled
        if step.witness is not None:
            number, is_trial = self._events.windows + 1, self._sizing.is_learning
            step.witness.see(error, phase=step.phase, size=work.size, step=number, is_trial=is_trial)
        work.put_back_failed()
        event = MemoryEvent(step.phase.value, work.size, _oom.first_line(error))
        _oom.let_go(error)
        return event

    def cut_smaller(self, event: MemoryEvent) -> None:
        """Release the caches and cut the rest of the window smaller.

        Call this after the handler of the error: inside it the traceback still pins the activations.

        Raises:
            DoesNotFitError: There is no smaller cut, or a smaller cut does not help.
        """
        self._step.memory.release()
        if event.phase != Phase.RESERVE:
            self._work.refuse_written_parameters()
        self._has_failed = True
        if event.size is None or not self._sizing.is_learning:  # trials are expected to fail
            self.lacks.append(event)
            self._events.ran_out(event)
        if event.size is None:
            self._refuse_to_try_for_ever(event)
        elif not self._sizing.fail(event.size):
            sample = self._work.named_sample(self._sizing.start)
            raise DoesNotFitError(does_not_fit_text(self._step, None, event.message, sample))
        self._room.follow(self._sizing.plan)

    def _refuse_to_try_for_ever(self, event: MemoryEvent) -> None:
        """Give up if memory runs out repeatedly while no micro-batch is being processed.

        Unscaling, clipping and the optimizer do not depend on the cut, so they are retried only once, after the caches
        are released.
        """
        tries = _TRIES_TO_WEIGH if event.phase == Phase.WEIGH else _TRIES
        in_a_row = itertools.takewhile(lambda earlier: earlier.size is None, reversed(self.lacks))
        # If another rank lacks memory, its own limit on attempts ends this training too.
        if event.phase != Phase.ELSEWHERE and sum(earlier.phase == event.phase for earlier in in_a_row) >= tries:
            what = _WITHOUT_SIZE.get(Phase(event.phase), f"the {event.phase} step")
            error = DoesNotFitError(
                f"{what} does not fit on {self._step.memory.name} even with no activations alive ({event.message}); "
                f"try {', '.join(self._remedies())}, or a smaller model"
            )
            error.saving_helps = event.phase not in _OF_THE_OPTIMIZER
            raise error

    def _remedies(self) -> list[str]:
        remedies = ["an optimizer with less state (optimizer='adamw8bit')", "foreach=False"]
        limit_bytes = self._step.memory.limit_bytes
        if limit_bytes is not None:
            remedies.append(f"a memory_limit higher than {format_bytes(limit_bytes)}")
        return remedies

    @property
    def takes_gradients_aside(self) -> bool:
        """Whether a micro-batch's gradients are collected separately, so that only it is repeated if it fails."""
        if not self._sizing.is_troubled:
            return False
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self._step.parameters):
            return False  # the user's own hooks expect the window's gradients in .grad
        trained = (p for p in self._step.parameters if p.requires_grad)
        return self._room.is_free(sum(p.numel() * p.element_size() for p in trained))

    def choose_next_sizes(self, notices: Notices) -> None:
        """Choose the next window's sizes based on memory use, after a window is done."""
        sizing = self._sizing
        is_learning = sizing.is_learning
        if self._room.is_thrashing(reads_peak=not is_learning) and not is_learning:
            notices.say("the allocator finds no room without giving back its cache; micro-batches get smaller")
            sizing.shrink()
        else:
            sizing.end(self._work.sizes, is_clean=not self.lacks, has_room=self._room.is_free)

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory with the plan in force, or of the window whose micro-batches are trials."""
        return self._room.peak_bytes if self._sizing.peak_bytes is None else self._sizing.peak_bytes

    def give_up(self, error: BaseException, window: Window) -> None:
        """Restore everything to its state before the window, and add notes to the error on what it does not say itself.

        Raises:
            DeviceLostError: This process can no longer use the device.
            DoesNotFitError: Not even one sample at a time fits.
        """
        if _oom.is_device_lost(error):
            raise devices.lost(self._step.memory, error) from error
        if lost := self._work.undo():
            self.has_lost_parameters = True
            exceptions.note(
                error,
                f"autoaccum: in this window forward() modified {lost} of the model's parameters for the first time, "
                "and they are not as they were before; reload them",
            )
        if isinstance(error, Exception) and (text := whole_as_samples(window.spans)):
            exceptions.note(error, f"autoaccum: {text}")
        if isinstance(error, ValueError):
            self._explain(error, window)

    def _explain(self, error: ValueError, window: Window) -> None:
        """Explain BatchNorm's rejection of a single value per channel.

        Raises:
            DoesNotFitError: A single sample was used only because more ran out of memory, in this window or before.
        """
        refuses_one = self._norms.need_several and _REFUSES_ONE in str(error)
        if window.samples == 1 and self._norms.need_several:
            exceptions.note(
                error,
                "autoaccum: this window has one sample, and BatchNorm takes its statistics of more; "
                "drop_last=True leaves a short last window out",
            )
        elif self._work.size == 1 and (self._has_failed or (self._had_failed and refuses_one)):
            reason = f"one sample alone is refused: {error}"
            raise DoesNotFitError(does_not_fit_text(self._step, None, reason)) from error
        elif self._work.size == 1 and refuses_one:
            exceptions.note(
                error,
                f"autoaccum: the cut {format_cut(self._work.sizes)} of this window leaves a micro-batch of one sample, "
                "and BatchNorm takes its statistics of more; strategy='balanced', a larger micro_batch, or samples of "
                "one shape avoid it",
            )
