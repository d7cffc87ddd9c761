"""Lets what losses compute of a Transformers model's logits be computed in chunks of tokens.

While a gradient is computed, the layer that makes the logits returns `UnmadeLogits` (`unmade_logits.py`).
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._saving.chunked_loss import CHUNK, Held, check_head
from autoaccum._saving.replaced_forward import are_compiled, forward_replaced
from autoaccum._saving.unmade_logits import Recipe, UnmadeLogits, autocast_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_LEAST_DIMENSIONS = 2  # tokens and features


@contextmanager
def chunked(modules: Sequence[nn.Module]) -> Iterator[str]:
    """Compute the loss of Transformers' models in chunks of tokens, wherever a gradient is computed.

    Yields:
        What is computed in chunks; empty if no module tells which layer makes its logits, or the model is compiled.
    """
    with ExitStack() as changed:
        heads = [] if are_compiled(modules) else find_heads(modules)
        for head in heads:
            changed.enter_context(forward_replaced(head, functools.partial(_unmade, head)))
        sizes = ", ".join(f"{head.out_features:,}" for head in heads)
        yield f"the loss over {sizes} classes is computed at most {CHUNK:,} tokens at a time" if heads else ""


def find_heads(modules: Sequence[nn.Module]) -> list[Any]:
    """Return the layers that make logits of Transformers' models, also where PEFT has put others around them."""
    found: list[Any] = []
    for part in (part for module in modules for part in module.modules()):
        asked = getattr(part, "get_output_embeddings", None)
        head = asked() if callable(asked) else None
        if isinstance(head, nn.Module) and isinstance(getattr(head, "out_features", None), int):
            found.append(head)
    return list(dict.fromkeys(found))


def _unmade(head: Any, forward: Callable[..., Tensor], input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear names it
    """Return what stands for a head's logits; the logits where no gradient is computed."""
    hidden = input
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or hidden.dim() < _LEAST_DIMENSIONS:
        return forward(hidden)
    check_head(head, hidden)
    _, dtype, is_cast = autocast = autocast_of(hidden.device)

    def make(rows: Tensor) -> Tensor:  # as here, wherever the loss is computed
        with torch.autocast(*autocast):
            return forward(rows)

    has_gradient = any(one.requires_grad for one in (hidden, *head.parameters()))
    recipe = Recipe(head, Held(head, hidden), make, hidden, has_gradient)
    return UnmadeLogits.of(recipe, (*hidden.shape[:-1], head.out_features), dtype if is_cast else hidden.dtype)
