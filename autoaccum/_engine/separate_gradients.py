"""Collects one micro-batch's gradients separately and adds them to the window's once the micro-batch is complete.

Autograd adds to `.grad` as it goes, so a failed backward pass has added some shares and not others. Collected
separately, they can be discarded, at the cost of memory for a second set of gradients. They are added in order of
arrival, so that every sum is bit for bit the one that autograd would have computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autoaccum._system import signals

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from torch.utils.hooks import RemovableHandle


class Aside:
    """A context that collects gradients separately. A normal exit adds them; an exception discards them.

    Args:
        parameters: The parameters to collect gradients for.

    Attributes:
        adding: Whether adding has begun. If it fails, the sums cannot be undone.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.adding = False
        self._parameters = parameters
        self._before: list[Tensor | None] = []
        self._arrived: dict[nn.Parameter, list[Tensor]] = {}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        # If an interrupt left a hook behind unrecorded, it would keep taking gradients away.
        with signals.held():
            self._before = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)

    def __exit__(self, kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        arrived, before = self._arrived, self._before
        self.drop()
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient
        if kind is None:
            self._add(arrived)

    def drop(self) -> None:
        """Release everything, also for a window abandoned because of an interrupt as the block began or ended."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._before, self._arrived = [], [], {}

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._arrived.setdefault(parameter, []).append(parameter.grad)
        parameter.grad = None

    def _add(self, arrived: dict[nn.Parameter, list[Tensor]]) -> None:
        self.adding = True
        with torch.no_grad():
            for parameter, several in arrived.items():
                if parameter.grad is None:
                    parameter.grad = several.pop(0)
            # In rounds, since a tensor must not appear twice in one list.
            while arrived := {parameter: several for parameter, several in arrived.items() if several}:
                _add_lists([(parameter, several.pop(0)) for parameter, several in arrived.items()])


def _add_lists(pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    sums, shares = [], []
    for parameter, share in pairs:
        assert parameter.grad is not None
        if parameter.grad.layout is torch.strided and share.layout is torch.strided:
            sums.append(parameter.grad)
            shares.append(share)
        else:  # autograd's own behavior if either is sparse
            parameter.grad = parameter.grad + share
    if sums:
        torch._foreach_add_(sums, shares)
