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
    """Return the rank that computes each sample, the same wherever it is called with the same costs.

    Longest first to the rank with least (Graham 1969); then samples of the busiest rank and the idlest change places.
    No rank is without a sample, unless there are fewer samples than ranks.

    Args:
        costs: Of each sample, above 0.
        ranks: Number of ranks.
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
        if not _change_places(costs, held, loads, bound):
            break
    owners = {sample: rank for rank, samples in enumerate(held) for sample in samples}
    return [owners[sample] for sample in range(len(costs))]


def _change_places(costs: Sequence[float], held: list[list[int]], loads: list[float], bound: float) -> bool:
    """Let a sample of the busiest rank and one of the idlest change places; return whether it has helped."""
    most, fewest = (loads.index(find(loads)) for find in (max, min))
    gap = loads[most] - loads[fewest]
    if loads[most] <= bound:
        return False
    pairs = itertools.product(range(len(held[most])), range(len(held[fewest])))
    moved, one, other = min(
        ((costs[held[most][one]] - costs[held[fewest][other]], one, other) for one, other in pairs),
        key=lambda pair: abs(gap / 2 - pair[0]),
        default=(0.0, 0, 0),
    )
    if not 0.0 < moved < gap:
        return False
    held[most][one], held[fewest][other] = held[fewest][other], held[most][one]
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
        widths = [sum(wide) for runs in part.widths() for samples, wide in runs for _ in range(samples)]
        said = ranks.exchange("widths", (widths, costs.measured()))
        loaded = [rank for rank, (of_rank, _) in enumerate(said) for _ in of_rank]
        if not loaded or self._is_left_out([len(of_rank) for of_rank, _ in said]):
            return part
        cost = fitted(one for _, measured in said for one in measured)
        each = [cost.of(width) for of_rank, _ in said for width in of_rank]
        owners = shares(each, ranks.size)
        if busiest(each, loaded, ranks.size) <= _ENOUGH * busiest(each, owners, ranks.size):
            return part
        mine = dict(zip((at for at, rank in enumerate(loaded) if rank == ranks.rank), _samples(part), strict=True))
        sent, lengths, reason = _packed(mine, owners, ranks)
        answers = ranks.exchange("samples to send", (lengths, reason))
        if any(why for _, why in answers):
            self._notices.say(
                f"samples stay on the ranks that load them, since they cannot be sent to others "
                f"({next(why for _, why in answers if why)}), so ranks wait for the one with the longest; let the "
                "dataset return what can be pickled, on the CPU",
                key="samples that stay",
            )
            return part
        kept = {place: sample for place, sample in mine.items() if owners[place] == ranks.rank}
        for received in ranks.swap(sent, lengths, [lengths_of[ranks.rank] for lengths_of, _ in answers]):
            kept.update(_unpacked(received))
        return self._window_of(kept).made_of(part)

    def _window_of(self, samples: dict[int, Any]) -> Window:
        if not samples:
            return Window.of_spans((), None)
        places = sorted(samples)
        window = Window.of_checked([[samples[place] for place in places]], self._split)
        window.places = places
        return window


def _samples(part: Window) -> list[Any]:
    return [sample for samples in part.raw() for sample in samples]


def _packed(mine: dict[int, Any], owners: Sequence[int], ranks: Ranks) -> tuple[io.BytesIO, list[int], str | None]:
    """Return the samples for other ranks, one after the other, the bytes for each, and why they cannot be sent."""
    stream = io.BytesIO()
    lengths: list[int] = []
    for rank in range(ranks.size):
        begin = stream.tell()
        try:
            for place, sample in mine.items() if rank != ranks.rank else ():
                if owners[place] == rank:
                    pickle.dump((place, _on_host(sample)), stream, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - of the user's own types; other ranks wait for what is sent
            return stream, [], f"{type(error).__name__}: {first_line(error)}"
        lengths.append(stream.tell() - begin)
    return stream, lengths, None


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
