"""Checks that ranks that each iterate over all samples, and take their part of every window, see the same windows.

A digest of each window travels with the message that ranks exchange for it anyway. If a loader ends earlier on one
rank, all ranks raise an error before they make an update from parts of different windows. Differing targets only lead
to a notice: transforms may draw them differently on every rank, but a different order on each rank uses some samples
twice and leaves others out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autoaccum._data.nesting import tensors_in
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
        notices: Reports differing targets.

    Attributes:
        note: Digest of the current window: its number of samples, and its targets if they are integers.
    """

    def __init__(self, ranks: Ranks, notices: Notices) -> None:
        self._ranks = ranks
        self._notices = notices
        self.note = 0

    def begin(self, window: Window) -> None:
        """Begin a window, before this rank's part is taken from it; pass an empty one if the loader has ended."""
        self.note = window.samples << _BITS | (_stands_for(window) if window.samples else 0)

    def check(self, notes: Sequence[int]) -> None:
        """Compare the digests of the window from all ranks.

        Raises:
            InvalidInputError: Numbers of samples differ. Raised on every rank.
        """
        sizes = [note >> _BITS for note in notes]
        for rank, samples in enumerate(sizes):
            if samples != sizes[0]:
                has, others = (f"{n} samples" if n else "no sample" for n in (samples, sizes[0]))
                raise InvalidInputError(
                    f"the loader of rank {rank} has {has} left for a window, and that of rank 0 {others}; with "
                    "shard=True every rank's loader must give all of the data, and each rank takes its part"
                )
        if len(set(notes)) > 1:
            others = ", ".join(str(rank) for rank, note in enumerate(notes) if note != notes[0])
            self._notices.say(
                f"shard=True: the targets of a window differ between rank 0 and ranks {others}. Every rank's loader "
                "has to give the same samples in the same order; if it shuffles, seed it alike on all ranks, or some "
                "samples are used twice and others never (targets that a transform draws, such as masked tokens, do no "
                "harm)",
                key="other targets",
            )


def _stands_for(window: Window) -> int:
    """Return a digest that depends on the targets and their order; 0 if they are not integers."""
    found = 0
    for batch, samples in window.parts(0, window.samples):
        # Targets need not be tensors: there may be none at all, texts, or one number for all.
        for tensor in tensors_in(batch):
            if tensor.dim() and len(tensor) == samples and not tensor.is_floating_point() and not tensor.is_complex():
                each = tensor.reshape(samples, tensor.numel() // samples).sum(1, dtype=torch.int64)
                found = found * 31 + int((each * torch.arange(1, samples + 1, device=each.device)).sum())
    return found % (1 << _BITS)
