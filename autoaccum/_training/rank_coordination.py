"""Data sharding and checkpoint coordination across ranks.

A single process needs none of this (`one_process.py`). `_distributed/data_parallel.py` makes the windows themselves.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import Window
from autoaccum._data.regrouping import stream, stream_of_tokens, tokens_of
from autoaccum._distributed import dcp
from autoaccum._distributed.consistency import look_at_data
from autoaccum._distributed.data_parallel import DataParallel
from autoaccum._distributed.fsdp import ShardedDataParallel
from autoaccum._distributed.loader import (
    DealtLoader,
    ShardedLoader,
    WholeLoader,
    check_can_be_sharded,
    equal_shares,
    shares_by_cost,
)
from autoaccum._engine.dtensor import is_sharded
from autoaccum._oom import first_line
from autoaccum._training.checkpoint_files import SHARDS, Unfinished, manifest_of, sha256_of
from autoaccum._training.one_process import OWN, WHOLE, WINDOWS, OneProcess, part_of
from autoaccum.errors import CheckpointError, InvalidInputError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from autoaccum._data.loader_state import Track
    from autoaccum._data.pieces import Split
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._records import Plan
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_contents import Contents, Kept, Moment
    from autoaccum._training.checkpoint_schedule import Saver


class SeveralRanks(OneProcess):
    """The ranks of one training, seen from one of them.

    Args:
        ranks: All ranks.
        loader: As for `fit`.
        target_batch: Number of samples per window, or of tokens, over all ranks.
        drop_last: As for `fit`.
        shard: As for `fit`.
        split: As for `fit`.
        in_tokens: Whether the target is in tokens.
        notices: Reports choices made for the user.

    Attributes:
        ranks: All ranks.
        loader: The loader that this rank reads.
        target_batch: Number of samples of a window, or of tokens, that belong to this rank.
        peers: The ranks that make windows together; None before `begin`.

    Raises:
        InvalidInputError: There are more ranks than samples in a window, or the loader cannot be sharded.
    """

    def __init__(
        self,
        ranks: Ranks,
        loader: Iterable[Any],
        target_batch: int,
        *,
        drop_last: bool,
        shard: bool,
        notices: Notices,
        split: Split | None = None,
        in_tokens: bool = False,
    ) -> None:
        counted = "tokens" if in_tokens else "batch"
        if target_batch < ranks.size:
            raise InvalidInputError(
                f"target_{counted}={target_batch} is less than the number of ranks, {ranks.size}, so some ranks would "
                f"have no samples; use a larger target_{counted} or fewer ranks"
            )
        super().__init__(loader, target_batch, drop_last, split, in_tokens=in_tokens)
        self.ranks: Ranks = ranks
        self.peers: DataParallel | None = None
        self._notices = notices
        self._shards = shard
        bounds = equal_shares(target_batch, ranks.size)
        self.target_batch = bounds[ranks.rank + 1] - bounds[ranks.rank]
        notices.say(
            f"{ranks.size} ranks: this rank takes {self.target_batch} "
            f"{'tokens' if in_tokens else 'samples'} of each window of {target_batch}; plans and cuts count only those"
        )
        self._sharded: ShardedLoader | None = None
        if shard:
            check_can_be_sharded("loader", loader)
            if in_tokens:
                self.loader = WholeLoader(loader, ranks)  # type: ignore[arg-type]
                notices.say(
                    "target_tokens= with shard=True: every rank reads all samples and skips those of other ranks, "
                    "since only samples that are loaded show their tokens; with shard=False, each rank's loader yields "
                    "its own"
                )
            else:
                self._sharded = self.loader = ShardedLoader(
                    loader,  # type: ignore[arg-type]
                    ranks,
                    target_batch,
                    drop_last=drop_last,
                )
        self._is_looked_at = shard
        self._samples = 0  # of the current window, if every rank reads all of it

    is_alone = False

    @property
    def at_end(self) -> Window:
        """An empty window, a new object each time, since ranks tell windows apart by identity."""
        return Window.of_spans((), None)

    @property
    def decides(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    def part_of_validation(self, val_loader: Iterable[Any]) -> Iterable[Any]:
        """Return an iterable over this rank's part of the validation data.

        Raises:
            InvalidInputError: With `shard`, the loader cannot be divided, or lengths differ.
        """
        if not self._shards:
            return val_loader
        check_can_be_sharded("val_loader", val_loader)
        return DealtLoader(val_loader, self.ranks)  # type: ignore[arg-type]

    def begin(self, step: TrainingStep, wishes: Callable[[int], int], grows_to: int | None) -> None:
        """Prepare to make windows together.

        Args:
            step: This rank's training step.
            wishes: Returns what this rank requests after a window, given how many windows ahead that window is.
            grows_to: The largest micro-batch to grow to, for a model that is sharded across ranks; None if sizes do not
                grow.
        """
        said: dict[str, Any] = {
            "wishes": lambda: wishes(1),  # asked before the window is done
            "note": lambda: self._samples,
            "look": _refuse_other_windows,
        }
        if is_sharded(step.objective.modules):
            self.peers = ShardedDataParallel(self.ranks, step, grows_to, **said)
            return
        self.peers = DataParallel(self.ranks, step, **said)

    # --- data sharding ------------------------------------------------------------------------------------------------

    def windows(self, batches: Track, skip: int) -> Iterator[Window]:
        """Return an epoch's windows; `part` takes this rank's part of each.

        Args:
            batches: The epoch's remaining batches.
            skip: Number of samples of the first batch that were used already.
        """
        if self._sharded is not None:
            sizes = map(self._sharded.share_of, itertools.count(int(self._sharded.state_dict()["windows"])))
            return stream(batches, sizes, skip=skip, split=self.split)
        if self._in_tokens:
            target = self._whole_target if self._shards else self.target_batch
            return stream_of_tokens(batches, target, drop_last=self._drop_last, skip=skip, split=self.split)
        return stream(batches, self.target_batch, skip=skip, split=self.split)

    def part(self, window: Window) -> Window:
        """Return this rank's part of a window from `windows`."""
        if not self._shards or self._sharded is not None:
            return window
        self._samples = window.samples
        costs = [count for span in window.spans for count in tokens_of(span.piece)[span.start : span.stop]]
        bounds = shares_by_cost(costs, self.ranks.size)
        return window.part(bounds[self.ranks.rank], bounds[self.ranks.rank + 1])

    def look_at(self, first: Window) -> None:
        """Check, once, whether ranks read the same samples."""
        if not self._is_looked_at:
            self._is_looked_at = True
            look_at_data(self.ranks, first, self._notices)

    def is_to_be_dropped(self, part: Window) -> bool:
        """Whether to leave out a window because it is too short and drop_last=True."""
        if not self._drop_last:
            return False
        if self._in_tokens and self._shards:
            return False  # `windows` leaves it out
        said: list[int] = self.ranks.exchange("samples", part.samples)
        return not all(said) if self._in_tokens else sum(said) < self._whole_target

    def has_anything(self, window: Window | None) -> bool:
        """Whether any rank's loader gave samples in this epoch, given its first window."""
        return window is None or any(self.ranks.exchange("epoch", window.samples))

    def note_moment(self, windows: int) -> None:
        """Record the number of windows that are done."""
        self.ranks.moment = windows

    def wishes_of_all(self, wishes: Callable[[int], int]) -> int:  # noqa: ARG002 - ranks exchange theirs with the window
        """Return the requests of all ranks after a window, as bits."""
        assert self.peers is not None
        said = 0
        for part in self.peers.parts:
            said |= part.wishes
        return said

    def of_all(self, what: str, own: Any) -> list[Any]:
        """Return the value of each rank."""
        return self.ranks.exchange(what, own)

    def meet_at_end(self) -> None:
        """Check that no other rank failed after its last update, which only an exchange reveals."""
        self.ranks.exchange("end")

    def tell_plans(self, plan: Plan | None) -> None:
        """Report each rank's initial plan, if a probe found one before training."""
        said = self.ranks.exchange("plan", None if plan is None else plan.micro_batch)
        if len(set(said)) > 1:
            found = ", ".join("-" if one is None else str(one) for one in said)
            self._notices.say(f"ranks take at most {found} samples at once")

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def check_that_all_found(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        """Check that all ranks found the same checkpoint.

        Raises:
            CheckpointError: Ranks found different ones.
        """
        said = self.ranks.exchange("checkpoint", None if found is None else (found[0].name, found[1].get("windows")))
        for rank, one in enumerate(said):
            if one != said[0]:
                names = [("none" if one is None else one[0]) for one in (said[0], one)]
                raise CheckpointError(
                    f"rank 0 finds the checkpoint {names[0]} and rank {rank} finds {names[1]}; use a folder that all "
                    "ranks can see"
                )

    def part_of(self, content: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        """Return this rank's part of a checkpoint; None if other processes wrote it.

        Raises:
            CheckpointError: Other processes wrote it in the middle of an epoch, and its rest cannot be divided anew.
        """
        return part_of(content, path, self.ranks.rank, self.ranks.size, self._goes_through)

    @property
    def _goes_through(self) -> str:
        return OWN if not self._shards else WHOLE if self._sharded is None else WINDOWS

    def _take_folder(self, saver: Saver, notices: Notices) -> None:
        """Take the lease on the checkpoint folder: rank 0, which writes the checkpoints, holds it for all ranks.

        Raises:
            CheckpointInUseError: Another process trains with the folder; raised on every rank.
            CheckpointError: The folder is not writable; raised on every rank.
        """
        # Rank 0 reports after every attempt, so that the wait for the lease does not run into the exchange's timeout.
        if self.ranks.rank > 0:
            while (said := self.ranks.exchange("folder")[0]) is None:
                pass
            if isinstance(said, CheckpointError):
                raise said
            return
        try:
            for pause_s in saver.taking_folder(notices):
                self.ranks.exchange("folder")
                time.sleep(pause_s)
        except CheckpointError as error:
            self.ranks.exchange("folder", error)
            raise
        self.ranks.exchange("folder", "taken")

    def find(self, saver: Saver, notices: Notices) -> tuple[Path, dict[str, Any]] | None:
        """Return the checkpoint to resume from, the same on every rank; None if there is none.

        Raises:
            CheckpointInUseError: Another process trains with the folder; raised on every rank.
            CheckpointError: Ranks found different checkpoints, or none that is intact.
        """
        self._take_folder(saver, notices)
        damage: dict[Path, str] = {}
        while True:
            found = saver.find(notices, damage)
            self.check_that_all_found(found)
            if found is None or not found[1]["is_sharded"]:
                return found
            said = self.ranks.exchange("shards", self._damage(found[0]))
            wrong = next((one for one in said if one is not None), None)
            if wrong is None:
                return found
            damage[found[0]] = wrong

    def stand_together(self, error: BaseException, *, is_whole: bool) -> bool:
        """Tell other ranks of an error; return whether all are at the same moment and can save it together."""
        if not isinstance(error, RankFailedError):
            self.ranks.moment = self.ranks.moment if is_whole else -1
            self.ranks.fail(error)
        return self.ranks.stood_together

    def write(self, saver: Saver, contents: Contents, moment: Moment, kept: Kept) -> Path:
        """Write a checkpoint of a moment: rank 0 writes the file, and every rank its own shards."""
        own = {**contents.part(moment, kept), "loader": self._goes_through}
        parts = self.ranks.exchange_tensors("state", own)
        made = self._write_shards(saver, moment, contents.spread()) if contents.is_sharded else None
        path = saver.write(contents.take(moment, kept, parts), moment, made) if self.decides else None
        path = Path(self.ranks.exchange("written", None if path is None else str(path))[0])
        saver.took(path, moment)
        return path

    def _write_shards(self, saver: Saver, moment: Moment, tensors: Mapping[str, Tensor]) -> Unfinished:
        """Write this rank's shards into a new checkpoint; return that.

        Raises:
            CheckpointError: Some rank could not write.
        """
        made = saver.storage.begin(moment.windows) if self.ranks.rank == 0 else None
        made = Unfinished(Path(self.ranks.exchange("shards", None if made is None else str(made.folder))[0]))
        try:
            folder = made.folder / SHARDS
            names = dcp.write(self.ranks, tensors, folder)
            for said in self.ranks.exchange("shards", {name: sha256_of(folder / name) for name in names}):
                made.sha256 |= {f"{SHARDS}/{name}": checksum for name, checksum in said.items()}
        except RankFailedError:
            if self.decides:
                made.discard()
            raise
        except Exception as error:
            saver.check_folder()
            if self.decides:
                made.discard()
            elif not made.folder.is_dir():  # rank 0 knows the reason
                raise CheckpointError(
                    f"the checkpoint {made.folder} could not be written because it was removed meanwhile; earlier "
                    "checkpoints are unchanged; leave the folder alone during training (another process may have taken "
                    "it over)"
                ) from error
            raise CheckpointError(
                f"the checkpoint {made.folder} could not be written ({first_line(error)}); earlier checkpoints are "
                "unchanged; make room on that disk, or pass another folder as checkpoint="
            ) from error
        return made

    def _damage(self, path: Path) -> str | None:
        """Return what is wrong with this rank's share of the files with shards, by their checksums."""
        listed = sorted(manifest_of(path)["sha256"].items())
        shards = [(name, checksum) for name, checksum in listed if name.startswith(SHARDS)]
        for name, checksum in shards[self.ranks.rank :: self.ranks.size]:
            if sha256_of(path / name) != checksum:
                return f"wrong checksum of {name}"
        return None

    def read_shards(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Read this rank's shards in place.

        Raises:
            CheckpointError: Some rank could not read; the tensors are unusable.
        """
        folder = path / SHARDS
        try:
            dcp.read(self.ranks, tensors, folder)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint {folder} could not be read ({first_line(error)}); use the same model, optimizer and "
                "ranks as that run, or pass resume=False to start from the beginning"
            ) from error


def _refuse_other_windows(samples: Sequence[int]) -> None:
    """Reject a window that ranks which all read all of it see with different numbers of samples; raised on each."""
    for rank, own in enumerate(samples):
        if own != samples[0]:
            raise InvalidInputError(
                f"a window has {own} samples on rank {rank} and {samples[0]} on rank 0; with shard=True and "
                "target_tokens every rank's loader has to give the same samples with the same tokens"
            )
