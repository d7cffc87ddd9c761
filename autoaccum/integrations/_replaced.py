"""Sets attributes of other libraries' objects for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function in the place of one that logs, which a step or loss must not call.

    Args:
        name: What it is.
        instead: What to do in its place.
    """

    def refuse(*_: object, **__: object) -> NoReturn:
        raise InvalidInputError(
            f"{name} would be called for each micro-batch, and for samples that the loss is checked on, not once a "
            f"batch; {instead}"
        )

    return refuse
