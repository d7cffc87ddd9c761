"""Lets exceptions of users' code pass unchanged, also those that refuse attributes, such as frozen dataclasses.

`contextlib.contextmanager` and `add_note` set attributes of the exception; where it refuses, its refusal takes its
place, and nobody learns what failed. These two do not ask it.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

_P = ParamSpec("_P")
_T = TypeVar("_T")


def contextmanager(function: Callable[_P, Iterator[_T]]) -> Callable[_P, AbstractContextManager[_T]]:
    """Make a context manager of a generator, as `contextlib.contextmanager` does; what it makes is no decorator."""

    @functools.wraps(function)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[_T]:
        return _Block(function(*args, **kwargs))

    return made


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception."""
    vars(error).setdefault("__notes__", []).append(text)


class _Block(AbstractContextManager[_T], Generic[_T]):
    __slots__ = ("_parts",)

    def __init__(self, parts: Iterator[_T]) -> None:
        self._parts = parts

    def __enter__(self) -> _T:
        return next(self._parts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            if next(self._parts, self) is not self:
                raise RuntimeError("the generator of a context manager yields twice")
            return False
        try:
            self._parts.throw(error)  # type: ignore[attr-defined]
        except StopIteration as ended:
            return ended is not error
        except BaseException as raised:
            # Python turns a StopIteration that leaves a generator into a RuntimeError.
            is_turned = isinstance(error, StopIteration) and isinstance(raised, RuntimeError)
            if raised is not error and not (is_turned and raised.__cause__ is error):
                raise
            error.with_traceback(traceback)  # without the frames of the generator
            return False
        raise RuntimeError("the generator of a context manager yields twice")
