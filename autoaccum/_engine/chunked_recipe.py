"""Computes a model's logits and their cross entropy in chunks of tokens, for as long as a step lasts."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING

from autoaccum._engine.chunked_logits import CHUNK, logits_of
from autoaccum._engine.heads import find_heads
from autoaccum._engine.replaced_forward import forward_replaced
from autoaccum._engine.saving_names import CHUNKED
from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

# What `memory` calls it; behind it, a colon and the name of a layer may follow.


@contextmanager
def chunked(modules: Sequence[nn.Module], name: str | None, say: Callable[[str], None]) -> Iterator[str]:
    """Compute logits and their cross entropy in chunks of tokens.

    Args:
        modules: The modules of the step.
        name: The name of the layer that makes the logits; None for those of Transformers' models.
        say: Reports to the user what has to be computed whole.

    Yields:
        What is computed in chunks; empty if there is no such layer.

    Raises:
        InvalidInputError: There is no layer of that name.
    """

    def tell(function: str) -> None:
        say(
            f"memory='{CHUNKED}': the loss asks for all logits at once ({function}), so they are computed whole there; "
            "cross entropy, log_softmax with gather or nll_loss, and logsumexp of them are computed in chunks"
        )

    with ExitStack() as changed:
        heads = find_heads(modules, name)
        for head in heads:
            changed.enter_context(forward_replaced(head, functools.partial(logits_of, tell, CHUNK, head)))
        sizes = ", ".join(
            f"{classes:,}" for head in heads if isinstance(classes := getattr(head, "out_features", None), int)
        )
        over = f" over {sizes} classes" if sizes else ""
        yield f"logits{over} are computed at most {CHUNK:,} tokens at a time" if heads else ""
