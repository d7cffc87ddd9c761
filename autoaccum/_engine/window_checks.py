"""Refuses, in windows that are due for all checks, what makes a wrong gradient without a word.

Each micro-batch adds to what those before it left in `.grad`. A loss, a closure or a hook that clears it, goes backward
by itself or steps an optimizer would do harm, and so would a loss that reaches parameters of other modules, whose
gradients nobody restores.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum._engine.metric_counts import is_metric
from autoaccum._loss.graph_reader import nodes_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._loss.objective import Objective
    from autoaccum._system.notices import Notices


# The function by which modules run their backward hooks.
_OF_MODULE_HOOKS = "BackwardHookFunctionBackward"


class GradientChecks:
    """Checks the gradients of a step before and after each backward pass of one window.

    Raises:
        InvalidInputError: By all methods: a check fails.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, owns_gradients: bool) -> None:
        self._parameters = parameters
        self._known = None if owns_gradients else set(parameters)
        self._elsewhere = "between windows" if owns_gradients else "outside of Accumulator.backward()"
        # Not kept alive: its graph holds the activations of a micro-batch that may have failed.
        self._total: weakref.ref[Tensor] | None = None
        self._note()

    def _note(self) -> None:
        """Record that gradients are as they have to be, and how often each has been changed in place."""
        self._before = [(parameter, parameter.grad, _version(parameter.grad)) for parameter in self._parameters]

    def begin(self, total: Tensor) -> None:
        """Check the gradients before the backward pass of a loss, and that it reaches no strangers."""
        self.check()
        self._total = weakref.ref(total)
        if self._known is None:
            return
        leaves = (getattr(node, "variable", None) for node in nodes_of(total.grad_fn))
        strangers = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and leaf not in self._known]
        if strangers:
            raise InvalidInputError(
                f"the gradient of the loss reaches {len(strangers)} parameters that are not the model's, the first "
                f"of shape {tuple(strangers[0].shape)}; pass all modules that the loss uses, as in "
                "model=torch.nn.ModuleList([model, other]) with closure=, or freeze the others"
            )

    def check(self) -> None:
        """Check that gradients are as the last backward pass left them."""
        for parameter, gradient, version in self._before:
            if parameter.grad is not gradient or _version(gradient) != version:
                raise InvalidInputError(
                    f"a model, loss, closure or callback changed .grad of a parameter of shape "
                    f"{tuple(parameter.shape)} in the middle of a batch (by zero_grad(), backward() or an optimizer's "
                    "step); it may be called for each of several micro-batches, and again when memory runs out, so "
                    f"return the loss alone, and do this {self._elsewhere}"
                )

    def end(self) -> None:
        """Check that the backward pass added to gradients once, and that nothing took them away."""
        if not hooked(self._parameters, after=True):  # of which the user is told that they run each time
            self._compare()
        self._note()

    def _compare(self) -> None:
        total = None if self._total is None else self._total()
        # Gradients may be parts of one tensor, as those of parameters that the model joins: they are changed together.
        together = Counter(_place(gradient) for _, gradient, _ in self._before if gradient is not None)
        for parameter, gradient, version in self._before:
            if gradient is None or gradient.layout is not torch.strided:
                continue
            now, how = parameter.grad, ""
            if now is not gradient:
                if now is None or now.layout is torch.strided:  # to which autograd adds in place
                    how = "cleared or replaced"
            elif _version(now) > version + together[_place(now)] and not _may_add_twice(total):
                how = "changed"
            if how:
                raise InvalidInputError(
                    f"a hook {how} .grad of a parameter of shape {tuple(parameter.shape)} during the backward pass, "
                    "and with it what earlier micro-batches added; change gradients after backward(), or return the "
                    "changed gradient from a hook of register_hook"
                )


def _version(gradient: Tensor | None) -> int:
    return 0 if gradient is None else gradient._version


def _place(gradient: Tensor) -> int:
    return gradient.untyped_storage().data_ptr() if gradient.layout is torch.strided else id(gradient)


def _may_add_twice(total: Tensor | None) -> bool:
    """Whether a function in the graph may run backward passes of its own, as a reentrant checkpoint does."""
    return total is None or any(
        isinstance(node, BackwardCFunction) and type(node).__name__ != _OF_MODULE_HOOKS
        for node in nodes_of(total.grad_fn)
    )


def hooked(parameters: Sequence[nn.Parameter], *, after: bool = False) -> list[nn.Parameter]:
    """Return the parameters with hooks on their gradients, or only with hooks `after` a gradient is accumulated."""
    names = ("_post_accumulate_grad_hooks",) if after else ("_post_accumulate_grad_hooks", "_backward_hooks")
    return [parameter for parameter in parameters if any(getattr(parameter, name, None) for name in names)]


def refuse_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Raise InvalidInputError if a hook runs after a gradient is accumulated."""
    if hooked(parameters, after=True):
        raise InvalidInputError(
            "a parameter has a post-accumulate-grad hook, as an optimizer that steps in the backward pass adds them, "
            "and it would run for each micro-batch; remove the hook, and step after backward()"
        )


def warn_of_hooks(parameters: Sequence[nn.Parameter], notices: Notices) -> None:
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


# --- layers that move -------------------------------------------------------------------------------------------------


# The counter of normalisation layers, which only momentum=None reads.
_OF_NORMS = "num_batches_tracked"


def warn_of_moving_state(objective: Objective, moved: Sequence[str]) -> None:
    """Warn of the buffers and parameters that forward passes have moved in a window of several, given their names."""
    if not moved:
        return
    # Told elsewhere, or meant to move: BatchNorm's statistics, metrics' states.
    named = (pair for module in objective.modules for pair in module.named_modules())
    own = [(path, part) for path, part in named if isinstance(part, _BatchNorm) or is_metric(part)]
    usual = {f"{path}.{name}" if path else name for path, part in own for name in part._buffers}
    objective.knowledge.said.of_state(name for name in moved if name not in usual and not name.endswith(_OF_NORMS))
