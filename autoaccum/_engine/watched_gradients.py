"""Watches what happens to `.grad` while a batch's gradient is computed, where it belongs to the user.

Besides what `UntouchedGradients` refuses, a hook may step an optimizer, and a loss may reach parameters of other
modules, or tensors that are no parameters, whose gradients nobody restores. Each would make a wrong gradient without a
word.
"""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autoaccum._engine.untouched_gradients import UntouchedGradients, nodes
from autoaccum._oom import is_oom, let_go
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._engine.forward_backward import GradientStep

_HOOKS = attrgetter("_post_accumulate_grad_hooks")


class WatchedGradients(UntouchedGradients):
    """Checks the gradients of a step before and after each backward pass, and what else a backward pass adds to.

    Args:
        step: The step, which notifies this of its backward passes from now on.
        looks_always: Whether a function of the user's may reach other modules in any micro-batch; otherwise the first
            one of each batch is looked at.
    """

    def __init__(self, step: GradientStep, *, looks_always: bool) -> None:
        super().__init__(step, "outside of Accumulator.backward()")
        self._looks_always = looks_always
        self._has_looked = False
        self._known: set[Tensor] = set()
        self._canary: tuple[nn.Parameter, Tensor] | None = None
        self._others: list[_Other] = []
        step.watch = self

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

    # --- a batch ------------------------------------------------------------------------------------------------------

    def begin_batch(self, tensors: Sequence[Tensor], *, has_earlier: bool) -> None:
        """Begin a batch, with no gradients.

        Args:
            tensors: The tensors of the batch.
            has_earlier: Whether there were gradients, so that a loss that clears them would show without micro-batches.
        """
        self._has_looked, self._known = False, set(self._step.parameters)
        known = [leaf for other in self._others if (leaf := other.leaf()) is not None]
        own = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
        self._others = [_Other(leaf) for leaf in dict.fromkeys(known + own)] if known or own else []
        if has_earlier:
            trained = [parameter for parameter in self._step.parameters if parameter.requires_grad]
            if trained:
                self._put_canary(min(trained, key=torch.numel))
        self.note()

    def _put_canary(self, parameter: nn.Parameter) -> None:
        """Give a parameter a gradient that nothing but a loss that clears gradients takes away."""
        try:
            gradient = torch.zeros_like(parameter, requires_grad=False)
        except Exception as error:
            if not is_oom(error):
                raise
            let_go(error)
            return
        parameter.grad = gradient
        self._canary = parameter, gradient

    def end_batch(self) -> None:
        """Release a batch."""
        self._remove_canary()
        super().forget()

    def begin_aside(self) -> None:
        """Check gradients before they are set aside for a micro-batch.

        Raises:
            InvalidInputError: They were changed.
        """
        super().begin_aside()
        if self._canary is not None:
            self._release_canary()

    def forget(self) -> None:
        """Record that all gradients of the batch were dropped, to begin it again."""
        self._canary = None
        super().forget()
        for other in self._others:
            other.begin_again()

    # --- a backward pass ----------------------------------------------------------------------------------------------

    def begin(self, total: Tensor) -> None:
        """Check a loss before its backward pass.

        Raises:
            InvalidInputError: Its gradient reaches a parameter that is not the step's, or gradients were changed.
        """
        super().begin(total)
        if self._canary is not None:
            self._release_canary()
        if self._looks_always or not self._has_looked:
            self._look_at(total)
            self._has_looked = self._step.sources_left == 0

    def _look_at(self, total: Tensor) -> None:
        """Check the tensors that the backward pass of a loss adds gradients to."""
        leaves = (getattr(node, "variable", None) for node in nodes(total))
        unknown = [leaf for leaf in leaves if leaf is not None and leaf not in self._known]
        strangers = [leaf for leaf in unknown if isinstance(leaf, nn.Parameter)]
        if strangers:
            raise InvalidInputError(
                f"the gradient of the loss reaches {len(strangers)} parameters that are not the model's, the first "
                f"of shape {tuple(strangers[0].shape)}; pass all modules that the loss uses, as in "
                "model=torch.nn.ModuleList([model, other]) with closure=, or freeze the others"
            )
        if unknown:
            watched = {other.leaf() for other in self._others}
            # Those that a pass makes itself (to differentiate by its inputs) end with it.
            self._others += [_Other(one) for one in unknown if one not in watched]

    def end(self) -> None:
        """Check that the backward pass added to gradients once, and that nothing took them away.

        Raises:
            InvalidInputError: A gradient was cleared, replaced or changed.
        """
        super().end()
        for other in self._others:
            other.note()

    # --- what is not restored -----------------------------------------------------------------------------------------

    def refuse_what_is_not_restored(self) -> None:
        """Check, once what failed was put back, that the failed passes added to no gradients of other tensors.

        Raises:
            InvalidInputError: They did.
        """
        for other in self._others:
            leaf = other.leaf()
            if leaf is not None and other.has_changed():
                raise InvalidInputError(
                    f"memory ran out after a backward pass had added to .grad of a tensor of shape {tuple(leaf.shape)} "
                    "that is no parameter of the model, and that gradient cannot be put back; make the tensor a "
                    "parameter of a module that is passed, or pass a smaller micro_batch, and clear that gradient"
                )

    def _release_canary(self) -> None:
        """Check gradients with the canary among them, and go on without it."""
        self.check()
        self._remove_canary()
        self.note()

    def _remove_canary(self) -> None:
        if self._canary is None:
            return
        parameter, gradient = self._canary
        self._canary = None
        if parameter.grad is gradient:
            parameter.grad = None


class _Other:
    """A leaf that is no parameter of the step, which autograd adds gradients to nevertheless.

    Args:
        leaf: The leaf, which is not kept alive.

    Attributes:
        leaf: Returns the leaf; None once it is gone.
    """

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = weakref.ref(leaf)
        self._expected = self._at_start = self._now()

    def note(self) -> None:
        """Record that its gradient is whole."""
        self._expected = self._now()

    def begin_again(self) -> None:
        """Record that the batch begins again, so its gradient would have to be what it was."""
        self._expected = self._at_start

    def has_changed(self) -> bool:
        """Whether its gradient is not what it has to be."""
        reference, version = self._now()
        return reference is not self._expected[0] or version != self._expected[1]

    def _now(self) -> tuple[weakref.ref[Tensor] | None, int]:
        leaf = self.leaf()
        gradient = None if leaf is None else leaf.grad
        # The same object as long as the gradient lives, so that `is` compares gradients.
        return (None, 0) if gradient is None else (weakref.ref(gradient), gradient._version)
