"""Checks the types and forms of arguments, and rejects others with the name, the value and a next step.

All raise InvalidInputError. The code that uses an argument checks its meaning.
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
_MOST_COUNTED = 2**53
# The most characters shown of a value: the repr of a tensor or a model would bury the message.
_SHOWN = 100


def counted(number: int, what: str) -> str:
    """Return such as "1 sample" and "2 samples"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return names in words, only the first of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shown(value: object) -> str:
    """Return the repr of a value for a message: on one line, truncated, and never raising."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a number of 5,000 digits has no repr, and a user's class may fail too
        return f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_positive_int(name: str, value: object) -> int:
    """Return `value` if it is an int (not a bool) from 1 to 2**53."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInputError(
            f"{name} must be a whole number, got {shown(value)} ({type(value).__name__}); pass an int of at least 1"
        )
    if not 1 <= value <= _MOST_COUNTED:
        bound = "at least 1" if value < 1 else "at most 2**53"
        raise InvalidInputError(f"{name} must be {bound}, got {shown(value)}")
    return value


def check_positive_number(name: str, value: object) -> float:
    """Return `value` as a float if it is a number above 0, including infinity."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:  # NaN is not
            return float(value)
    except OverflowError:  # an int beyond all floats
        pass
    raise InvalidInputError(f"{name}={shown(value)} must be a positive number, or None")


def check_bool(name: str, value: object) -> None:
    """Reject anything but True and False, since any non-empty string is true, even "no" and "False"."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}={shown(value)} is unknown; choose True or False")


def is_one_of(value: object, choices: Sequence[str]) -> bool:
    """Whether a value is one of some strings; False for arrays and tensors, which compare by element."""
    return isinstance(value, str) and value in choices


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Reject a value that is not one of some strings."""
    if not is_one_of(value, choices):
        several = [repr(choice) for choice in choices]
        listed = f"one of {', '.join(several)}" if len(several) > 2 else " or ".join(several)  # noqa: PLR2004 - a pair
        raise InvalidInputError(f"{name}={shown(value)} is unknown; choose {listed}")


def check_path(name: str, value: object, what: str) -> Path:
    """Return a path with "~" expanded, without checking whether it exists.

    Args:
        name: The argument.
        value: Its value.
        what: The meaning of the path, such as "folder for checkpoints".
    """
    try:
        path = Path(value).expanduser()  # type: ignore[arg-type]
        os.fsencode(path)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: there is no such user
        raise InvalidInputError(f"{name}={shown(value)} is not a path ({error}); pass the {what}") from None
    if value == "" or "\0" in str(path):  # pathlib would take the first for the current folder
        raise InvalidInputError(f"{name}={shown(value)} names no {what}; pass one ('.' for the current folder)")
    return path


def check_iterable(name: str, value: object) -> None:
    """Reject a value that does not yield batches."""
    # By name, as this module does not import torch.
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    if "torch.utils.data.dataset.Dataset" in kinds and not hasattr(value, "__iter__"):
        raise InvalidInputError(
            f"{name}={shown(value)} is a dataset, which yields single samples; wrap it in torch.utils.data.DataLoader, "
            "which yields batches"
        )
    if "torch.Tensor" in kinds:
        raise InvalidInputError(
            f"{name} is a tensor, which yields single rows; pass DataLoader(TensorDataset(inputs, targets), "
            "batch_size=...), or a list of batches"
        )
    # A number of NumPy has both methods, of which neither works.
    gives = (hasattr(value, "__iter__") or hasattr(value, "__getitem__")) and getattr(value, "shape", None) != ()
    if not gives or isinstance(value, str | bytes | bytearray | type):
        raise InvalidInputError(
            f"{name}={shown(value)} cannot be iterated over; pass a DataLoader, or any iterable of batches"
        )


def check_function(name: str, value: object, parameters: str, *, takes_more: bool = False) -> None:
    """Reject a value that cannot be called with the given parameters, such as "outputs, targets", or also with more."""
    if isinstance(value, type):
        raise InvalidInputError(
            f"{name}={shown(value)} is a class, and a call would only create an object; pass one: {value.__name__}()"
        )
    if not callable(value):
        raise InvalidInputError(f"{name}={shown(value)} cannot be called; pass a callable of ({parameters})")
    check_call(name, value, parameters, takes_more=takes_more)


def check_one_batch(called: str, others: tuple[object, ...]) -> None:
    """Reject what a method was called with beside the batch."""
    if others:
        raise InvalidInputError(
            f"{called} takes one batch, and got {1 + len(others)} arguments; pass inputs and targets as one: "
            f"{called}((inputs, targets))"
        )


def check_call(name: str, function: Callable[..., Any], parameters: str, *, takes_more: bool = False) -> None:
    """Reject a function (or a class) that cannot take this many positional arguments, or so many and others."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # a builtin without a signature
        return
    count = len(parameters.split(", ")) if parameters else 0
    try:
        (signature.bind_partial if takes_more else signature.bind)(*[None] * count)
    except TypeError as error:
        called = f"with ({parameters})" if parameters else "without arguments"
        kind = f"{function.__name__}()" if isinstance(function, type) else shown(function)
        advice = f"; give the others, as in {name}=lambda {parameters}: ..., or defaults"
        raise InvalidInputError(
            f"{name}={kind} is called {called}, but takes ({', '.join(signature.parameters)}) ({error})"
            f"{advice if count <= len(signature.parameters) else ''}"
        ) from None
