"""Parses memory limits and sizes given by users, and formats bytes for messages. Enforces nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from autoaccum._arguments import listed, shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._memory.base import MemoryBackend

_FORMS = (
    "give bytes as an int, a size such as '12GiB', '1.5GB' or '800M', or a fraction of all memory, such as 0.5 or '50%'"
)
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[a-z]*|%)", re.IGNORECASE)

# A bare letter is a power of 1024, as for Slurm, systemd, cgroups and Docker, where limits come from.
_UNIT_BYTES = {"b": 1} | {
    name: base ** (power + 1)
    for power, letter in enumerate("kmgtp")
    for name, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}b", 1000))
}
# Free memory below this part of all memory is worth mentioning where something does not fit.
_LITTLE = 1 / 8
# An exbibyte, which keeps sums within signed 64-bit integers.
_MOST_BYTES = 2**60
# The most characters of a size; `int` rejects thousands of digits with its own error.
_LONGEST = 100
_UNITS_SHOWN = ("KiB", "MiB", "GiB", "TiB", "PiB")


def parse_limit(limit: float | str | None, backend: MemoryBackend, *, name: str = "memory_limit") -> int | None:
    """Return the limit in bytes; None, for no limit, stays None.

    Args:
        limit: Bytes (int, or a string of digits); a string with a unit, where KiB, MiB, GiB, TiB and bare letters are
            powers of 1024 and KB, MB, GB, TB of 1000; or a fraction above 0 and up to 1 (float, string with a point, or
            percent) of `backend.total_for_fraction()`.
        backend: The device to limit.
        name: The name of the argument, for messages.

    Raises:
        InvalidInputError: The limit is none of these, or is not positive.
    """
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | float | str):
        raise InvalidInputError(f"{name}={shown(limit)} ({type(limit).__name__}) cannot be read; {_FORMS}")
    if isinstance(limit, str):
        n_bytes = _parse_text(name, limit, backend)
    elif isinstance(limit, float):
        n_bytes = _fraction(name, limit, limit, backend)
    else:
        n_bytes = limit
    _check_bounds(name, limit, n_bytes)
    backend.check_limit(n_bytes)
    return n_bytes


def parse_size(text: str, *, name: str) -> int:
    """Return a size such as "24GiB" in bytes; like `parse_limit`, but without fractions or a device.

    Raises:
        InvalidInputError: The text is not a size.
    """
    if not isinstance(text, str):
        raise InvalidInputError(f"{name}={shown(text)} is not a size; give one such as '24GiB'")
    n_bytes = _parse_text(name, text, None)
    if n_bytes < 1:
        raise InvalidInputError(f"{name}={text!r} leaves no memory; give a size such as '24GiB'")
    _check_bounds(name, text, n_bytes)
    return n_bytes


def format_bytes(n_bytes: int) -> str:
    """Format a number of bytes, which may be negative, as text such as '9.1 GiB' or '512 B'."""
    sign, size = ("-" if n_bytes < 0 else ""), float(abs(n_bytes))
    if size < 1024:  # noqa: PLR2004 - the step between two binary units
        return f"{sign}{int(size)} B"
    for unit in _UNITS_SHOWN:
        size /= 1024
        # 1023.95 would be printed as 1024.0: take the next unit.
        if size < 1023.95 or unit == _UNITS_SHOWN[-1]:  # noqa: PLR2004 - see above
            break
    return f"{sign}{size:.1f} {unit}"


def _check_bounds(name: str, limit: float | str, n_bytes: float) -> None:
    if n_bytes < 1:
        raise InvalidInputError(f"{name}={shown(limit)} leaves no memory; {_FORMS}")
    if n_bytes > _MOST_BYTES:
        raise InvalidInputError(f"{name}={shown(limit)} is more than any device has; {_FORMS}")


def _parse_text(name: str, limit: str, backend: MemoryBackend | None) -> int:
    match = _SIZE.fullmatch(limit.strip()) if len(limit) <= _LONGEST else None
    if match is None:
        raise InvalidInputError(f"{name}={shown(limit)} cannot be read; {_FORMS}")
    number, unit = match["number"], match["unit"].lower()
    if unit == "%":
        return _fraction(name, limit, float(number) / 100, backend)
    if not unit:
        return int(number) if number.isdigit() else _fraction(name, limit, float(number), backend)
    if unit not in _UNIT_BYTES:
        raise InvalidInputError(f"{name}={limit!r} has the unknown unit {match['unit']!r}; {_FORMS}")
    return int(float(number) * _UNIT_BYTES[unit])


def _fraction(name: str, limit: float | str, fraction: float, backend: MemoryBackend | None) -> int:
    if backend is None:
        raise InvalidInputError(f"{name}={limit!r} is a fraction, but of an unknown total; give a size such as '24GiB'")
    if not 0 < fraction <= 1:
        raise InvalidInputError(f"{name}={limit!r} is read as a fraction and must be above 0 and at most 1; {_FORMS}")
    return int(fraction * backend.total_for_fraction())


def describe_neighbours(memory: MemoryBackend) -> str:
    """Return a sentence on the other processes that use memory of a device; empty if none are known."""
    others = memory.neighbours()
    if not others:
        return ""
    shares = [
        f"{other.name} (pid {other.pid})" + ("" if other.used_bytes is None else f" {format_bytes(other.used_bytes)}")
        for other in others
    ]
    return f"other processes hold memory of {memory.name}: {listed(shares)}"


def describe_room(memory: MemoryBackend) -> str:
    """Return what may be why memory runs out on a device: its limit, little that is free, other processes; or nothing.

    Where there is plenty of free memory, nothing is said of it: something has asked for more.
    """
    if memory.limit_bytes is not None:
        return f"memory_limit={format_bytes(memory.limit_bytes)}"
    reading = memory.reading()
    found = []
    if reading.free_bytes < _LITTLE * reading.total_bytes:
        found.append(f"{format_bytes(reading.free_bytes)} of {format_bytes(reading.total_bytes)} are free")
    if neighbours := describe_neighbours(memory):
        found.append(neighbours)
    return "; ".join(found)
