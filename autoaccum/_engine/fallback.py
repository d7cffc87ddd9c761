"""Chooses what makes a step take less memory: what is in force from the start, and what follows where nothing fits.

`checkpointing.py`, `offloading.py` and `chunked_head.py` change the modules of a training step in place; they are
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
from autoaccum._engine.chunked_head import chunked, find_heads
from autoaccum._engine.offloading import offloaded
from autoaccum._engine.replaced_forward import are_compiled, is_replaced
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
    ) -> None:
        self._savings = savings
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
        for name in self._savings:
            if not (way := self._activated(name)):
                lack = "the model has no repeated blocks to compute again; choose another name"
                if name == CHUNKED:
                    lack = _no_head(self._modules)
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
        chunked_loss = (CHUNKED,) if not _no_head(self._modules) else ()
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
            return self._in_force.enter_context(chunked(self._modules))
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
    return [] if _no_head(modules) or any(map(is_replaced, find_heads(modules))) else [CHUNKED]


def _no_head(modules: Sequence[nn.Module]) -> str:
    """Return why the loss of these modules cannot be computed in chunks; empty if it can."""
    if are_compiled(modules):
        return "the model is compiled; compute its loss of hidden states by autoaccum.ChunkedLoss(head)"
    if not find_heads(modules):
        return (
            "no layer that makes logits was found (what get_output_embeddings of a Transformers model returns, an "
            "nn.Linear); compute the loss of hidden states by autoaccum.ChunkedLoss(head)"
        )
    return ""
