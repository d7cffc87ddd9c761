"""Watches what happens to `.grad` while a batch's gradient is computed, where it belongs to the user.

Hooks, losses and callbacks may run an optimizer, clear gradients, or change them; a loss may reach parameters of other
modules, or tensors that are no parameters, whose gradients nobody restores. Each would make a wrong gradient without a
word.
"""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from autoaccum._oom import is_oom, let_go
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._engine.forward_backward import GradientStep

_GRADIENT, _HOOKS = attrgetter("grad"), attrgetter("_post_accumulate_grad_hooks")
# The function by which modules run their backward hooks.
_OF_MODULE_HOOKS = "BackwardHookFunctionBackward"
# What a tensor's gradient is, and how often it has been changed in place.
_State = tuple[Tensor | None, int]


class WatchedGradients:
    """Checks the gradients of a step before and after each backward pass, and between them.

    Args:
        step: The step, which notifies this of its backward passes from now on.
    """

    def __init__(self, step: GradientStep) -> None:
        self._step = step
        self._has_looked = False
        self._seen: list[_State] | None = None
        self._total: Tensor | None = None
        self._canary: tuple[nn.Parameter, Tensor] | None = None
        self._others: list[_Other] = []
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

    # --- a batch ------------------------------------------------------------------------------------------------------

    def begin_batch(self, tensors: Sequence[Tensor], *, has_earlier: bool) -> None:
        """Begin a batch, with no gradients.

        Args:
            tensors: The tensors of the batch.
            has_earlier: Whether there were gradients, so that a loss that clears them would show without micro-batches.
        """
        known = [leaf for other in self._others if (leaf := other.leaf()) is not None]
        own = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
        self._others = [_Other(leaf) for leaf in dict.fromkeys(known + own)] if known or own else []
        trained = [parameter for parameter in self._step.parameters if parameter.requires_grad]
        if has_earlier and trained:
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
        self._seen = self._total = None

    def begin_micro_batch(self, *, is_first: bool) -> None:
        """Check that nothing has changed gradients since the last one.

        Raises:
            InvalidInputError: Something has.
        """
        self.check()
        if not is_first and self._remove_canary():
            self.note()

    def note(self) -> None:
        """Record that gradients are as they have to be."""
        self._seen = [_state(parameter) for parameter in self._step.parameters]

    def forget(self) -> None:
        """Record that all gradients of the batch were dropped, to begin it again."""
        self._canary = self._seen = None
        for other in self._others:
            other.begin_again()

    def check(self) -> None:
        """Check that gradients are as they were when last noted.

        Raises:
            InvalidInputError: They are not.
        """
        if self._seen is None:
            self.note()
            return
        for parameter, (gradient, version) in zip(self._step.parameters, self._seen, strict=True):
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version):
                raise InvalidInputError(
                    f"a model, loss, closure or callback changed .grad of a parameter of shape "
                    f"{tuple(parameter.shape)} in the middle of a batch (by zero_grad(), backward() or an optimizer's "
                    "step); it may be called for each of several micro-batches, and again when memory runs out, so "
                    "return the loss alone, and do this outside of Accumulator.backward()"
                )

    # --- a backward pass ----------------------------------------------------------------------------------------------

    def begin(self, total: Tensor) -> None:
        """Check a loss before its backward pass.

        Raises:
            InvalidInputError: Its gradient reaches a parameter that is not the step's, or gradients were changed.
        """
        self.check()
        if self._remove_canary():
            self.note()
        if not self._has_looked:
            self._look_at(_leaves(total))
            self._has_looked = self._step.sources_left == 0
        self._total = total

    def _look_at(self, leaves: Sequence[Tensor]) -> None:
        known = set(self._step.parameters)
        strangers = [one for one in leaves if isinstance(one, nn.Parameter) and one not in known]
        if strangers:
            raise InvalidInputError(
                f"the gradient of the loss reaches {len(strangers)} parameters that are not the model's, the first "
                f"of shape {tuple(strangers[0].shape)}; pass all modules that the loss uses, as in "
                "model=torch.nn.ModuleList([model, other]) with closure=, or freeze the others"
            )
        watched = {other.leaf() for other in self._others}
        # Those that a pass makes itself (to differentiate by its inputs) end with it.
        self._others += [_Other(one) for one in leaves if not isinstance(one, nn.Parameter) and one not in watched]

    def end(self) -> None:
        """Check that the backward pass added to gradients once, and that nothing took them away.

        Raises:
            InvalidInputError: A gradient was cleared, replaced or changed.
        """
        assert self._seen is not None
        total, self._total = self._total, None
        for parameter, (gradient, version) in zip(self._step.parameters, self._seen, strict=True):
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if parameter.grad is not gradient:
                # Autograd adds to dense gradients in place.
                if parameter.grad is None or parameter.grad.layout is torch.strided:
                    raise _changed_in_backward("cleared or replaced", parameter)
            elif gradient._version > version + 1 and not _may_add_twice(total):
                raise _changed_in_backward("changed", parameter)
        self.note()
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

    def _remove_canary(self) -> bool:
        """Take the canary away; return whether there was one."""
        if self._canary is None:
            return False
        parameter, gradient = self._canary
        self._canary = None
        if parameter.grad is gradient:
            parameter.grad = None
        return True


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


def _state(tensor: Tensor) -> _State:
    gradient = tensor.grad
    return gradient, 0 if gradient is None else gradient._version


def _changed_in_backward(how: str, parameter: nn.Parameter) -> InvalidInputError:
    return InvalidInputError(
        f"a hook {how} .grad of a parameter of shape {tuple(parameter.shape)} during the "
        "backward pass, and with it what earlier micro-batches added; change gradients after backward(), "
        "or return the changed gradient from a hook of register_hook"
    )


def _may_add_twice(total: Tensor | None) -> bool:
    """Whether a function in the graph may run backward passes of its own, as a reentrant checkpoint does."""
    return total is None or any(
        isinstance(node, BackwardCFunction) and type(node).__name__ != _OF_MODULE_HOOKS for node in _nodes(total)
    )


def _leaves(total: Tensor) -> list[Tensor]:
    """Return the tensors that the backward pass of a loss adds gradients to."""
    leaves = (getattr(node, "variable", None) for node in _nodes(total))
    return list(dict.fromkeys(leaf for leaf in leaves if leaf is not None))


def _nodes(total: Tensor) -> list[Any]:
    """Return the nodes of a loss's graph."""
    seen: dict[Any, None] = {}
    ahead: list[Any] = [total.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        ahead += [further for further, _ in node.next_functions]
    return list(seen)
