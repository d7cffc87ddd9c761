"""Checks what kind of value an argument is, and refuses others with its name, the value and a next step.

The code that uses an argument checks what it means.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Beyond it a double no longer holds every whole number, and losses are weighed by counts in doubles.
MOST_COUNTED = 2**53
# So much of a value is shown: the repr of a tensor or a model would bury the sentence around it.
_SHOWN = 200


def shown(value: object) -> str:
    """Return how a value looks, for a message: on one line, cut short, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a number of 5,000 digits has no repr, and a class of the user's may fail too
        return f"<{type(value).__name__}>"
    text = " ".join(text.split("\n"))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_positive_int(name: str, value: object) -> int:
    """Return `value` if it is a whole number from 1 to `MOST_COUNTED` (and no bool).

    Raises:
        InvalidInputError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(
            f"{name} must be a whole number, got {shown(value)} ({type(value).__name__}); pass an int of at least 1"
        )
    if value < 1:
        raise InvalidInputError(f"{name} must be at least 1, got {shown(value)}")
    if value > MOST_COUNTED:
        raise InvalidInputError(f"{name} must be at most 2**53, got {shown(value)}; pass a smaller one")
    return value


def check_positive_number(name: str, value: object) -> float:
    """Return `value` as a float if it is a number above 0; infinity is one.

    Raises:
        InvalidInputError: It is not.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:  # NaN is not
        try:
            return float(value)
        except OverflowError:  # an int beyond all floats
            pass
    raise InvalidInputError(f"{name}={shown(value)} must be a positive number, or None")


def check_bool(name: str, value: object) -> None:
    """Refuse anything but True and False: every text counts as true, "no" and "False" included.

    Raises:
        InvalidInputError: The value is neither.
    """
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}={shown(value)} is unknown; choose True or False")


def is_one_of(value: object, choices: Sequence[str]) -> bool:
    """Whether a value is one of some texts; arrays and tensors, which compare by element, are not."""
    return isinstance(value, str) and value in choices


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is none of some texts.

    Raises:
        InvalidInputError: It is none of them.
    """
    if not is_one_of(value, choices):
        several = [repr(choice) for choice in choices]
        pair = 2
        listed = " or ".join(several) if len(several) == pair else f"one of {', '.join(several)}"
        raise InvalidInputError(f"{name}={shown(value)} is unknown; choose {listed}")


def check_path(name: str, value: object, what: str) -> Path:
    """Return a path with "~" expanded; whether anything is there is not looked at.

    Args:
        name: The argument.
        value: What was given.
        what: What the path is to be of, such as "folder for checkpoints".

    Raises:
        InvalidInputError: It is not a path, or one that no file can have.
    """
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except Exception:  # noqa: BLE001 - a __fspath__ of the user's may raise anything
        text = None
    if not isinstance(text, str):  # bytes are a path to the system, and none to pathlib
        raise InvalidInputError(f"{name}={shown(value)} is not a path; pass the {what}")
    if not text:  # which pathlib takes for the current folder
        raise InvalidInputError(f"{name}='' names no {what}; pass one ('.' for the current folder)")
    if "\0" in text:
        raise InvalidInputError(f"{name}={shown(value)} holds a null byte, which no path can; pass another {what}")
    try:
        os.fsencode(text)
        return Path(text).expanduser()
    except (UnicodeEncodeError, RuntimeError) as error:  # the second: there is no such user
        reason = str(error) if isinstance(error, RuntimeError) else "it cannot be encoded"
        raise InvalidInputError(
            f"{name}={shown(value)} cannot be found ({reason}); pass the {what} with its whole path"
        ) from None


def check_iterable(name: str, value: object) -> None:
    """Refuse what does not yield batches.

    Raises:
        InvalidInputError: The value cannot be iterated over, or is a dataset of single samples.
    """
    if isinstance(value, type):
        raise InvalidInputError(f"{name}={shown(value)} is a class; pass an object of it, {value.__name__}(...)")
    if _is_map_style_dataset(value):
        raise InvalidInputError(
            f"{name}={shown(value)} is a dataset, which gives single samples; wrap it in torch.utils.data.DataLoader, "
            "which gives batches"
        )
    gives = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if not gives or isinstance(value, str | bytes | bytearray):
        raise InvalidInputError(
            f"{name}={shown(value)} cannot be iterated over; pass a DataLoader, or any iterable of batches"
        )


def _is_map_style_dataset(value: object) -> bool:
    """Whether a value is a Dataset of torch's without an iterator: this module does without torch, so by name."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    return "torch.utils.data.dataset.Dataset" in names and not hasattr(value, "__iter__")


def check_function(name: str, value: object, parameters: str) -> None:
    """Refuse what cannot be called as it is going to be.

    Args:
        name: The argument.
        value: What was given.
        parameters: What it is called with, such as "outputs, targets".

    Raises:
        InvalidInputError: It cannot be called, is a class, or takes other arguments.
    """
    if isinstance(value, type):
        raise InvalidInputError(
            f"{name}={shown(value)} is a class, and calling it would only make an object; pass one: {value.__name__}()"
        )
    if not callable(value):
        raise InvalidInputError(f"{name}={shown(value)} cannot be called; pass a callable of ({parameters})")
    check_call(name, value, parameters)


def check_call(name: str, function: Callable[..., Any], parameters: str) -> None:
    """Refuse a function (or a class) that cannot take so many arguments by place.

    Raises:
        InvalidInputError: It cannot.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a builtin that does not say what it takes
        return
    count = len(parameters.split(", ")) if parameters else 0
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        called = f"with ({parameters})" if parameters else "without arguments"
        raise InvalidInputError(
            f"{name}={shown(function)} is called {called}, and takes {signature} ({error}); give the others defaults"
            if count <= len(signature.parameters)
            else f"{name}={shown(function)} is called {called}, and takes {signature} ({error})"
        ) from None


def check_whole_number(name: str, value: object, least: int, most: int) -> int:
    """Return `value` if it is a whole number within bounds (and no bool).

    Raises:
        InvalidInputError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(f"{name}={shown(value)} must be a whole number")
    if not least <= value <= most:
        raise InvalidInputError(f"{name}={shown(value)} must be a whole number from {least} to {most}")
    return value
