"""Deals the samples of a window out to the ranks that compute them, so that all finish together.

Each rank comes with the samples that it has loaded. All learn their widths, and compute the same shares: those as
loaded, and from the busiest rank to the idlest the few samples that even them out. Then ranks send each other the
samples that change hands. The samples of the window, and with them its gradient, stay the same.
"""

from __future__ import annotations

import io
import pickle
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from autoaccum._oom import first_line
from autoaccum._sizing.costs import BY_ELEMENTS, fitted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._data.splits import ListOfSamples
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._sizing.costs import Costs
    from autoaccum._system.notices import Notices

# How near to its least the work of the busiest rank is enough: below the spread of a rank's time from step to step.
_ENOUGH = 1.01
# Of so many samples of a rank, some even it out with another; all pairs of more would take memory.
_CANDIDATES = 512
# What is left of the seconds of an exchange in a window without one, since the next may be faster.
_FADES = 0.9


def least(costs: Sequence[float], ranks: int) -> float:
    """Return the least that the busiest rank can have to do: the mean of all, or the costliest sample."""
    return max(sum(costs) / ranks, *costs)


def busiest(costs: Sequence[float], owners: Sequence[int], ranks: int) -> float:
    """Return what the rank with most to do has to do, given the rank of each sample."""
    return float(np.bincount(owners, costs, ranks).max())


