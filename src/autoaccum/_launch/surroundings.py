"""The memory of the devices that a command will find: read in a moment, said in a line each, kept as records.

The wrapper holds none of it itself: cards are asked by NVML, without a context, and the host by its own files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoaccum._memory import Host
from autoaccum._memory.limits import format_bytes
from autoaccum._memory.nvml import read_cards

if TYPE_CHECKING:
    from autoaccum._records import Neighbour

# As many of those who hold memory are named as in other messages.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory at one moment.

    Attributes:
        name: The device's name.
        total_bytes: What there is.
        free_bytes: What a process could take now.
        neighbours: Who holds some, as far as it is told.
    """

    name: str
    total_bytes: int
    free_bytes: int
    neighbours: tuple[Neighbour, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return it as the log of attempts keeps it."""
        others = [{"pid": one.pid, "name": one.name, "used_bytes": one.used_bytes} for one in self.neighbours]
        return {
            "name": self.name,
            "total_bytes": self.total_bytes,
            "free_bytes": self.free_bytes,
            "neighbours": others,
        }

    def __str__(self) -> str:
        text = f"{self.name}: {format_bytes(self.free_bytes)} free of {format_bytes(self.total_bytes)}"
        shares = [
            f"{one.name} (pid {one.pid})" + ("" if one.used_bytes is None else f" {format_bytes(one.used_bytes)}")
            for one in self.neighbours[:_NAMED]
        ]
        more = len(self.neighbours) - _NAMED
        return text + (f"; held by {', '.join(shares)}" if shares else "") + (f" and {more} more" if more > 0 else "")


def read_devices() -> tuple[DeviceMemory, ...]:
    """Return the host's memory, and after it that of each card that can be seen."""
    host = Host().reading()
    cards = [DeviceMemory(card.name, card.total_bytes, card.free_bytes, card.neighbours) for card in read_cards()]
    return DeviceMemory("host memory", host.total_bytes, host.free_bytes), *cards
