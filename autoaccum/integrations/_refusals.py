"""Refuses what a step or loss must not call, since it is called for each micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable


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
