"""Kinds of attack, each a module whose function `attack(folder, seed, share)` returns rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one kind of attack: a row of the table that `python scripts/attack.py` prints.

    Attributes:
        attack: Its name in the table, such as "SIGKILL of one process".
        tries: The number of tries.
        losses: One line for each try that broke a promise.
        note: Further facts that explain the numbers.
    """

    attack: str
    tries: int
    losses: tuple[str, ...] = ()
    note: str = ""
