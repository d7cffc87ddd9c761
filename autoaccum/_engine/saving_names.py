"""The names of what saves memory, in the argument `memory`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._arguments import is_one_of, shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._memory.base import MemoryBackend

CHUNKED, CHECKPOINT, OFFLOAD = "chunked_loss", "checkpoint", "offload"
# From the cheapest on.
SAVINGS = (CHUNKED, CHECKPOINT, OFFLOAD)
# Takes these one after the other where not even one sample fits (_engine/savings.py).
AUTO = "auto"


def check_memory(memory: Sequence[str] | str | None, backend: MemoryBackend) -> tuple[str, ...]:
    """Return the names from `fit`'s argument `memory`, in order.

    Raises:
        InvalidInputError: A name is unknown, or has no effect here.
    """
    names = _names(memory)
    if AUTO in names and len(names) > 1:
        raise InvalidInputError(f"memory={shown(memory)}: 'auto' takes all of them in turn; pass it alone")
    for name in names:
        if not _is_known(name):
            raise InvalidInputError(
                f"memory={shown(name)} is unknown; choose from {', '.join(map(repr, (AUTO, *SAVINGS)))} or "
                "'checkpoint:NAME' with the name or the class of the blocks"
            )
    if OFFLOAD in names and backend.is_host:
        raise InvalidInputError(
            f"memory='offload' moves activations to host memory, and on {backend.name} they already are there; choose "
            "'checkpoint'"
        )
    kinds = [name.partition(":")[0] for name in names]
    if twice := [name for name, kind in zip(names, kinds, strict=True) if kinds.count(kind) > 1]:
        raise InvalidInputError(
            f"memory={shown(memory)}: {' and '.join(map(repr, twice))} say the same twice, or two things; keep one"
        )
    return names


def _is_known(name: object) -> bool:
    """Whether `memory` may be this name, as far as its form tells."""
    if not isinstance(name, str):
        return False
    kind, colon, rest = name.partition(":")
    return (kind == CHECKPOINT and bool(rest)) if colon else is_one_of(name, (AUTO, *SAVINGS))


def _names(given: Sequence[str] | str | None) -> tuple[str, ...]:
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, list | tuple):
        raise InvalidInputError(f"memory={shown(given)} is neither a name nor a list of names, such as ['checkpoint']")
    return tuple(given)
