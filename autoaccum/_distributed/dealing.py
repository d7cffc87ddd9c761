"""Deals the samples of a window out to the ranks that compute them, so that all finish together.

Each rank comes with the samples that it has loaded. All learn their widths, and compute the same shares: from the
costliest sample to the cheapest, each goes to the rank with least to do. Then ranks send each other the samples that
change hands. The samples of the window, and with them its gradient, stay the same.
"""

from __future__ import annotations

import heapq
import io
import itertools
import pickle
from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import Window
from autoaccum._data.nesting import copied, tensors_in
from autoaccum._oom import first_line
from autoaccum._sizing.costs import fitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from autoaccum._data.splits import ListOfSamples
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._sizing.costs import Costs
    from autoaccum._system.notices import Notices

# How near to its least the work of the busiest rank is enough: below the spread of a rank's time from step to step.
_ENOUGH = 1.01


def least(costs: Sequence[float], ranks: int) -> float:
    """Return the least that the busiest rank can have to do: the mean of all, or the costliest sample."""
    return max(sum(costs) / ranks, *costs)


def busiest(costs: Sequence[float], owners: Sequence[int], ranks: int) -> float:
    """Return what the rank with most to do has to do, given the rank of each sample."""
    loads = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return max(loads)


def shares(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank that computes each sample, the same wherever it is called with the same costs, all above 0.

    Longest first to the rank with least (Graham 1969); then samples of the busiest rank and the idlest change places.
    No rank is without a sample, unless there are fewer samples than ranks.
    """
    idlest = [(0.0, rank) for rank in range(ranks)]
    held: list[list[int]] = [[] for _ in range(ranks)]
    for sample in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        load, rank = idlest[0]
        held[rank].append(sample)
        heapq.heapreplace(idlest, (load + costs[sample], rank))
    loads = [load for load, _ in sorted(idlest, key=lambda one: one[1])]
    bound = _ENOUGH * least(costs, ranks)
    for _ in range(4 * ranks):  # so many changes have always been enough in benchmarks/dealing.py
        if max(loads) <= bound or not _change_places(costs, held, loads):
            break
    owners = {sample: rank for rank, samples in enumerate(held) for sample in samples}
    return [owners[sample] for sample in range(len(costs))]


def _change_places(costs: Sequence[float], held: list[list[int]], loads: list[float]) -> bool:
    """Let a sample of the busiest rank and one of the idlest change places; return whether it has helped."""
    most, fewest = (loads.index(find(loads)) for find in (max, min))
    gap = loads[most] - loads[fewest]
    pairs = itertools.product(held[most], held[fewest])
    one, other = min(pairs, key=lambda pair: abs(gap / 2 - costs[pair[0]] + costs[pair[1]]), default=(0, 0))
    moved = costs[one] - costs[other]
    if not 0.0 < moved < gap:
        return False
    held[most][held[most].index(one)], held[fewest][held[fewest].index(other)] = other, one
    loads[most] -= moved
    loads[fewest] += moved
    return True


class Dealer:
    """Deals out the windows of a training.

    Args:
        ranks: All ranks.
        split: Collates lists of samples.
        is_left_out: Whether a window is left out, given the number of samples that each rank has loaded.
        notices: Says where samples cannot be sent.
    """

    def __init__(
        self, ranks: Ranks, split: ListOfSamples, is_left_out: Callable[[Sequence[int]], bool], notices: Notices
    ) -> None:
        self._ranks = ranks
        self._split = split
        self._is_left_out = is_left_out
        self._notices = notices

    def deal(self, part: Window, costs: Costs) -> Window:
        """Return the samples of a window that this rank computes, in the loader's order; all ranks call it together.

        The samples stay where they are if that is about as even, or if some cannot be pickled.

        Args:
            part: The samples that this rank has loaded; may be none.
            costs: The measured times of this rank.

        Raises:
            InvalidInputError: The split says a cost that is none.
            RankFailedError: Another rank has failed, or is gone.
        """
        ranks = self._ranks
        said = ranks.exchange("widths", (part.each_width(), costs.measured()))
        loaded = [rank for rank, (widths, _) in enumerate(said) for _ in widths]
        if not loaded or self._is_left_out([len(widths) for widths, _ in said]):
            return part
        cost = fitted(one for _, measured in said for one in measured)
        each = [cost.of(width) for widths, _ in said for width in widths]
        owners = shares(each, ranks.size)
        if busiest(each, loaded, ranks.size) <= _ENOUGH * busiest(each, owners, ranks.size):
            return part
        places = (place for place, rank in enumerate(loaded) if rank == ranks.rank)
        held = dict(zip(places, part.each_sample(), strict=True))
        sent, lengths, reason = _packed(held, owners, ranks)
        answers = ranks.exchange("samples to send", (lengths, reason))
        if reason := next((why for _, why in answers if why), None):
            self._notices.say(
                f"samples stay on the ranks that load them, since they cannot be sent to others ({reason}), so ranks "
                "wait for the one with the longest; let the dataset return what can be pickled, on the CPU",
                key="samples that stay",
            )
            return part
        held = {place: sample for place, sample in held.items() if owners[place] == ranks.rank}
        for received in ranks.swap(sent, lengths, [of_rank[ranks.rank] for of_rank, _ in answers]):
            held.update(_unpacked(received))
        if not held:
            return Window.of_spans((), None).made_of(part)
        found = Window.of_checked([[held[place] for place in sorted(held)]], self._split).made_of(part)
        found.places = sorted(held)
        return found


def _packed(held: dict[int, Any], owners: Sequence[int], ranks: Ranks) -> tuple[io.BytesIO, list[int], str | None]:
    """Return the samples for other ranks, one after the other, the bytes for each, and why they cannot be sent."""
    stream = io.BytesIO()
    ends = [0]
    for rank in range(ranks.size):
        try:
            for place, sample in held.items() if rank != ranks.rank else ():
                if owners[place] == rank:
                    pickle.dump((place, _on_host(sample)), stream, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - of the user's own types; other ranks wait for what is sent
            return stream, [], f"{type(error).__name__}: {first_line(error)}"
        ends.append(stream.tell())
    return stream, [end - begin for begin, end in itertools.pairwise(ends)], None


def _on_host(sample: Any) -> Any:
    """Return a copy of a sample, which holds no more than its own part of a tensor that it views."""
    for tensor in tensors_in(sample):
        if tensor.device.type != "cpu":
            raise TypeError(f"a sample holds a tensor on {tensor.device}")
    return copied(sample)


def _unpacked(received: Tensor) -> Iterator[tuple[int, Any]]:
    stream = io.BytesIO(received.numpy().tobytes())
    while stream.tell() < len(received):
        yield pickle.load(stream)  # noqa: S301 - of this training's own processes
