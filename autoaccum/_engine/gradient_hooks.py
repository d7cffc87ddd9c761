"""Says once that hooks on gradients run for each micro-batch, and not once for the gradient of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from autoaccum._system.notices import Notices


def hooked(parameters: Sequence[nn.Parameter], *, after: bool = False) -> list[nn.Parameter]:
    """Return the parameters that have hooks on their gradients.

    Args:
        parameters: The parameters to look at.
        after: Whether to look only for hooks that run after a gradient is accumulated.
    """
    names = ("_post_accumulate_grad_hooks",) if after else ("_post_accumulate_grad_hooks", "_backward_hooks")
    return [parameter for parameter in parameters if any(getattr(parameter, name, None) for name in names)]


def tell_of_hooks(parameters: Sequence[nn.Parameter], notices: Notices) -> None:
    """Say if parameters have hooks on their gradients, in a window of several micro-batches."""
    if found := len(hooked(parameters)):
        notices.say(
            f"{found} parameters have gradient hooks, which run for each micro-batch and not once a window: hooks that "
            "scale gradients are exact, others (clipping, dividing by a norm) are not; change the gradient of a window "
            "once, in optimizer.register_step_pre_hook, or with clip_grad_norm=",
            key="gradient hooks",
        )


def no_gradient(parameters: Sequence[nn.Parameter]) -> InvalidInputError:
    """Return the error for a backward pass that left no gradient."""
    why = ""
    if hooked(parameters, after=True):
        why = (
            ": a post-accumulate-grad hook takes them, as an optimizer that steps in the backward pass does. It would "
            "step for each micro-batch; remove the hooks, and pass the optimizer"
        )
    return InvalidInputError(f"the backward pass left no gradient on any parameter of the model{why}")
