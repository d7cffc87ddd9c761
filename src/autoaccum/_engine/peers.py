"""What the processes of one training do together in a window, and the process that trains alone.

A window is made in the same steps either way: each process accumulates the gradient of its part, the parts are reduced
to the gradient of the whole window, and each process steps its optimizer. `Alone` is the first implementation of
`Peers`; those for several ranks are in `_distributed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from autoaccum._engine.gradients import Reduced
from autoaccum._loss.reported import means

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from autoaccum._data.batches import Window
    from autoaccum._engine.gradients import Given
    from autoaccum._engine.optimizer_step import Update, Updates
    from autoaccum._sizing.controller import Sizing

    BeforeUpdate = Callable[[dict[str, Tensor], int], None]


class SharedWeights(Protocol):
    """What the whole window weighs, where a process has to know it before it works on its part."""

    totals: Mapping[str, float]
    # By what all losses are multiplied, where what adds up the gradients divides them.
    multiplier: float

    def of_pairs(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Return what (sum, weight) pairs weigh in the whole window, given what they weigh in this part."""


class Sending(Protocol):
    """Sends a window's gradients to other processes while the last micro-batch still makes others."""

    def offer(self) -> None:
        """Called before a window's micro-batches, when what they weigh is known."""

    def last(self) -> AbstractContextManager[None]:
        """Return a context for the last micro-batch."""

    def spoil(self) -> None:
        """Called when gradients are given up."""


class Work(Protocol):
    """The micro-batches of this process's part of a window."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    size: int | None

    def start_over(self, share: SharedWeights | None = None) -> None:
        """Put everything back as it was before the window."""


class Talk(Protocol):
    """Messages between ranks, as an evaluation sends them."""

    @property
    def size(self) -> int: ...

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Return what each rank has said, by rank."""

    def exchange_tensors(self, what: str, value: Any) -> list[Any]:
        """Return what each rank has said, with tensors in it."""


class Peers(Protocol):
    """The processes of a training, as one of them sees them.

    Attributes:
        is_part: Whether other processes have other parts of the same windows.
        is_decided: Whether the others make, or have made, the update of the present window, whatever happens here.
        sending: Sends gradients while the last micro-batch is made; None where that is not done.
    """

    is_part: bool
    is_decided: bool

    @property
    def sending(self) -> Sending | None: ...

    def check_parameters(self) -> None:
        """See that the parameters that are trained now can be.

        Raises:
            InvalidInputError: Some have come of which other processes know nothing.
        """

    def begin(self, window: Window, sizing: Sizing) -> SharedWeights | None:
        """Begin a window; return what all of it weighs, where that has to be known beforehand.

        Args:
            window: This process's part.
            sizing: How this process cuts it.
        """

    def prepare(self) -> None:
        """Make ready for an attempt at the window."""

    def expected_gradients(self) -> int | None:
        """Return how many parameters will have a gradient; None for as many as have one now."""

    def reduce(self, given: Given, work: Work, before_update: BeforeUpdate) -> Reduced | None:
        """Reduce what all processes have to the gradient and the losses of the whole window.

        Args:
            given: What the micro-batches of this part have given.
            work: Those micro-batches.
            before_update: Called with the window's losses and its samples while there still is a way back.

        Returns:
            The window; None where the attempt has to be made again.
        """

    def commit(self, reduced: Reduced) -> Update:
        """Step the optimizer, as all processes do now."""

    def failed(self, error: Exception, work: Work, number: int) -> None:
        """See what a failure of this process means for the others, and raise where it ends the training.

        Args:
            error: The failure.
            work: The micro-batches of the window.
            number: The number of the update.
        """


class Alone:
    """The only process of a training.

    Args:
        updates: Makes the updates.
    """

    is_part = is_decided = False
    sending = None

    def __init__(self, updates: Updates) -> None:
        self._updates = updates

    def check_parameters(self) -> None:
        """Do nothing: any parameters can be trained."""

    def begin(self, window: Window, sizing: Sizing) -> None:
        """Do nothing: the part is the window."""

    def prepare(self) -> None:
        """Do nothing: nobody waits."""

    def expected_gradients(self) -> None:
        """Return None: those that are there."""

    def reduce(self, given: Given, work: Work, before_update: BeforeUpdate) -> Reduced:  # noqa: ARG002 - as Peers has it
        """Correct, unscale and clip the gradient, which is the whole window's already."""
        losses, correction = given.losses, given.correction
        if given.pair_weight is not None:
            losses = given.corrected_losses()
        before_update(losses, given.samples)
        norm = self._updates.prepare(correction)
        return Reduced(losses, means(given.slots) if given.reported else {}, given.samples, norm)

    def commit(self, reduced: Reduced) -> Update:
        """Step the optimizer. Lack of memory arrives as it is: the window can be made again."""
        return self._updates.commit(reduced.grad_norm)

    def failed(self, error: Exception, work: Work, number: int) -> None:
        """Do nothing: nobody else hears of it."""
