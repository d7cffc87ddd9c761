"""Tells to which module a storage belongs.

A tensor from before the step belongs to the module that has its parameter. What an operator allocates belongs to the
module whose forward pass runs it; in the backward pass, to the one whose forward pass made the node that runs. Autograd
numbers nodes in the order in which they are made, so it suffices to note at which numbers the module changed.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as hooks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn

# What runs outside of the model after its forward pass, and the path of losses that are modules.
LOSS = "(loss)"
# The model itself, whose path is empty.
MODEL = "(model)"
# Operators that only losses call, wherever they are called; their backward passes begin with the same names.
_OF_LOSSES = (
    "aten._log_softmax",
    "aten.nll_loss",
    "aten.mse_loss",
    "aten.binary_cross_entropy",
    "aten.huber_loss",
    "aten.smooth_l1_loss",
    "aten.kl_div",
    "aten._ctc_loss",
    "aten._cudnn_ctc_loss",
)


def is_of_loss(module: str, operator: str) -> bool:
    """Whether a storage that an operator allocates for a module belongs to the loss."""
    return module.startswith(LOSS) or operator.startswith(_OF_LOSSES)


class Owners:
    """Knows the modules of one step.

    Args:
        modules: The model first, then losses that are modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = tuple(modules)  # names are stored by id, which is valid only as long as these exist
        self._names: dict[int, str] = {}
        for number, root in enumerate(modules):
            for path, part in root.named_modules():
                name = ".".join(filter(None, ("" if number == 0 else LOSS, path))) or MODEL
                self._names.setdefault(id(part), name)
        self._begin()

    def _begin(self) -> None:
        self._by_tensor: dict[int, str] = {}
        self._running: list[str] = []
        self._model_ran = False
        # For each change of the running module, the number of its first node, and its name.
        self._changes: list[tuple[int, str]] = []
        self._made = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note which module runs, while entered."""
        self._begin()
        for part in (part for root in self._modules for part in root.modules()):
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                self._by_tensor.setdefault(id(tensor), self._names.get(id(part), ""))
        # Hooks on all modules of the process: some modules take other paths if they have hooks themselves.
        begins = hooks.register_module_forward_pre_hook(self._enter)
        # A checkpoint leaves its block by an exception once it has computed what is needed again.
        ends = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            begins.remove()
            ends.remove()

    def own(self, tensors: Iterable[Tensor], of: nn.Parameter) -> None:
        """Note that tensors (a gradient, the optimizer's state) belong where a parameter does."""
        self._by_tensor.update((id(tensor), self.of(of)) for tensor in tensors)

    def of(self, tensor: Tensor) -> str:
        """Return the module of a tensor from before the step."""
        return self._by_tensor.get(id(tensor), "")

    def at_work(self, phase: str) -> str:
        """Return the module for which an operator runs in a phase of the step."""
        if not self._running and phase == "backward":
            return self._maker_of(torch._C._current_autograd_node())
        outside = LOSS if self._model_ran and phase == "forward" else ""
        name = self._running[-1] if self._running else outside
        if not self._changes or self._changes[-1][1] != name:
            # The first node of this module is the next one after what the module before had made.
            self._changes.append((self._made, name))
        self._made = torch._C._autograd._get_sequence_nr()
        return name

    def _enter(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        if id(module) in self._names:
            self._running.append(self._names[id(module)])

    def _leave(self, module: nn.Module, _inputs: tuple[Any, ...], _outputs: Any) -> None:
        name = self._names.get(id(module))
        if name is not None and name in self._running:
            while self._running.pop() != name:
                pass
            self._model_ran = self._model_ran or name == MODEL

    def _maker_of(self, node: Any) -> str:
        """Return the module whose forward pass made a node of the graph."""
        if node is None:
            return LOSS if self._model_ran else ""
        at = bisect_right(self._changes, node._sequence_nr(), key=_number) - 1
        return self._changes[at][1] if at >= 0 else ""


def _number(change: tuple[int, str]) -> int:
    return change[0]
