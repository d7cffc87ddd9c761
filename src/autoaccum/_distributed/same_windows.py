"""Sees that ranks that each go through all samples, and take their part of every window, see the same windows.

What stands for a window goes with the message that ranks exchange for it anyway. A loader that ends earlier on one rank
is an error on all of them, before an update is made of what is not one window. Other targets are printed: transforms
may draw them anew on every rank, but an order of its own on each rank uses samples twice and leaves others out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autoaccum._loss.counting import is_pair, target_tensors
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.batches import Window
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._system.notices import Notices

_BITS = 31


class GoneThrough:
    """Compares the windows of all ranks.

    Args:
        ranks: All ranks.
        notices: Where other targets are printed.

    Attributes:
        note: Stands for the present window: its number of samples, and its targets where they are whole numbers.
    """

    def __init__(self, ranks: Ranks, notices: Notices) -> None:
        self._ranks = ranks
        self._notices = notices
        self.note = 0

    def begin(self, window: Window) -> None:
        """Begin with a window, before this rank's part is taken of it; an empty one where the loader has ended."""
        self.note = window.samples << _BITS | (_stands_for(window) if window.samples else 0)

    def check(self, notes: Sequence[int]) -> None:
        """Compare what stands for the window on each rank.

        Raises:
            InvalidInputError: Numbers of samples differ; on every rank.
        """
        sizes = [note >> _BITS for note in notes]
        for rank, samples in enumerate(sizes):
            if samples != sizes[0]:
                has, others = (f"{n} samples" if n else "no sample" for n in (samples, sizes[0]))
                raise InvalidInputError(
                    f"the loader of rank {rank} has {has} left for a window, and that of rank 0 {others}; with "
                    "shard=True every rank's has to give all of the data, of which each takes its part"
                )
        if len(set(notes)) > 1:
            others = ", ".join(str(rank) for rank, note in enumerate(notes) if note != notes[0])
            self._notices.say(
                f"shard=True: the targets of a window are others on ranks {others} than on rank 0. Every rank's loader "
                "has to give the same samples in the same order; if it shuffles, seed it alike on all ranks, or some "
                "samples are used twice and others never",
                key="other targets",
            )


def _stands_for(window: Window) -> int:
    """Return a number that other targets, or another order of them, would change; 0 where they are no whole numbers."""
    found = 0
    for batch, samples in window.parts(0, window.samples):
        # Targets may be anything beside tensors: none at all, texts, one number for all.
        for tensor in target_tensors(batch).values() if is_pair(batch) else ():
            if len(tensor) == samples and not tensor.is_floating_point() and not tensor.is_complex():
                each = tensor.reshape(samples, tensor.numel() // samples).sum(1, dtype=torch.int64)
                found = found * 31 + int((each * torch.arange(1, samples + 1, device=each.device)).sum())
    return found % (1 << _BITS)
