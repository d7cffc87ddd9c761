"""Finds the layers of a model that make logits over a vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from autoaccum._engine.replaced_forward import is_replaced
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

# A layer of as many outputs, and of so many times its inputs, probably makes logits over a vocabulary.
_MANY_CLASSES, _WIDER = 2048, 2


def find_heads(modules: Iterable[nn.Module], name: str | None) -> list[nn.Module]:
    """Return the layers that make logits: the output embeddings of Transformers' models, or the layer of a name.

    Raises:
        InvalidInputError: No module has a layer of that name.
    """
    if name is None:
        found = [part for module in modules for part in _output_embeddings(module)]
        return list(dict.fromkeys(found))
    named = [part for module in modules for path, part in module.named_modules() if path == name]
    if not named or _makes_no_logits(named[0]):
        what = f"is a {type(named[0]).__name__}" if named else "is not there"
        raise InvalidInputError(
            f"memory='chunked_loss:{name}' names the layer that makes the logits, and {name!r} {what}; name an "
            "nn.Linear, or what makes logits of each token by itself, as model.named_modules() does"
        )
    return [named[0]]


def _makes_no_logits(part: nn.Module) -> bool:
    is_called = type(part).forward is not nn.Module.forward
    return isinstance(part, nn.Embedding) or not is_called or not any(True for _ in part.parameters())


def likely_head(modules: Iterable[nn.Module]) -> str | None:
    """Return the name of the layer that probably makes logits over a vocabulary; None if there is none."""
    wide = [
        (part.out_features, path)
        for module in modules
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear) and path and not is_replaced(part) and _is_wide(part)
    ]
    return max(wide)[1] if wide else None


def _is_wide(layer: nn.Linear) -> bool:
    return layer.out_features >= max(_MANY_CLASSES, _WIDER * layer.in_features)


def _output_embeddings(module: nn.Module) -> list[nn.Module]:
    """Return the layer that makes the logits of a Transformers model, also where PEFT has put another around it."""
    for part in module.modules():
        asked = getattr(part, "get_output_embeddings", None)
        found = asked() if callable(asked) else None
        if isinstance(found, nn.Module) and isinstance(getattr(found, "out_features", None), int):
            return [found]
    return []
