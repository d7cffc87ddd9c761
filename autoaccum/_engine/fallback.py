"""Chooses what makes a step take less memory: what is in force from the start, and what follows where nothing fits.

`checkpointing.py`, `offloading.py` and `chunked_recipe.py` change the modules of a training step in place; they are
restored at the end.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from autoaccum._arguments import is_one_of, shown
from autoaccum._engine.block_costs import partial_levels
from autoaccum._engine.block_names import is_name
from autoaccum._engine.checkpointing import (
    all_blocks,
    checkpointed,
    is_checkpointed_already,
    repeated_blocks,
    with_checkpointing_of_their_own,
)
from autoaccum._engine.chunked_recipe import CHUNKED, chunked
from autoaccum._engine.heads import find_heads, likely_head
from autoaccum._engine.offloading import offloaded
from autoaccum._engine.replaced_forward import is_replaced
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from autoaccum._engine.block_costs import BlockCost
    from autoaccum._memory.base import MemoryBackend

FALLBACKS = ("checkpoint", "offload")
# What `memory` takes.
SAVINGS = (CHUNKED, *FALLBACKS)
# Lets the clock choose among these (_engine/rungs.py).
AUTO = "auto"


def check_fallback(fallback: Sequence[str] | str | None, memory: MemoryBackend) -> tuple[str, ...]:
    """Return the fallback names from `fit`'s argument, in order.

    Raises:
        InvalidInputError: A name is unknown, or its fallback has no effect here.
    """
    names = _names(fallback, "fallback")
    for name in names:
        if not is_one_of(name, FALLBACKS):
            raise InvalidInputError(f"fallback={shown(name)} is unknown; choose from {', '.join(map(repr, FALLBACKS))}")
    if "offload" in names and memory.is_host:
        raise InvalidInputError(
            f"fallback='offload' moves activations to host memory, and on {memory.name} they already are there; "
            "choose 'checkpoint'"
        )
    return names


def check_memory(
    memory: Sequence[str] | str | None, fallback: Sequence[str] | str | None, backend: MemoryBackend
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names from `fit`'s arguments `memory` and `fallback`, in order.

    Raises:
        InvalidInputError: A name is unknown, or has no effect here; or both are given.
    """
    fallbacks, names = check_fallback(fallback, backend), _names(memory, "memory")
    if names and fallback is not None:
        raise InvalidInputError(
            f"memory={shown(memory)} saves memory from the start, and fallback={shown(fallback)} where not even one "
            "sample fits; pass one of them"
        )
    if AUTO in names and len(names) > 1 and head_of_auto(names) is None:
        raise InvalidInputError(
            f"memory={shown(memory)}: 'auto' chooses among all of them; pass it alone, or with '{CHUNKED}:NAME' to "
            "name the layer that makes the logits"
        )
    for name in names:
        if name != AUTO and not _is_known(name):
            raise InvalidInputError(
                f"memory={shown(name)} is unknown; choose from {', '.join(map(repr, (AUTO, *SAVINGS)))}, "
                f"'{CHUNKED}:NAME' with the name of the layer that makes the logits, or 'checkpoint:N' for the first N "
                f"blocks ('checkpoint:0-2,5-5' for these)"
            )
    if "offload" in names and backend.is_host:
        raise InvalidInputError(
            f"memory='offload' moves activations to host memory, and on {backend.name} they already are there; "
            "choose 'checkpoint'"
        )
    kinds = [_kind(name) for name in names]
    if twice := [name for name, kind in zip(names, kinds, strict=True) if kinds.count(kind) > 1]:
        raise InvalidInputError(
            f"memory={shown(memory)}: {' and '.join(map(repr, twice))} say the same twice, or two things; keep one"
        )
    return names, fallbacks


def head_of_auto(names: Sequence[str]) -> str | None:
    """Return the name of the layer that makes logits, if that is all that `names` has beside "auto"."""
    others = [name for name in names if name != AUTO]
    is_named = AUTO in names and len(others) == 1 and _is_known(others[0]) and _kind(others[0]) == CHUNKED
    return (others[0].partition(":")[2] or None) if is_named else None


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _is_known(name: object) -> bool:
    """Whether `memory` may be this name, as far as its form tells."""
    if not isinstance(name, str):
        return False
    kind, colon, rest = name.partition(":")
    if not colon:
        return is_one_of(kind, SAVINGS)
    return {CHUNKED: bool(rest), "checkpoint": is_name(rest)}.get(kind, False)


def _names(given: Sequence[str] | str | None, argument: str) -> tuple[str, ...]:
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, list | tuple):
        raise InvalidInputError(
            f"{argument}={shown(given)} is neither a name nor a list of names, such as ['checkpoint']"
        )
    return tuple(given)


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

    def levels(self, costs: Sequence[BlockCost] | None = None) -> tuple[str, ...]:
        """Return what can save memory here, from the cheapest on, by names of `memory`.

        Args:
            costs: What checkpointing each block saves and costs; None if unknown.
        """
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
        blocks = 0 if is_checkpointed_already(self._modules) else len(all_blocks(self._modules))
        some = [f"checkpoint:{name}" for name in partial_levels(costs, blocks)]
        whole = ("checkpoint",) if blocks else ()
        return (*chunked_loss, *some, *whole, *(() if self._memory.is_host else ("offload",)))

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
