"""Climbs the ladder of `memory="auto"`: wherever not even one sample fits, the next thing that saves memory is added.

A *rung* is what is in force together: a tuple of names as `fit` takes them in `memory`. The first is the empty one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.checkpoint import CheckpointError

from autoaccum._engine.saving_names import CHUNKED
from autoaccum.errors import DoesNotFitError, SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# What another rung may avoid: not one sample fits, or the model or its loss does not bear what is in force.
AVOIDABLE = (DoesNotFitError, SavingRefusedError, CheckpointError)

Rung = tuple[str, ...]


class Rungs:
    """What `memory="auto"` saves memory by. Ranks climb each by itself.

    Args:
        levels: Returns what can save memory, from the cheapest on, by names of `memory`.

    Attributes:
        rung: What saves memory in the next window.
    """

    def __init__(self, levels: Callable[[], Rung]) -> None:
        self._levels = levels
        self._left: list[str] = []
        self.rung: Rung = ()

    def begin(self, known: Rung | None = None) -> None:
        """Begin with what an earlier run has needed, if it can be had here, else with nothing."""
        levels = self._levels()
        self.rung = known if known and list(known) == [name for name in levels if name in known] else ()
        self._left = list(levels[levels.index(self.rung[-1]) + 1 if self.rung else 0 :])

    def climb(self, error: Exception) -> bool:
        """Take another rung after an error; return whether there is one that may avoid it.

        Args:
            error: One of `AVOIDABLE`. What is refused is left out from then on.
        """
        if isinstance(error, DoesNotFitError):
            if not self._left or not error.saving_helps:
                return False
            self.rung = (*self.rung, self._left.pop(0))
            return True
        refused = CHUNKED if CHUNKED in str(error) else "checkpoint"
        kept = tuple(name for name in self.rung if not name.startswith(refused))
        if kept == self.rung:
            return False
        self.rung = kept or tuple(self._left[:1])
        if not kept:
            del self._left[:1]
        return True


def reason_of(error: Exception) -> str:
    """Return why another rung is taken after an error."""
    if isinstance(error, DoesNotFitError):
        return "not even one sample fits"
    text = str(error).partition("\n")[0]
    return text if isinstance(error, SavingRefusedError) else f"this fails: {type(error).__name__}: {text}"


def change_of_rung(reason: str, ways: Sequence[str]) -> str:
    """Return what the user is told of another rung.

    Args:
        reason: Why it is taken.
        ways: What is in force now, in words.
    """
    return f"{reason}; from now on {'; '.join(ways) or 'nothing saves memory'} (memory='auto')"
