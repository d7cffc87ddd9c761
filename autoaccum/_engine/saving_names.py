"""The names of what saves memory, in the arguments `memory` and `fallback`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from autoaccum._arguments import is_one_of, shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._memory.base import MemoryBackend

FALLBACKS = ("checkpoint", "offload")
CHUNKED = "chunked_loss"
# What `memory` takes.
SAVINGS = (CHUNKED, *FALLBACKS)
# Takes these one after the other where not even one sample fits (_engine/rungs.py).
AUTO = "auto"
# No model has a number of blocks with more digits.
_COUNT = re.compile(r"[1-9][0-9]{0,8}")


def check_memory(
    memory: Sequence[str] | str | None, fallback: Sequence[str] | str | None, backend: MemoryBackend
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names from `fit`'s arguments `memory` and `fallback`, in order.

    Raises:
        InvalidInputError: A name is unknown, or has no effect here; or both are given.
    """
    fallbacks, names = _names(fallback, "fallback"), _names(memory, "memory")
    for name in fallbacks:
        if not is_one_of(name, FALLBACKS):
            raise InvalidInputError(f"fallback={shown(name)} is unknown; choose from {', '.join(map(repr, FALLBACKS))}")
    if names and fallback is not None:
        raise InvalidInputError(
            f"memory={shown(memory)} saves memory from the start, and fallback={shown(fallback)} where not even one "
            "sample fits; pass one of them"
        )
    if AUTO in names and len(names) > 1:
        raise InvalidInputError(f"memory={shown(memory)}: 'auto' takes all of them in turn; pass it alone")
    for name in names:
        if name != AUTO and not _is_known(name):
            raise InvalidInputError(
                f"memory={shown(name)} is unknown; choose from {', '.join(map(repr, (AUTO, *SAVINGS)))} "
                "or 'checkpoint:N' for the first N blocks"
            )
    if "offload" in (*names, *fallbacks) and backend.is_host:
        argument = "memory" if "offload" in names else "fallback"
        raise InvalidInputError(
            f"{argument}='offload' moves activations to host memory, and on {backend.name} they already are there; "
            "choose 'checkpoint'"
        )
    kinds = [_kind(name) for name in names]
    if twice := [name for name, kind in zip(names, kinds, strict=True) if kinds.count(kind) > 1]:
        raise InvalidInputError(
            f"memory={shown(memory)}: {' and '.join(map(repr, twice))} say the same twice, or two things; keep one"
        )
    return names, fallbacks


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _is_known(name: object) -> bool:
    """Whether `memory` may be this name, as far as its form tells."""
    if not isinstance(name, str):
        return False
    kind, colon, rest = name.partition(":")
    if not colon:
        return is_one_of(kind, SAVINGS)
    return kind == "checkpoint" and bool(_COUNT.fullmatch(rest))


def _names(given: Sequence[str] | str | None, argument: str) -> tuple[str, ...]:
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, list | tuple):
        raise InvalidInputError(
            f"{argument}={shown(given)} is neither a name nor a list of names, such as ['checkpoint']"
        )
    return tuple(given)
