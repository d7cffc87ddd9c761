"""Decides which entries of a mapping of losses are trained on and which are only reported.

The rule is the same for a model, a loss and one of several losses: an entry "loss" is the total, and the others are
reported under their names. Without it, entries with a graph are summed, and detached ones are reported. When gradients
are disabled no entry has a graph: then the roles seen in training apply, or one sample is run with gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoaccum._system.notices import Notices

TOTAL = "loss"


class Entries:
    """Tracks which names are losses and which are metrics.

    Args:
        notices: Reports, once, which entries are only reported.
        on_reported: Called with each name that turns out to be a metric in training.
    """

    def __init__(self, notices: Notices, on_reported: Callable[[str], None]) -> None:
        self._notices = notices
        self._on_reported = on_reported
        # Whether each name is a loss: as seen in training, and as assumed before.
        self._shown: dict[str, bool] = {}
        self._supposed: dict[str, bool] = {}

    def is_reported(self, name: str) -> bool:
        """Whether this name turned out to be a metric in training."""
        return self._shown.get(name) is False

    def added(
        self, raw: Mapping[str, Any], total: str, with_gradients: Callable[[], Mapping[str, Any] | None]
    ) -> set[str]:
        """Return the names of the entries that sum to the loss.

        Args:
            raw: The entries by name.
            total: The name of the entry that is the total.
            with_gradients: Returns entries of the same names, computed with gradients; None if that is not possible.
                Called only if gradients are disabled and the names are unknown.

        Raises:
            InvalidInputError: There are no entries.
        """
        if not raw:
            raise InvalidInputError(
                f"loss returned an empty mapping; return a scalar, or a mapping with an entry "
                f"{total!r} or with terms to add"
            )
        if raw.get(total) is not None:
            self._note_parts(raw, total)
            return {total}
        if len(raw) == 1:
            return set(raw)
        if torch.is_grad_enabled():
            return self._by_graph(raw)
        if any(name not in self._shown and name not in self._supposed for name in raw):
            self._suppose(with_gradients())
        roles = {**self._supposed, **self._shown}
        return {name for name in raw if roles.get(name, True)} or set(raw)

    def _note_parts(self, raw: Mapping[str, Any], total: str) -> None:
        for name in raw:
            if name != total and self._shown.get(name) is not False:
                self._shown[name] = False
                self._on_reported(name)
        # `objective` rejects entries that are not numbers.
        others = [name for name, value in raw.items() if name != total and not isinstance(value, str | None)]
        if others:
            self._notices.say(
                f"{_listed(others)}: reported, not trained on, since the entry {total!r} is the total",
                key=f"parts of {total}",
            )

    def _by_graph(self, raw: Mapping[str, Any]) -> set[str]:
        with_graph = {name for name, value in raw.items() if _has_graph(value)}
        if not with_graph:
            return set(raw)  # which raises an error later
        detached = []
        for name in raw:
            if name in with_graph:
                # For good: a detection loss without a graph in a micro-batch without boxes is still a loss.
                self._shown[name] = True
            elif name not in self._shown:
                self._shown[name] = False
                detached.append(name)
                self._on_reported(name)
        if detached:
            self._notices.say(f"{_listed(detached)}: reported, not trained on, since it has no gradient")
        return {name for name in raw if self._shown[name]}

    def _suppose(self, raw: Mapping[str, Any] | None) -> None:
        found = {name: _has_graph(value) for name, value in (raw or {}).items()}
        if any(found.values()):
            self._supposed.update(found)


def _has_graph(value: Any) -> bool:
    """Whether a value, or anything in a container, has a graph: losses in a list must be rejected, not left out."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, Mapping):
        return any(map(_has_graph, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_graph, value))


def _listed(names: list[str]) -> str:
    return ("loss " if len(names) == 1 else "losses ") + ", ".join(map(repr, names))
