"""Sets attributes of other objects for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_ABSENT = object()


@contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes within the block, which may hide methods; each is an object, a name and what to set."""
    kept = [vars(owner).get(name, _ABSENT) for owner, name, _ in attributes]
    for attribute in attributes:
        setattr(*attribute)
    try:
        yield
    finally:
        for (owner, name, _), before in zip(attributes, kept, strict=True):
            delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)
