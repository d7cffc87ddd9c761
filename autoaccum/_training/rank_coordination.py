"""Coordinates the processes of a training around its windows: their data, requests, errors and checkpoints.

Of a single process there are no `ranks`, and nothing is exchanged. `_distributed/data_parallel.py` makes the windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import Window
from autoaccum._data.regrouping import stream
from autoaccum._data.splits import ListOfSamples
from autoaccum._distributed.consistency import compare_weights, warn_of_same_samples
from autoaccum._distributed.data_parallel import RankPeers
from autoaccum._distributed.dealing import Dealer
from autoaccum._distributed.fsdp import ShardedRankPeers
from autoaccum._distributed.loader import DealtLoader, equal_shares
from autoaccum._engine.batchnorm import BatchNorms
from autoaccum._engine.dtensor import is_sharded
from autoaccum.errors import CheckpointError, InvalidInputError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from autoaccum._data.loader_state import Track
    from autoaccum._data.pieces import Split
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._sizing.costs import Costs
    from autoaccum._system.notices import Notices

# What a process may request after a window, as bits.
SAVE, END, STOP = 1, 2, 4
# What the loader of each of several ranks gives, as a checkpoint says it: all samples, or samples of its own.
_SHARED, _OWN = "windows", "own"


class Coordinator:
    """The processes of one training, seen from one of them.

    Attributes:
        ranks: All ranks; None for a single process.
        loader: The loader that this process reads.
        split: As for `fit`.
        target_batch: Number of samples of a window, or of tokens, that belong to this process.
        peers: The ranks that make windows together; None for a single process, and before `begin`.

    Raises:
        InvalidInputError: There are more ranks than samples in a window, or the loader cannot be sharded.
    """

    def __init__(
        self,
        ranks: Ranks | None,
        loader: Iterable[Any],
        target: int,
        *,
        drop_last: bool,
        shard_data: bool,
        split: Split | None,
        in_tokens: bool,
        notices: Notices,
    ) -> None:
        self.ranks = ranks
        self.loader = loader
        self.split = split
        self.target_batch = self._whole_target = target
        self.peers: RankPeers | None = None
        self._dealer: Dealer | None = None  # deals windows out by the costs of samples; None where they stay
        self._drop_last = drop_last
        self._shards = shard_data
        self._in_tokens = in_tokens
        self._notices = notices
        if ranks is not None:
            self._divide(ranks)

    def _divide(self, ranks: Ranks) -> None:
        target, counted = self._whole_target, "tokens" if self._in_tokens else "batch"
        if target < ranks.size:
            raise InvalidInputError(
                f"target_{counted}={target} is less than the number of ranks, {ranks.size}, so some ranks would "
                f"have no samples; use a larger target_{counted} or fewer ranks"
            )
        bounds = equal_shares(target, ranks.size)
        self.target_batch = bounds[ranks.rank + 1] - bounds[ranks.rank]
        self._notices.say(
            f"{ranks.size} ranks: this rank takes {self.target_batch} {'tokens' if self._in_tokens else 'samples'} of "
            f"each window of {target}; plans and cuts count only those"
        )
        if not self._shards:
            return
        loader: Any = self.loader
        of_windows = None if self._in_tokens else target  # tokens are counted in samples that are loaded
        self.loader = DealtLoader("loader", loader, ranks, of_windows, drop_last=self._drop_last)

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process."""
        return self.ranks is None

    @property
    def is_main(self) -> bool:
        """Whether this process takes decisions that depend on clocks, writes checkpoints and prints for all."""
        return self.ranks is None or self.ranks.rank == 0

    @property
    def at_end(self) -> Window | None:
        """Stands for a window at the end of this process's epoch: other ranks may have windows left.

        A new object each time, since ranks tell windows apart by identity.
        """
        return None if self.ranks is None else Window.of_spans((), None)

    def begin(self, step: TrainingStep, requests: Callable[[int], int], largest_size: int | None) -> None:
        """Prepare to make windows; `requests` takes how many windows ahead the window is that it is asked for."""
        if self.ranks is None:
            return
        said: dict[str, Any] = {
            "requests": lambda: requests(1),
            "drops": self._drops,
        }  # asked before the window is done
        if is_sharded(step.objective.modules):
            self.peers = ShardedRankPeers(self.ranks, step, largest_size, **said)
        else:
            self.peers = RankPeers(self.ranks, step, **said)
            if self.deals:
                assert isinstance(self.split, ListOfSamples)
                norms = BatchNorms(step.objective.modules, "keep", self._notices)
                self._dealer = Dealer(self.ranks, self.split, lambda: norms.need_several, self._drops, self._notices)

    # --- data ---------------------------------------------------------------------------------------------------------

    def part_of_validation(self, val_loader: Iterable[Any]) -> Iterable[Any]:
        """Return an iterable over this process's part of the validation data.

        Raises:
            InvalidInputError: With `shard_data`, the loader cannot be divided, or lengths differ.
        """
        if self.ranks is None or not self._shards:
            return val_loader
        return DealtLoader("val_loader", val_loader, self.ranks)  # type: ignore[arg-type]

    def windows(self, batches: Track, skip: int) -> Iterator[Window]:
        """Return this process's parts of an epoch's windows."""
        if isinstance(self.loader, DealtLoader) and not self._in_tokens:
            dealt = self.loader
            return stream(batches, iter(lambda: dealt.share, None), skip=skip, split=self.split)
        # Ranks see only together whether a window of samples is too short.
        target, drops = self.target_batch, self._drop_last and (self._in_tokens or self.is_alone)
        return stream(batches, target, in_tokens=self._in_tokens, drop_last=drops, skip=skip, split=self.split)

    @property
    def deals(self) -> bool:
        """Whether ranks share one loader of lists of samples, so that each can compute any of them."""
        return self.ranks is not None and self._shards and isinstance(self.split, ListOfSamples)

    def deal(self, part: Window, costs: Costs) -> None:
        """Let a window hold the samples that this process computes, as `Dealer.deal`."""
        if self._dealer is not None:
            self._dealer.deal(part, costs)

    def _drops(self, samples: Sequence[int]) -> bool:
        """Whether drop_last=True leaves a window out, given the samples of each rank's part."""
        if not self._drop_last:
            return False
        return not all(samples) if self._in_tokens else sum(samples) < self._whole_target

    def check_samples_differ(self, first: Window) -> None:
        """Check whether ranks with loaders of their own read the same samples."""
        if self.ranks is not None and not self._shards:
            warn_of_same_samples(self.ranks, first, self._notices)

    def has_anything(self, window: Window | None) -> bool:
        """Whether any process's loader gave samples in this epoch, given its first window."""
        return window is not None and (self.ranks is None or any(self.ranks.exchange("epoch", window.samples)))

    # --- after a window -----------------------------------------------------------------------------------------------

    def note_step(self, windows: int) -> None:
        """Record the number of windows that are done."""
        if self.ranks is not None:
            self.ranks.moment = windows

    def requests_of_all(self, requests: Callable[[int], int]) -> int:
        """Return the requests of all processes after the window just made, as bits; `requests` as for `begin`."""
        if self.peers is None:
            return requests(0)
        said = 0
        for part in self.peers.parts:
            said |= part.requests
        return said

    def gather(self, what: str, own: Any) -> list[Any]:
        """Return the value of each process."""
        return [own] if self.ranks is None else self.ranks.exchange(what, own)

    def compare_weights(self, step: TrainingStep) -> None:
        """Raise InvalidInputError on all processes if their parameters differ, as those of shards do."""
        if self.ranks is not None and not is_sharded(step.objective.modules):
            compare_weights(self.ranks, step)

    def can_save_together(self, error: BaseException, *, is_whole: bool) -> bool:
        """Tell other processes of an error; return whether all are at the same moment and can save it together."""
        if self.ranks is None:
            return True
        if not isinstance(error, RankFailedError):
            self.ranks.moment = self.ranks.moment if is_whole else -1
            self.ranks.fail(error)
        return self.ranks.are_at_same_moment

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def loader_mode(self) -> str:
        """What the loader of each rank gives, as a checkpoint says it."""
        return _SHARED if self._shards else _OWN

    def part_of(self, content: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        """Return this process's part of a checkpoint; None if other processes wrote it.

        Raises:
            CheckpointError: Other processes wrote it in the middle of an epoch, whose rest cannot be divided anew.
        """
        parts = content.get("ranks") or [content]
        rank, size = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.size)
        wrote, here = str(parts[0].get("loader", _OWN)), self.loader_mode
        if len(parts) == size and (size == 1 or wrote == here):
            found: Mapping[str, Any] = parts[rank]
            return found
        if not any(part["position"]["batches"] for part in parts):
            return None
        raise CheckpointError(
            f"the checkpoint {path} was written by {_these(len(parts), wrote)} in the middle of an epoch, and the rest "
            f"of it cannot be given to {_these(size, here)}; go on with as many processes and shard_data= as before "
            "until an epoch ends, or pass resume=False to start from the beginning"
        )


def _these(size: int, loader: str) -> str:
    if size == 1:
        return "one process"
    return f"{size} processes " + (
        "with loaders of their own (shard_data=False)" if loader == _OWN else "(shard_data=True)"
    )
