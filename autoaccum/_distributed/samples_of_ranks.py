"""Collects samples of several ranks, the same ones on each."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, cast

import torch

from autoaccum._data.batches import Window
from autoaccum._data.nesting import copied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.pieces import Split
    from autoaccum._distributed.process_group import Ranks


def samples_of(ranks: Ranks, window: Window, sources: Sequence[int], most: int, split: Split) -> Window | None:
    """Return samples of several ranks, on the host; the same ones on every rank.

    Args:
        ranks: All ranks.
        window: This rank's part of the window.
        sources: The ranks whose samples are wanted.
        most: The most samples of each.
        split: Counts, cuts and joins the samples.

    Returns:
        A window of them; None if they cannot be sent.
    """
    found: list[Any] = []
    for source in sources:
        found += ranks.tell(_sendable(window, most) if source == ranks.rank else None, source)
    return Window(found, split) if found else None


def _sendable(window: Window, most: int) -> list[Any]:
    """Return the first samples of a window, as the loader would yield them; nothing if they cannot be pickled."""
    try:
        found = copied(window.part(0, min(most, window.groups()[0])).raw())
        torch.save(found, io.BytesIO())
    except Exception:  # noqa: BLE001 - of the user's own types; other ranks wait for what is sent
        return []
    return cast("list[Any]", found)
