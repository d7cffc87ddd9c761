"""Gives a copy of a model low-rank adapters (LoRA), without memory, to predict what training them alone would take.

The adapters are peft's for `LoraConfig(r=16, target_modules="all-linear")`: beside each linear layer but the output
layer, two narrow ones whose product is added to its result (E. Hu et al., "LoRA", arXiv 2106.09685).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._estimate.fake import Stage

if TYPE_CHECKING:
    from collections.abc import Callable

RANK = 16


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, **like)
        self.up = nn.Linear(RANK, base.out_features, bias=False, **like)

    @property
    def weight(self) -> Tensor:
        """The layer's own weight, which some models read."""
        return self.base.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the layer's result and the adapter's, added."""
        result: Tensor = self.base(inputs)
        adapted: Tensor = self.up(self.down(inputs)) * 2.0
        return result + adapted


def with_adapters(model: nn.Module) -> nn.Module | None:
    """Return a copy of a model on the meta device in which only adapters are trained; None without linear layers.

    Raises:
        InvalidInputError: The model cannot be copied.
    """
    made: nn.Module = Stage(torch.device("meta")).copied(model)
    places = [
        (parent, name, child)
        for parent in made.modules()
        for name, child in parent.named_children()
        # Subclasses are read by their owners, as attention reads its projection.
        if type(child) is nn.Linear
    ]
    if len(places) < 2:  # noqa: PLR2004 - the output layer and another
        return None
    made.requires_grad_(False)
    for parent, name, child in places[:-1]:
        setattr(parent, name, _Adapted(child))
    return made


def alike(optimizer: torch.optim.Optimizer) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes an optimizer of the same class and learning rate for other parameters."""
    kind: Any = type(optimizer)
    lr = optimizer.param_groups[0].get("lr")
    return lambda parameters: kind(parameters) if lr is None else kind(parameters, lr=float(lr))
