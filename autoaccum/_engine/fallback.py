"""Chooses what makes a step take less memory: what is in force from the start, and what follows where nothing fits.

`checkpointing.py`, `offloading.py` and `chunked_recipe.py` change the modules of a training step in place; they are
restored at the end.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from autoaccum._engine.checkpointing import (
    all_blocks,
    checkpointed,
    is_checkpointed_already,
    repeated_blocks,
    with_checkpointing_of_their_own,
)
from autoaccum._engine.chunked_recipe import chunked
from autoaccum._engine.heads import find_heads, likely_head
from autoaccum._engine.offloading import offloaded
from autoaccum._engine.replaced_forward import is_replaced
from autoaccum._engine.saving_names import CHUNKED
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from autoaccum._memory.base import MemoryBackend


class Fallbacks:
    """Reduces the memory that a step needs, one fallback after another.

    Args:
        modules: The modules of the step.
        names: The fallbacks, in order.
        memory: The device.
        savings: What saves memory from the start, in order.
        head: The name of the layer that makes logits, for `levels`; None to look for it.

    Attributes:
        names: The active fallbacks and savings, as `memory` names them.
        ways: Descriptions of them.
        found_no_blocks: Whether checkpointing was requested but the model has no blocks to checkpoint.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        names: Sequence[str],
        memory: MemoryBackend,
        savings: Sequence[str] = (),
        *,
        head: str | None = None,
    ) -> None:
        self._savings = savings
        self._head = head
        self.names: tuple[str, ...] = ()
        self._modules = modules
        self._names = list(names)
        self._memory = memory
        self._in_force = ExitStack()
        self._say: Callable[[str], None] = lambda _: None
        self.ways: list[str] = []
        self.found_no_blocks = False

    def begin(self, say: Callable[[str], None]) -> None:
        """Activate the savings. To be called also where there are none.

        Args:
            say: Reports to the user what is done.

        Raises:
            InvalidInputError: One of them has no place in the model.
        """
        self._say = say
        if self._head is not None:
            find_heads(self._modules, self._head)
        for name in self._savings:
            if not (way := self._activated(name)):
                lack = "the model has no repeated blocks to compute again; choose another name"
                if name == CHUNKED:
                    lack = (
                        "no head found (what get_output_embeddings of a Transformers model returns, an nn.Linear); "
                        f"name the layer that makes the logits, as in memory='{CHUNKED}:lm_head'"
                    )
                raise InvalidInputError(f"memory={name!r}: {lack}, or leave it out")
            self.ways.append(way)
            self.names = (*self.names, name)
            say(f"{way} (memory={name!r})")

    def switch(self, savings: Sequence[str]) -> None:
        """Put these savings in force in place of all that is."""
        self._in_force.close()
        self.ways, self.names = [self._activated(name) for name in savings], tuple(savings)

    def levels(self) -> tuple[str, ...]:
        """Return what can save memory here, from the cheapest on, by names of `memory`."""
        chunked_loss: tuple[str, ...] = ()
        if self._head is not None:
            chunked_loss = (f"{CHUNKED}:{self._head}",)
        elif find_heads(self._modules, None):
            chunked_loss = (CHUNKED,)
        elif (head := likely_head(self._modules)) is not None:
            self._say(
                f"memory='auto' does not try a loss in chunks: in this model it finds no layer that makes logits; "
                f"memory=['auto', '{CHUNKED}:{head}'] names it"
            )
        has_blocks = not is_checkpointed_already(self._modules) and all_blocks(self._modules)
        blocks = ("checkpoint",) if has_blocks else ()
        return (*chunked_loss, *blocks, *(() if self._memory.is_host else ("offload",)))

    def next(self) -> bool:
        """Activate the next fallback that changes anything; return whether there was one."""
        while self._names:
            name = self._names.pop(0)
            if way := self._activated(name):
                self.ways.append(way)
                self.names = (*self.names, name)
                return True
            self.found_no_blocks = True
        return False

    def _activated(self, name: str) -> str:
        """Activate a fallback; return what it does, or nothing if it has no place in the model."""
        kind, _, rest = name.partition(":")
        if kind == CHUNKED:
            return self._in_force.enter_context(chunked(self._modules, rest or None, self._say))
        if kind == "offload":
            self._in_force.enter_context(offloaded(self._modules, self._memory))
            return "what backward needs is kept in the host's memory"
        done = self._in_force.enter_context(checkpointed(self._modules, self._memory.device, rest or None))
        return done and f"activation checkpointing of {done}"

    def end(self) -> None:
        """Restore the modules."""
        self._in_force.close()


def ways_left(modules: Sequence[nn.Module], memory: MemoryBackend) -> list[str]:
    """Return what saves memory, by names of `memory`, that is not in force yet and would change anything."""
    ways = _chunks_left(modules)
    own = [part for module in modules for part in with_checkpointing_of_their_own(module)]
    blocks = [block for module in modules for block in repeated_blocks(module, leave_out=own)]
    if (own or blocks) and not is_checkpointed_already(modules) and not any(map(is_replaced, blocks)):
        ways.append("checkpoint")
    if not memory.is_host and not any(map(is_replaced, modules)):
        ways.append("offload")
    return ways


def _chunks_left(modules: Sequence[nn.Module]) -> list[str]:
    """Return how `memory` would name the loss in chunks, if it is not in force."""
    heads = find_heads(modules, None)
    if heads:
        return [] if any(map(is_replaced, heads)) else [CHUNKED]
    name = likely_head(modules)
    return [] if name is None else [f"{CHUNKED}:{name}"]
