"""The records of an examination."""

from __future__ import annotations

from dataclasses import dataclass

Value = str | int | float | bool | list[str] | None


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that was found.

    Attributes:
        name: What it is, unique within its area.
        text: Its value in words.
        value: Its value as it goes into JSON; sizes in bytes.
    """

    name: str
    text: str
    value: Value


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not fit together.

    Attributes:
        text: What was found, and what to do.
    """

    text: str


Finding = Fact | Problem


def fact(name: str, text: str | None) -> Fact:
    """Return a fact whose value is its text; "none" for None."""
    return Fact(name, "none" if text is None else text, text)
