"""Lets a copy of a model keep every layer, where training drops layers at random (LayerDrop, arXiv:1909.11556).

Comes in: a copy of a model. Goes out: the same with its rates at 0. What a step needs at most is what it needs with all
layers; a trace in which some happen to be dropped tells less, and each of its sizes something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["NOTE", "drops_layers", "keep_every_layer"]

NOTE = "layers that training drops at random (layerdrop) are counted as kept; a step that drops some needs less"


def drops_layers(model: nn.Module) -> bool:
    """Whether a model drops layers in training."""
    return any(True for _ in _rates(model))


def keep_every_layer(model: nn.Module) -> None:
    """Set the rates at which a model drops layers to 0."""
    for holder, name in list(_rates(model)):
        setattr(holder, name, 0.0)


def _rates(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield each rate above 0 as its holder, a module or its configuration, and its name there."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in getattr(holder, "__dict__", {}).items():
                named = name == "layerdrop" or name.endswith("_layerdrop")
                if named and isinstance(value, int | float) and value > 0:
                    yield holder, name
