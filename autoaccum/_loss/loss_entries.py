"""Decides which entries of a mapping of losses are trained on and which are only reported.

The rule is the same for a model, a loss and one of several losses: an entry "loss" is the total, and the others are
reported under their names. Without it, entries with a graph are summed, and detached ones are reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._system.notices import Notices

TOTAL = "loss"


class Entries:
    """Tracks which names are losses and which are metrics.

    Args:
        notices: Reports, once, which entries are only reported.
    """

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._roles: dict[str, bool] = {}  # whether each name is a loss
        self._asked: set[str] = set()

    def needs_graphs(self, raw: Mapping[str, Any], total: str) -> bool:
        """Whether only graphs, which the caller has disabled, would tell the roles; True once for each name."""
        if torch.is_grad_enabled() or len(raw) == 1 or raw.get(total) is not None:
            return False
        unknown = raw.keys() - self._roles.keys() - self._asked
        self._asked |= unknown
        return bool(unknown)

    def added(self, raw: Mapping[str, Any], total: str) -> set[str]:
        """Return the names of the entries that sum to the loss."""
        if not raw:
            raise InvalidInputError(
                f"loss returned an empty mapping; return a scalar, or a mapping with an entry "
                f"{total!r} or with terms to add"
            )
        if raw.get(total) is not None:
            others = [name for name in raw if name != total]
            self._roles |= dict.fromkeys(others, False)
            # `objective` rejects entries that are not numbers.
            numbers = [name for name in others if not isinstance(raw[name], str | None)]
            self._say(numbers, f"the entry {total!r} is the total", key=f"parts of {total}")
            return {total}
        if len(raw) == 1:
            return set(raw)
        if with_graph := {name for name, value in raw.items() if _has_graph(value)}:
            # For good: a detection loss without a graph in a micro-batch without boxes is still a loss.
            self._roles.update(dict.fromkeys(with_graph, True))
            detached = [name for name in raw if name not in self._roles]
            self._roles |= dict.fromkeys(detached, False)
            self._say(detached, "it has no gradient", key=None)
        # Without any, all are returned, which raises an error later.
        return {name for name in raw if self._roles.get(name, True)} or set(raw)

    def _say(self, names: list[str], why: str, *, key: str | None) -> None:
        if names:
            listed = ("loss " if len(names) == 1 else "losses ") + ", ".join(map(repr, names))
            self._notices.say(f"{listed}: reported, not trained on, since {why}", key=key)


def _has_graph(value: Any) -> bool:
    """Whether a value, or anything in a container, has a graph: losses in a list must be rejected, not left out."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, Mapping):
        return any(map(_has_graph, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_graph, value))
