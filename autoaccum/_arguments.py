"""Checks the types and forms of arguments, and rejects others with the name, the value and a next step.

The code that uses an argument checks its meaning.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Beyond it a double cannot represent every integer, and losses are weighted by counts in doubles.
MOST_COUNTED = 2**53
# The most characters shown of a value: the repr of a tensor or a model would bury the message.
_SHOWN = 100


def shown(value: object) -> str:
    """Return the repr of a value for a message: on one line, truncated, and never raising."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a number of 5,000 digits has no repr, and a user's class may fail too
        return f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_positive_int(name: str, value: object) -> int:
    """Return `value` if it is an int (not a bool) from 1 to `MOST_COUNTED`.

    Raises:
        InvalidInputError: The value is not.
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
    """Return `value` as a float if it is a number above 0, including infinity.

    Raises:
        InvalidInputError: The value is not.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:  # NaN is not
        try:
            return float(value)
        except OverflowError:  # an int beyond all floats
            pass
    raise InvalidInputError(f"{name}={shown(value)} must be a positive number, or None")


def check_bool(name: str, value: object) -> None:
    """Reject anything but True and False, since any non-empty string is true, even "no" and "False".

    Raises:
        InvalidInputError: The value is neither.
    """
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}={shown(value)} is unknown; choose True or False")


def is_one_of(value: object, choices: Sequence[str]) -> bool:
    """Whether a value is one of some strings; False for arrays and tensors, which compare by element."""
    return isinstance(value, str) and value in choices


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Reject a value that is not one of some strings.

    Raises:
        InvalidInputError: The value is not one of them.
    """
    if not is_one_of(value, choices):
        several = [repr(choice) for choice in choices]
        pair = 2
        listed = " or ".join(several) if len(several) == pair else f"one of {', '.join(several)}"
        raise InvalidInputError(f"{name}={shown(value)} is unknown; choose {listed}")


def check_path(name: str, value: object, what: str) -> Path:
    """Return a path with "~" expanded, without checking whether it exists.

    Args:
        name: The argument.
        value: Its value.
        what: The meaning of the path, such as "folder for checkpoints".

    Raises:
        InvalidInputError: The value is not a path, or not a possible one.
    """
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except Exception:  # noqa: BLE001 - a user's __fspath__ may raise anything
        text = None
    if not isinstance(text, str):  # the system accepts bytes as a path, but pathlib does not
        raise InvalidInputError(f"{name}={shown(value)} is not a path; pass the {what}")
    if not text:  # pathlib would take it for the current folder
        raise InvalidInputError(f"{name}='' names no {what}; pass one ('.' for the current folder)")
    if "\0" in text:
        raise InvalidInputError(f"{name}={shown(value)} contains a null byte, which no path can; pass another {what}")
    try:
        os.fsencode(text)
        return Path(text).expanduser()
    except (UnicodeEncodeError, RuntimeError) as error:  # RuntimeError: there is no such user
        reason = str(error) if isinstance(error, RuntimeError) else "it cannot be encoded"
        raise InvalidInputError(
            f"{name}={shown(value)} cannot be found ({reason}); pass the {what} with its full path"
        ) from None


def check_iterable(name: str, value: object) -> None:
    """Reject a value that does not yield batches.

    Raises:
        InvalidInputError: The value cannot be iterated over, or is a dataset of single samples.
    """
    if isinstance(value, type):
        raise InvalidInputError(f"{name}={shown(value)} is a class; pass an instance, {value.__name__}(...)")
    if _is_map_style_dataset(value):
        raise InvalidInputError(
            f"{name}={shown(value)} is a dataset, which yields single samples; wrap it in torch.utils.data.DataLoader, "
            "which yields batches"
        )
    if _is_tensor(value):
        raise InvalidInputError(
            f"{name} is a tensor, which yields single rows; pass DataLoader(TensorDataset(inputs, targets), "
            "batch_size=...), or a list of batches"
        )
    gives = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    if not gives or isinstance(value, str | bytes | bytearray):
        raise InvalidInputError(
            f"{name}={shown(value)} cannot be iterated over; pass a DataLoader, or any iterable of batches"
        )


def _is_tensor(value: object) -> bool:
    """Whether a value is a tensor; checked by name, as this module does not import torch."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == "torch.Tensor" for kind in type(value).__mro__)


def _is_map_style_dataset(value: object) -> bool:
    """Whether a value is a torch Dataset without an iterator; checked by name, as this module does not import torch."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    return "torch.utils.data.dataset.Dataset" in names and not hasattr(value, "__iter__")


def check_function(name: str, value: object, parameters: str) -> None:
    """Reject a value that cannot be called with the given parameters.

    Args:
        name: The argument.
        value: Its value.
        parameters: The parameters it is called with, such as "outputs, targets".

    Raises:
        InvalidInputError: The value is not callable, is a class, or takes other arguments.
    """
    if isinstance(value, type):
        raise InvalidInputError(
            f"{name}={shown(value)} is a class, and a call would only create an object; pass one: {value.__name__}()"
        )
    if not callable(value):
        raise InvalidInputError(f"{name}={shown(value)} cannot be called; pass a callable of ({parameters})")
    check_call(name, value, parameters)


def check_one_batch(called: str, others: tuple[object, ...]) -> None:
    """Reject arguments after the batch.

    Args:
        called: The method.
        others: What it was called with beside the batch.

    Raises:
        InvalidInputError: There are any.
    """
    if others:
        raise InvalidInputError(
            f"{called} takes one batch, and got {1 + len(others)} arguments; pass inputs and targets as one: "
            f"{called}((inputs, targets))"
        )


def check_call(name: str, function: Callable[..., Any], parameters: str) -> None:
    """Reject a function (or a class) that cannot take this many positional arguments.

    Raises:
        InvalidInputError: It cannot.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a builtin without a signature
        return
    count = len(parameters.split(", ")) if parameters else 0
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        called = f"with ({parameters})" if parameters else "without arguments"
        kind = f"{function.__name__}()" if isinstance(function, type) else shown(function)
        takes = f"({', '.join(signature.parameters)})"
        raise InvalidInputError(
            f"{name}={kind} is called {called}, but takes {takes} ({error}); give the others, as in "
            f"{name}=lambda {parameters}: ..., or defaults"
            if count <= len(signature.parameters)
            else f"{name}={kind} is called {called}, but takes {takes} ({error})"
        ) from None


def check_whole_number(name: str, value: object, least: int, most: int) -> int:
    """Return `value` if it is an int (not a bool) within bounds.

    Raises:
        InvalidInputError: The value is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(f"{name}={shown(value)} must be a whole number")
    if not least <= value <= most:
        raise InvalidInputError(f"{name}={shown(value)} must be a whole number from {least} to {most}")
    return value
