"""Refuses what changes `.grad` between the micro-batches of a window: losses, hooks and callbacks of the user's.

Each micro-batch adds to what those before it left in `.grad`, so a loss that clears it, or goes backward by itself,
would make a wrong gradient without a word. What runs for each micro-batch has no loop in Python over all parameters.
"""

from __future__ import annotations

import weakref
from collections import Counter
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autoaccum._engine.forward_backward import GradientStep

_GRADIENT, _VERSION = attrgetter("grad"), attrgetter("_version")
_HOOKS = attrgetter("_post_accumulate_grad_hooks")
# The function by which modules run their backward hooks.
_OF_MODULE_HOOKS = "BackwardHookFunctionBackward"


class UntouchedGradients:
    """Checks the gradients of a step before and after each backward pass.

    Args:
        step: The step, which calls this while it is its `watch`.
        elsewhere: Where the user may change gradients, for messages.
    """

    def __init__(self, step: GradientStep, elsewhere: str = "between windows") -> None:
        self._step = step
        self._elsewhere = elsewhere
        # The gradients as they have to be, and how often each has been changed in place; None before they are noted.
        self._gradients: list[Tensor | None] | None = None
        self._held: list[Tensor] = []
        self._versions: list[int] = []
        # Not kept alive: its graph holds the activations of a micro-batch that may have failed.
        self._total: weakref.ref[Tensor] | None = None

    def begin_aside(self) -> None:
        """Check gradients before they are set aside for a micro-batch.

        Raises:
            InvalidInputError: They were changed.
        """
        self.check()

    def note(self) -> None:
        """Record that gradients are as they have to be."""
        self._gradients = list(map(_GRADIENT, self._step.parameters))
        self._held = [gradient for gradient in self._gradients if gradient is not None]
        self._versions = list(map(_VERSION, self._held))

    def forget(self) -> None:
        """Record that all gradients of the window were dropped, to begin it again or to end it."""
        self._gradients, self._held = None, []

    def check(self) -> None:
        """Check that gradients are as they were when last noted.

        Raises:
            InvalidInputError: They are not.
        """
        if self._gradients is None:
            self.note()
            return
        are_same = all(map(is_, map(_GRADIENT, self._step.parameters), self._gradients))
        if are_same and list(map(_VERSION, self._held)) == self._versions:
            return
        versions = iter(self._versions)
        for parameter, gradient in zip(self._step.parameters, self._gradients, strict=True):
            version = 0 if gradient is None else next(versions)
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
                raise InvalidInputError(
                    f"a model, loss, closure or callback changed .grad of a parameter of shape "
                    f"{tuple(parameter.shape)} in the middle of a batch (by zero_grad(), backward() or an optimizer's "
                    "step); it may be called for each of several micro-batches, and again when memory runs out, so "
                    f"return the loss alone, and do this {self._elsewhere}"
                )

    def begin(self, total: Tensor) -> None:
        """Check gradients before the backward pass of a loss.

        Raises:
            InvalidInputError: They were changed.
        """
        self.check()
        self._total = weakref.ref(total)

    def end(self) -> None:
        """Check that the backward pass added to gradients once, and that nothing took them away.

        Raises:
            InvalidInputError: A gradient was cleared, replaced or changed.
        """
        assert self._gradients is not None
        if all(map(is_, map(_GRADIENT, self._step.parameters), self._gradients)):
            versions = list(map(_VERSION, self._held))
            if versions == [version + 1 for version in self._versions]:
                self._versions = versions
                return
        if not any(map(_HOOKS, self._step.parameters)):  # of which the user is told that they run each time
            self._compare()
        self.note()

    def _compare(self) -> None:
        assert self._gradients is not None
        total = None if self._total is None else self._total()
        versions = iter(self._versions)
        # Gradients may be parts of one tensor, as those of parameters that the model joins: they are changed together.
        together = Counter(map(_place, self._held))
        for parameter, gradient in zip(self._step.parameters, self._gradients, strict=True):
            version = 0 if gradient is None else next(versions)
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if parameter.grad is not gradient:
                # Autograd adds to dense gradients in place.
                if parameter.grad is None or parameter.grad.layout is torch.strided:
                    raise _changed_in_backward("cleared or replaced", parameter)
            elif gradient._version > version + together[_place(gradient)] and not _may_add_twice(total):
                raise _changed_in_backward("changed", parameter)


def _place(gradient: Tensor) -> int:
    return gradient.untyped_storage().data_ptr() if gradient.layout is torch.strided else id(gradient)


def _changed_in_backward(how: str, parameter: nn.Parameter) -> InvalidInputError:
    return InvalidInputError(
        f"a hook {how} .grad of a parameter of shape {tuple(parameter.shape)} during the "
        "backward pass, and with it what earlier micro-batches added; change gradients after backward(), "
        "or return the changed gradient from a hook of register_hook"
    )


def _may_add_twice(total: Tensor | None) -> bool:
    """Whether a function in the graph may run backward passes of its own, as a reentrant checkpoint does."""
    return total is None or any(
        isinstance(node, BackwardCFunction) and type(node).__name__ != _OF_MODULE_HOOKS for node in nodes(total)
    )


def nodes(total: Tensor) -> list[Any]:
    """Return the nodes of a loss's graph."""
    if total.grad_fn is None:
        return []
    found: list[Any] = [total.grad_fn]
    seen = set(found)
    for node in found:  # which grows
        for further, _ in node.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                found.append(further)
    return found