def shares(costs: Sequence[float], loaded: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that computes each sample, the same wherever it is called with the same costs, all above 0.

    From the shares as loaded, a sample of the busiest rank goes to the idlest, or changes places with one of its, until
    all have about as much to do. No rank that has a sample ends without.
    """
    each, owners = np.array(costs), np.array(loaded)
    loads, bound = np.bincount(owners, each, ranks), _ENOUGH * least(costs, ranks)
    for _ in costs:  # far fewer changes are enough in benchmarks/dealing.py
        most, fewest = loads.argmax(), loads.argmin()
        mine, others = (np.flatnonzero(owners == rank)[:_CANDIDATES] for rank in (most, fewest))
        gap, moved = loads[most] - loads[fewest], np.subtract.outer(each[mine], np.append(each[others], 0.0))
        one, other = np.unravel_index(np.abs(gap / 2 - moved).argmin(), moved.shape)
        if loads[most] <= bound or not 0.0 < moved[one, other] < gap:
            break
        owners[mine[one]] = fewest
        owners[others[other : other + 1]] = most  # none, if it is only moved
        loads[most] -= moved[one, other]
        loads[fewest] += moved[one, other]
    return [int(owner) for owner in owners]


class Dealer:
    """Deals out the windows of a training.

    Args:
        ranks: All ranks.
        split: Collates lists of samples.
        stays: Whether samples stay as loaded: BatchNorm refuses a single one, which a rank may have in the end.
        is_left_out: Whether a window is left out, given the number of samples that each rank has loaded.
        notices: Says where samples cannot be sent.
    """

    def __init__(
        self,
        ranks: Ranks,
        split: ListOfSamples,
        stays: Callable[[], bool],
        is_left_out: Callable[[Sequence[int]], bool],
        notices: Notices,
    ) -> None:
        self._ranks = ranks
        self._split = split
        self._stays = stays
        self._is_left_out = is_left_out
        self._notices = notices
        self._has_failed = False  # on all ranks
        self._seconds = 0.0  # of the last exchange of samples

    def deal(self, part: Window, costs: Costs) -> None:
        """Let a window hold the samples that this rank computes, in the loader's order; all ranks call it together.

        The samples stay where they are if that is about as even, if to send them takes longer than ranks would wait, or
        if some could not be sent.

        Args:
            part: The samples that this rank has loaded; may be none.
            costs: The measured times of this rank.

        Raises:
            InvalidInputError: The split says a cost that is none.
            RankFailedError: Another rank has failed, or is gone.
        """
        ranks = self._ranks
        told = part.each_width(), fitted(costs.measured()), self._stays(), self._seconds
        each_widths, costs_of, stay, seconds = zip(*ranks.exchange("widths", told), strict=True)
        loaded = [rank for rank, widths in enumerate(each_widths) for _ in widths]
        part.places = [place for place, rank in enumerate(loaded) if rank == ranks.rank]
        if not loaded or self._has_failed or any(stay) or self._is_left_out(list(map(len, each_widths))):
            return
        # That of one rank, since the last bits of a fit may differ between hosts.
        cost = next((one for one in costs_of if one != BY_ELEMENTS), BY_ELEMENTS)
        each = [cost.of(width) for widths in each_widths for width in widths]
        owners = shares(each, loaded, ranks.size)
        before, after = (busiest(each, of_ranks, ranks.size) for of_ranks in (loaded, owners))
        if before <= _ENOUGH * after or (cost != BY_ELEMENTS and before - after <= max(seconds)):
            self._seconds *= _FADES
            return
        began = time.perf_counter()
        held = dict(zip(part.places, part.each_sample(), strict=True))
        received = self._exchanged(held, owners)
        if received is not None:
            own = {place: one for place, one in held.items() if owners[place] == ranks.rank}
            part.hold(own | received, self._split)
            self._seconds = time.perf_counter() - began

    def _exchanged(self, held: dict[int, Any], owners: Sequence[int]) -> dict[int, Any] | None:
        """Send the samples that others compute; return what they have sent, by place, or None if all keep theirs."""
        ranks = self._ranks
        packed = self._on_all("samples to send", lambda: _packed(held, owners, ranks))
        if packed is None:
            return None
        stream, lengths = packed
        expected = [of_rank[ranks.rank] for of_rank in ranks.exchange("their lengths", lengths)]
        received = self._on_all("room for samples", lambda: torch.empty(sum(expected), dtype=torch.uint8))
        if received is None:
            return None
        ranks.swap(stream, lengths, received, expected)
        parts = [part.numpy().data for part in torch.split(received, expected) if len(part)]
        # Only now do others keep the samples that they have sent no longer.
        found = self._on_all("samples received", lambda: [pickle.loads(part) for part in parts])  # noqa: S301 - as above
        return None if found is None else {place: one for of_rank in found for place, one in of_rank.items()}

    def _on_all(self, topic: str, make: Callable[[], Any]) -> Any:
        """Return what is made here, or None if any rank fails to make its own: then samples stay from now on."""
        made = reason = None
        try:
            made = make()
        except Exception as error:  # noqa: BLE001 - of the user's own types, or lack of memory; others wait
            reason = f"{type(error).__name__}: {first_line(error)}"
        reason = next(filter(None, self._ranks.exchange(topic, reason)), None)
        if reason is None:
            return made
        self._has_failed = True
        self._notices.say(
            f"samples stay on the ranks that load them, since they cannot be sent to others ({reason}), so ranks wait "
            "for the one with the longest; let the dataset return what can be pickled, on the CPU",
            key="samples that stay",
        )
        return None


def _packed(held: dict[int, Any], owners: Sequence[int], ranks: Ranks) -> tuple[io.BytesIO, list[int]]:
    """Return the samples for other ranks, by place, one rank's after the other's, and the bytes for each."""
    stream, lengths = io.BytesIO(), []
    for rank in range(ranks.size):
        begin, theirs = stream.tell(), {place: one for place, one in held.items() if owners[place] == rank}
        if theirs and rank != ranks.rank:
            _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(theirs)
        lengths.append(stream.tell() - begin)
    return stream, lengths


class _Pickler(pickle.Pickler):
    """Pickles of a tensor only its own part of what it views, and much faster than torch."""

    def reducer_override(self, found: Any) -> Any:
        """As in the base class."""
        if isinstance(found, Tensor) and found.device.type != "cpu":
            raise TypeError(f"a sample holds a tensor on {found.device}")
        if type(found) is not Tensor or found.layout is not torch.strided or found.requires_grad:
            return NotImplemented
        data = found.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return _tensor, (pickle.PickleBuffer(data), found.dtype, tuple(found.shape))


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
