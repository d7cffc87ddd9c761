"""What an argument may be, by its kind, and what nearly all arguments refuse."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import nn

NAN = float("nan")


@dataclass(frozen=True)
class InWorld:
    """A value that is made of the world in which a call is made."""

    make: Callable[[Any], Any]


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


class PathOfBytes:
    def __fspath__(self):
        return b"folder"


def of_one(first):
    return first


def of_none():
    return None


def of_three(first, second, third):
    return third


# What is not even of a kind that the library knows, and what is only just not it.
JUNK = [
    *("nope", -1, 1.5, NAN, 10**400, "a\0b", Unshowable(), torch.zeros(2), nn.Linear),
    *(PathOfBytes(), Decimal("1e400"), {1: 2}, [None], True, "9" * 5000, "\ud800"),
]


def is_allowed(allowed, value):
    try:
        return bool(allowed(value))
    except Exception:  # noqa: BLE001 - what cannot even be looked at is bad
        return False


def or_none(allowed):
    return lambda value: value is None or allowed(value)


def whole(least=1, most=2**53):
    return lambda value: type(value) is int and least <= value <= most


def choice(*names):
    return lambda value: isinstance(value, str) and value in names


def is_bool(value):
    return isinstance(value, bool)


def is_empty(value):
    return value in ([], ())


def is_text(value):
    return isinstance(value, str)


def positive(value):
    """A number above 0; infinity is one."""
    return (isinstance(value, float) and value > 0) or (type(value) is int and 0 < value < 10**300)


def path(value):
    return isinstance(value, str | Path) and bool(str(value)) and "\0" not in str(value) and bool(Path(value))


def function(value):
    """Callables of which the number of arguments is not known, or is right; what they return is not looked at."""
    return callable(value) and not isinstance(value, type)


def limit(value):
    if isinstance(value, str):
        return re.match(r"\s*[\d.]+", value) is not None and len(value) < 100
    return 0 < value <= 1 if isinstance(value, float) else type(value) is int and 2**22 <= value <= 2**60


def size(value):
    return isinstance(value, str) and re.match(r"\s*\d", value) is not None and len(value) < 100


def iterable(value):
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes | type)


def batch(value):
    """A tensor is a batch; whether a model takes it is between the two."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def dims(value):
    """What indexes samples: a number from 0, or several nested like a batch."""
    if isinstance(value, list | tuple | dict):
        each = [one for one in (value.values() if isinstance(value, dict) else value) if one is not None]
        return bool(each) and all(map(dims, each))
    return type(value) is int and value >= 0


def share(value):
    return type(value) in (int, float) and 0 <= value <= 1


def nothing(_):
    return False


def model(value):
    return isinstance(value, nn.Module)
