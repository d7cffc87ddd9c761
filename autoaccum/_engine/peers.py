"""How the processes of one training make a window together, and how one does alone.

Every window takes the same steps: each process accumulates the gradient of its part, the parts are reduced to the
gradient of the whole window, and each process steps its optimizer. Several ranks are in `_distributed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from autoaccum._engine.gradients import LossSum, WindowResult
from autoaccum._loss.reported import means
from autoaccum._loss.settling import Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import Losses, PartResult
    from autoaccum._loss.summands import SummandKey
    from autoaccum._sizing.sizing import Sizing


class BeginAgain(Exception):  # noqa: N818 - it is no error of the user's
    """The parts of a window do not fit together: all processes make it again.

    Args:
        totals: What is known of the weights of all parts.
    """

    def __init__(self, totals: Totals | None) -> None:
        super().__init__("processes do not fit together")
        self.totals = totals


class Talk(Protocol):
    """Messages between ranks, in rank order, as used by an evaluation."""

    @property
    def size(self) -> int: ...

    def exchange(self, what: str, value: Any) -> list[Any]: ...


class Peers:
    """The processes that make windows together: their gradients, and optimizer steps from them. Here there is one."""

    # Whether other processes have other parts of the same windows.
    is_part: bool = False
    # Whether the others make, or have made, the current window's optimizer step, whatever happens here.
    is_decided: bool = False
    # Whether the others would wait for this process if it began its part again by itself.
    is_awaited: bool = False
    # What predicts the weights of the current window, or those, if its parts need the same.
    totals: Totals | None = None
    # Samples of several processes on which losses are tried before this window; None for those of this one.
    samples_to_try: Window | None = None

    def __init__(self, step: GradientStep) -> None:
        self._step = step
        self._optimizer_steps = step.optimizer_steps

    def before_reset(self, note: Callable[[], object]) -> None:
        """Have `note` called before the device's peak is reset here."""

    def check_parameters(self) -> None:
        """Raise InvalidInputError if there are new parameters that other processes do not know."""

    def begin(self, window: Window, sizing: Sizing) -> Totals | None:  # noqa: ARG002
        """Begin this part of a window; return what predicts the weights of all of it, if all need the same."""
        return None

    def runs_forward_first(self) -> bool:
        """Whether the window runs forward first, since the weights of its summands cannot be predicted."""
        return self._step.objective.knowledge.runs_forward_first

    def totals_of(self, weights: Mapping[SummandKey, float], samples: int) -> Totals:
        """Return the weights of the whole window, given those of this part."""
        return Totals(weights, samples, is_exact=True)

    def begin_attempt(self) -> None:
        """Prepare for an attempt at the window."""

    def reduce(self, given: PartResult) -> WindowResult:
        """Reduce the parts of all processes to the gradient and the losses of the whole window, unscaled and clipped.

        Returns:
            The window; of 0 samples if no process has any, or it is left out.

        Raises:
            BeginAgain: All have to make the window again, since one has learned more about what a loss runs over.
            NotSettled: This process's predictions of the weights are off by no common factor.
        """
        # The gradient already is that of the whole window.
        factor = 1.0 if given.weights is None else given.weights.correction()
        losses: Losses = given.losses
        if not isinstance(factor, float) or factor != 1.0:
            losses = {name: LossSum([loss.total() * factor]) for name, loss in losses.items()}
        norm = None
        if self._optimizer_steps is not None:
            norm = self._optimizer_steps.unscale_and_clip(factor)
        elif not isinstance(factor, float) or factor != 1.0:
            gradients = [one.grad for one in self._step.parameters if one.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)
        return WindowResult(losses, means(given.slots) if given.reported else {}, given.samples, norm, given.spread)

    def decide(self, reduced: WindowResult) -> WindowResult:
        """Agree that all processes make the window's optimizer step; return the window, as it is for the step."""
        return reduced

    def lacking_size(self, error: Exception, size: int | None) -> int | None:  # noqa: ARG002
        """Tell the others of a failure, and return the size of the micro-batch that lacks memory, here or there.

        Raises:
            Exception: The error itself, if the others make the optimizer step.
        """
        return size

    def expected_gradients(self) -> Sequence[nn.Parameter]:
        """Return parameters that will have a gradient, of which some have one now."""
        return ()

    def commit(self) -> bool:
        """Step the optimizer, which all processes do now; return whether the scaler skipped it.

        Out-of-memory errors of a process that is alone pass through; `OptimizerSteps.commit` has then undone its step.
        """
        assert self._optimizer_steps is not None
        return self._optimizer_steps.commit()
