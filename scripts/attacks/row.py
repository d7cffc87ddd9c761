"""What one attack found: a row of the table that `make attack` prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one kind of attack.

    Attributes:
        attack: What was done, as the table shows it: "SIGKILL of one process".
        tries: How often.
        losses: One line for each try that broke a promise; empty where all held.
        note: What else the figures need to be understood.
    """

    attack: str
    tries: int
    losses: tuple[str, ...] = ()
    note: str = ""
