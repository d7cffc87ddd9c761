"""One attempt at a window: what is still to be done of it in, the update that was made of it out.

Where other processes have other parts of the window, all agree before any makes the update. What fails arrives as it
is, but that the others wait for an optimizer's step: that is tried twice.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from autoaccum import _oom
from autoaccum._distributed.data_parallel import ELSEWHERE
from autoaccum._engine.optimizer_step import RESERVE
from autoaccum._loss.reported import means
from autoaccum._system import signals
from autoaccum.errors import DoesNotFitError, InvalidInputError, StartAgainError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from autoaccum._data.batches import Window
    from autoaccum._distributed.data_parallel import Joint
    from autoaccum._engine.accumulator import Accumulation, Given
    from autoaccum._engine.optimizer_step import Update
    from autoaccum._engine.step import TrainingStep
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import MemoryEvent
    from autoaccum._sizing.controller import Sizing
    from autoaccum._sizing.headroom import Room

# So often what the loss runs over is asked for; it takes many small steps, of which each can fail.
_TRIES_TO_WEIGH = 4

# What fails in these phases where no micro-batch is at work.
_WITHOUT_SIZE = {
    RESERVE: "memory for the optimizer's step",
    "weigh": "finding out what the loss runs over",
    "forward": "the loss over the whole window",
    "backward": "the loss over the whole window",
}


class Again(Enum):
    """What becomes of a window where this process did not fail."""

    AGAIN = "some process has to do its part again"
    OVER = "no process has a sample left"


@dataclass(slots=True)
class Made:
    """An update that was made.

    Attributes:
        losses: The window's losses by name.
        update: What became of the update; set when it is made, since nothing new may be needed from then on.
        reported: What is reported beside the losses, by name.
    """

    losses: dict[str, Tensor]
    reported: dict[str, Tensor] = field(default_factory=dict)
    update: Update = field(init=False)


class Attempts:
    """Attempts at windows, by this process alone or together with others.

    Args:
        step: The training step.
        work: Accumulates the gradients of this process's part.
        sizing: Cuts the windows.
        room: What room there is for a second set of gradients.
        joint: Through which windows are made together; None where this process is the only one.
        before_update: Called when all but the optimizer's step is done, while there still is a way back.
        begins: Whether no window was made before. A loss that is not finite later is not refused here.

    Attributes:
        is_decided: Whether the others make, or have made, the update of the present window, whatever happens here.
    """

    def __init__(
        self,
        step: TrainingStep,
        work: Accumulation,
        sizing: Sizing,
        room: Room,
        joint: Joint | None,
        before_update: Callable[[], None],
        *,
        begins: bool,
    ) -> None:
        self._step = step
        self._work = work
        self._sizing = sizing
        self._room = room
        self._joint = joint
        self._before_update = before_update
        self.is_decided = False
        self._begins = begins
        self._is_checked = False

    def check_again(self) -> None:
        """See in the next window that there are gradients, as in the first: what is trained has changed."""
        self._is_checked = False

    def make(self, window: Window, on_update: Callable[[Update], None]) -> Made | Again:
        """Make the update of a window from what is still to be done of it.

        Args:
            window: The window, or this process's part of it.
            on_update: Called when the update is made, before an interrupt that waited for it is let through.

        Raises:
            InvalidInputError: The first loss is no number, or nothing has a gradient.
        """
        if self._joint is not None:
            self._joint.prepare(window)
        given = self._work.run(aside=self._sizing.is_troubled and self._has_room_for_gradients())
        if self._joint is not None:
            return self._finish_with_others(self._joint, window, given, on_update)
        made = Made(given.corrected_losses(), means(given.slots))
        self._check_first(made.losses)
        self._before_update()
        # An interrupt waits until the window is done: inside the optimizer it would leave half an update.
        with signals.held():
            made.update = self._step.updates.make(given.correction)
            on_update(made.update)
        return made

    def _finish_with_others(
        self, joint: Joint, window: Window, given: Given, on_update: Callable[[Update], None]
    ) -> Made | Again:
        """Agree with the other processes, add up what all have, and make the update."""
        updates = self._step.updates
        if window.samples:
            joint.seconds = self._sizing.wait(is_timed=joint.is_timed, synchronize=joint.synchronize)
        else:
            joint.seconds = 0.0
        updates.reserve(joint.expected_gradients())
        try:
            if not joint.agree(window, self._work, given):
                return Again.AGAIN
            if not joint.samples:
                return Again.OVER
            alone = joint.add_up(given, self._check_first)
            alone.run(self._before_update)
            made = Made(alone.losses, alone.reported)
            # From here on this rank cannot know whether the others have heard from it and make the update. Where the
            # model adds up gradients they all meet once more.
            self.is_decided = joint.adds_up_gradients
            if not joint.all_ready(alone):
                self.is_decided = False
                if alone.failure is not None:
                    raise alone.failure
                self._work.start_over(joint.share)
                return Again.AGAIN
            self.is_decided = True
            with signals.held():
                made.update = self._committed(alone.norm)
                on_update(made.update)
        finally:
            updates.let_go()
        return made

    def _committed(self, norm: Tensor | None) -> Update:
        """Step the optimizer, as all others do now: where memory lacks for it, once more, with the caches let go."""
        updates, memory = self._step.updates, self._step.memory
        before = updates.made
        try:
            return updates.commit(norm)
        except Exception as error:
            if updates.made != before or not _oom.is_oom(error) or _oom.is_device_lost(error):
                raise
            _oom.let_go(error)
        memory.release()
        try:
            return updates.commit(norm)
        except Exception as error:
            if updates.made != before or not _oom.is_oom(error) or _oom.is_device_lost(error):
                raise
            # The others have made the update, so this window cannot be tried again.
            raise DoesNotFitError(
                f"the optimizer's step does not fit on {memory.name} ({_oom.first_line(error)}); try an optimizer "
                "with less state, foreach=False, or a smaller model"
            ) from error

    def _check_first(self, losses: dict[str, Tensor]) -> None:
        """Refuse a loss without gradients, and at the start one that is not finite, before an update spreads it."""
        if self._is_checked:
            return
        if self._begins:
            _check_finite(losses)
        if not self._step.holds_gradients():
            raise InvalidInputError("the backward pass left no gradient on any parameter of the model")
        self._is_checked, self._begins = True, False

    def _has_room_for_gradients(self) -> bool:
        """Whether the gradients of one micro-batch may lie beside those of the window."""
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self._step.parameters):
            return False  # the user's own hooks expect the window's gradients in .grad
        trained = (p for p in self._step.parameters if p.requires_grad)
        return self._room.is_free(sum(p.numel() * p.element_size() for p in trained))


def _check_finite(losses: dict[str, Tensor]) -> None:
    values = {name: loss.item() for name, loss in losses.items()}
    if not all(map(math.isfinite, values.values())):
        found = ", ".join(f"{name}={value}" for name, value in values.items())
        raise InvalidInputError(
            f"the loss is not finite from the start ({found}); look for NaN in the inputs, log(0) or a division "
            "by 0 in the loss, or too large initial weights"
        )


def left_behind(error: Exception, rank: int, step: int) -> StartAgainError:
    """Return what is raised where one rank lacked memory while the others began to make an update.

    Args:
        error: The lack.
        rank: This rank.
        step: The number of the update.
    """
    return StartAgainError(
        f"rank {rank} ran out of memory ({_oom.first_line(error)}) where the others make update {step}, and it cannot "
        "make it after them; every process has to be started again, as torchrun does with --max-restarts, and goes on "
        "from the last checkpoint where fit has a checkpoint="
    )


def refuse_to_try_for_ever(events: Sequence[MemoryEvent], memory: MemoryBackend) -> None:
    """Give up what lacks memory again while no micro-batch is at work: a smaller cut is no help there.

    Unscaling, clipping and the optimizer do not depend on the cut, so they are tried once more, with the caches let go.

    Args:
        events: What memory ran out in, in this window; the last of them of no micro-batch.
        memory: Where it ran out.

    Raises:
        DoesNotFitError: That was the last try.
    """
    event = events[-1]
    tries = _TRIES_TO_WEIGH if event.phase == "weigh" else 2
    in_a_row = itertools.takewhile(lambda earlier: earlier.size is None, reversed(events))
    # What another rank lacks ends its own tries, and so this training.
    if event.phase != ELSEWHERE and sum(earlier.phase == event.phase for earlier in in_a_row) >= tries:
        what = _WITHOUT_SIZE.get(event.phase, f"the {event.phase} step")
        raise DoesNotFitError(
            f"{what} does not fit on {memory.name} even with no activations alive ({event.message}); try "
            "an optimizer with less state, foreach=False, or a smaller model"
        )
