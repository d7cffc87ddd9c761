"""Watches what happens to `.grad` while a batch's gradient is computed, where it belongs to the user.

Hooks may run an optimizer, clear gradients, or replace them; a loss may reach parameters of other modules, whose
gradients nobody would restore. Each would make a wrong gradient without a word.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._engine.forward_backward import GradientStep

_GRADIENT, _HOOKS = attrgetter("grad"), attrgetter("_post_accumulate_grad_hooks")


class WatchedGradients:
    """Checks the gradients of a step before and after each backward pass.

    Args:
        step: The step, which notifies this of its backward passes from now on.
    """

    def __init__(self, step: GradientStep) -> None:
        self._step = step
        self._has_looked = False
        self._before: list[Tensor | None] = []
        step.watch = self

    def look_again(self) -> None:
        """Check the next graph: the modules have changed."""
        self._has_looked = False

    def refuse_hooks(self) -> None:
        """Check that no hook runs after a gradient is accumulated.

        Raises:
            InvalidInputError: One does.
        """
        if any(map(_HOOKS, self._step.parameters)):
            raise InvalidInputError(
                "a parameter has a post-accumulate-grad hook, as an optimizer that steps in the backward pass adds "
                "them, and it would run for each micro-batch; remove the hook, and step after backward()"
            )

    def begin(self, total: Tensor) -> None:
        """Check a loss before its backward pass.

        Raises:
            InvalidInputError: Its gradient reaches a parameter that is not the step's.
        """
        if not self._has_looked:
            known = set(self._step.parameters)
            strangers = [one for one in _leaves(total) if isinstance(one, nn.Parameter) and one not in known]
            if strangers:
                raise InvalidInputError(
                    f"the gradient of the loss reaches {len(strangers)} parameters that are not the model's, the first "
                    f"of shape {tuple(strangers[0].shape)}; pass all modules that the loss uses, as in "
                    "model=torch.nn.ModuleList([model, other]) with closure=, or freeze the others"
                )
            self._has_looked = self._step.sources_left == 0
        self._before = list(map(_GRADIENT, self._step.parameters))

    def end(self) -> None:
        """Check that the backward pass added to gradients, and that nothing took them away.

        Raises:
            InvalidInputError: A gradient was cleared or replaced.
        """
        before, self._before = self._before, []
        for parameter, gradient in zip(self._step.parameters, before, strict=True):
            # Autograd adds to dense gradients in place.
            if gradient is None or parameter.grad is gradient:
                continue
            if parameter.grad is None or gradient.layout is torch.strided is parameter.grad.layout:
                raise InvalidInputError(
                    f"a hook cleared or replaced .grad of a parameter of shape {tuple(parameter.shape)} during the "
                    "backward pass, and with it what earlier micro-batches added; change gradients after backward(), "
                    "or return the changed gradient from a hook of register_hook"
                )


def _leaves(total: Tensor) -> list[Tensor]:
    """Return the tensors that the backward pass of a loss adds gradients to."""
    found: dict[Tensor, None] = {}
    seen: set[Any] = set()
    ahead: list[Any] = [total.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[leaf] = None
        ahead += [further for further, _ in node.next_functions]
    return list(found)
