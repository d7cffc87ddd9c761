"""What a training does beside its windows where it is one of several: whose samples are whose, and checkpoints of all.

A training alone has none of this. Windows themselves are made together in `_distributed/data_parallel.py`.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import Window, stream
from autoaccum._distributed import dcp
from autoaccum._distributed.consistency import look_at_data
from autoaccum._distributed.data_parallel import DataParallel, trained
from autoaccum._distributed.fsdp import ShardedDataParallel
from autoaccum._distributed.load_balance import Shares, cut
from autoaccum._distributed.loader import (
    DealtLoader,
    ShardedLoader,
    can_be_sharded,
    check_lengths,
    in_windows,
    of_whole,
)
from autoaccum._distributed.overlap import room_for_all
from autoaccum._distributed.same_windows import GoneThrough
from autoaccum._engine.dtensor import is_sharded
from autoaccum._oom import first_line
from autoaccum._training.checkpoint_files import SHARDS
from autoaccum._training.one_process import OWN, WHOLE, WINDOWS, OneProcess, part_of
from autoaccum.errors import CheckpointError, InvalidInputError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from autoaccum._data.loader_state import Position, Track
    from autoaccum._distributed.data_parallel import Part
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.step import TrainingStep
    from autoaccum._records import Plan
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_contents import Contents, Kept, Moment
    from autoaccum._training.checkpoint_schedule import Saver


class SeveralRanks(OneProcess):
    """The ranks of one training, as one of them sees them.

    Args:
        ranks: All ranks.
        loader: As for `fit`.
        target_batch: Samples a window, on all ranks together.
        last_window: As for `fit`.
        shard: Whether every rank's loader gives all samples, of which each is to take its part.
        shares: "equal" or "speed".
        overlap: Whether gradients are to be sent while the last backward pass runs.
        hindrance: What is in the way of that on this rank; "" for nothing.
        notices: Where choices are said.

    Attributes:
        ranks: All ranks.
        loader: What this rank loads from.
        target_batch: Samples of a window that are this rank's, where shares are equal.
        peers: Make the windows together; None before `begin`.

    Raises:
        InvalidInputError: There are more ranks than samples in a window, or samples cannot be shared out.
    """

    def __init__(
        self,
        ranks: Ranks,
        loader: Iterable[Any],
        target_batch: int,
        *,
        last_window: str,
        shard: bool,
        shares: str,
        notices: Notices,
        overlap: bool = False,
        hindrance: str = "",
    ) -> None:
        if target_batch < ranks.size:
            raise InvalidInputError(
                f"target_batch={target_batch} is shared out among {ranks.size} ranks, so that some would have nothing "
                "to do; take a larger target_batch, or fewer ranks"
            )
        super().__init__(loader, target_batch, last_window)
        self.ranks: Ranks = ranks
        self.peers: DataParallel | None = None
        self._notices = notices
        self._overlap, self._hindrance = overlap, hindrance
        self._shards = shard
        self._shares = Shares(ranks.size, by_speed=shares == "speed")
        self._bounds = cut(target_batch, self._shares.weights)
        self.target_batch = self._bounds[ranks.rank + 1] - self._bounds[ranks.rank]
        notices.say(
            f"{ranks.size} ranks: of each window of {target_batch} samples {self.target_batch} are this rank's; plans "
            "and cuts are of those"
        )
        self._sharded: ShardedLoader | None = None
        self.loader = self._whole = loader
        if shard:
            _refuse_own_samples(loader, "loader")
            check_lengths(ranks, "loader", loader)
            if can_be_sharded(loader):
                self._sharded = self.loader = ShardedLoader(
                    loader,  # type: ignore[arg-type]
                    ranks,
                    target_batch,
                    drops_last=last_window == "drop",
                )
            else:
                notices.say(
                    f"shard=True: a {type(loader).__name__} cannot be told apart by indices, so every rank goes "
                    "through all of it and leaves out what is not its own; a DataLoader over a dataset with indices "
                    "loads each sample once"
                )
        self._is_looked_at = shard
        self._gone_through = GoneThrough(ranks, notices) if shard and self._sharded is None else None

    is_alone = False

    @property
    def at_end(self) -> Window:
        """A window without samples, another one each time: ranks tell windows apart by their identity."""
        return Window.empty()

    @property
    def decides(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    def part_of_validation(self, val_loader: Iterable[Any]) -> Iterable[Any]:
        """Return what gives this rank's part of validation data.

        Raises:
            InvalidInputError: With `shard`, a loader does not give all samples; on every rank where lengths differ.
        """
        if not self._shards:
            return val_loader
        _refuse_own_samples(val_loader, "val_loader")
        return DealtLoader(val_loader, self.ranks)

    def begin(self, step: TrainingStep, wishes: Callable[[int], int], grows_to: int | None) -> None:
        """Make ready to make windows together.

        Args:
            step: This rank's training step.
            wishes: Returns what this rank wishes to happen after a window, given how many windows ahead that is.
            grows_to: The largest micro-batch that is wanted of a model that is spread over ranks, where sizes grow.
        """
        said: dict[str, Any] = {
            "wishes": lambda: wishes(1),  # asked before the window is done
            "note": self._reached,
            "look": _accept if self._gone_through is None else self._gone_through.check,
            "is_timed": self._shares.by_speed,
        }
        if is_sharded(step.objective.modules):
            self.peers = ShardedDataParallel(self.ranks, step, grows_to, **said)
            return
        room = None
        if self._overlap:
            room = room_for_all(self.ranks, trained(step), step.memory, self._hindrance, self._notices)
        self.peers = DataParallel(self.ranks, step, room=room, say=self._notices.say, **said)

    # --- whose samples are whose --------------------------------------------------------------------------------------

    def windows(self, batches: Track, skip: int) -> Iterator[Window]:
        """Return an epoch's windows, of which this rank's part is `part`.

        Args:
            batches: The epoch's batches, from where it goes on.
            skip: Samples of the first batch that are used already.
        """
        if self._sharded is not None:
            sizes = map(self._sharded.share_of, itertools.count(int(self._sharded.state_dict()["windows"])))
            return stream(batches, sizes, skip=skip)
        if self._shards:
            return stream(batches, self._whole_target, last_window=self._last_window, skip=skip)
        return stream(batches, self.target_batch, skip=skip)

    def part(self, window: Window) -> Window:
        """Return this rank's part of what `windows` gave."""
        if self._gone_through is not None:
            self._gone_through.begin(window)
        if not self._shards or self._sharded is not None or not window.samples:
            return window
        bounds = cut(window.samples, self._shares.weights)
        return window.part(bounds[self.ranks.rank], bounds[self.ranks.rank + 1])

    def look_at(self, first: Window) -> None:
        """Look, once, whether each rank has samples of its own."""
        if not self._is_looked_at:
            self._is_looked_at = True
            look_at_data(self.ranks, first, self._notices)

    def is_to_be_dropped(self, part: Window) -> bool:
        """Whether a window is too short to be made, where such are to be left out."""
        if self._last_window != "drop":
            return False
        said: list[tuple[int, int]] = self.ranks.exchange("samples", (part.samples, self._reached()))
        if self._gone_through is not None:
            self._gone_through.check([note for _, note in said])
        return sum(samples for samples, _ in said) < self._whole_target

    def has_anything(self, window: Window | None) -> bool:
        """Whether the loader of any rank has given something in this epoch, of which this is the first window."""
        return window is None or any(self.ranks.exchange("epoch", window.samples))

    def note_moment(self, windows: int) -> None:
        """Note that so many windows are done."""
        self.ranks.moment = windows

    def wishes_of_all(self, wishes: Callable[[int], int]) -> int:  # noqa: ARG002 - all have said theirs with the window
        """Set the shares by what the window that was just made has shown; return what any rank wishes after it."""
        assert self.peers is not None
        self._share_out(self.peers.parts)
        said = 0
        for part in self.peers.parts:
            said |= part.wishes
        return said

    def of_all(self, what: str, own: Any) -> list[Any]:
        """Return what each rank says."""
        return self.ranks.exchange(what, own)

    def meet_at_end(self) -> None:
        """See that no other rank has failed after its last update, which is known only when it says something."""
        self.ranks.exchange("end")

    def _share_out(self, parts: Sequence[Part]) -> None:
        if not self._shares.note([part.samples for part in parts], [part.seconds for part in parts]):
            return
        if self._sharded is not None:
            self._sharded.share_out(self._shares.weights, max(part.note for part in parts))
        total = sum(self._shares.weights)
        shares = ", ".join(f"{weight / total:.0%}" for weight in self._shares.weights)
        self._notices.say(f"shares of the ranks by their speed: {shares}")

    def _reached(self) -> int:
        """Return up to where in the epoch this rank's loader has come, or what stands for the whole of its window."""
        if self._gone_through is not None:
            return self._gone_through.note
        return 0 if self._sharded is None else self._sharded.reached

    def tell_plans(self, plan: Plan | None) -> None:
        """Say what each rank begins with, where they were asked beforehand."""
        said = self.ranks.exchange("plan", None if plan is None else plan.micro_batch)
        if len(set(said)) > 1:
            found = ", ".join("-" if one is None else str(one) for one in said)
            self._notices.say(f"ranks take at most {found} samples at once")

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def check_that_all_found(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        """Refuse to go on from a checkpoint that not all ranks have found.

        Raises:
            CheckpointError: They have found different ones.
        """
        said = self.ranks.exchange("checkpoint", None if found is None else (found[0].name, found[1].get("windows")))
        for rank, one in enumerate(said):
            if one != said[0]:
                names = [("none" if one is None else one[0]) for one in (said[0], one)]
                raise CheckpointError(
                    f"rank 0 finds the checkpoint {names[0]} and rank {rank} finds {names[1]}; the folder must be one "
                    "that all of them see"
                )

    def part_of(self, content: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        """Return what a checkpoint holds of this rank; None where it was written by other processes.

        Raises:
            CheckpointError: It was, in the middle of an epoch, and cannot be shared out anew.
        """
        return part_of(content, path, self.ranks.rank, self.ranks.size, self._goes_through)

    def position_of(self, position: Position) -> Position:
        """Return where this training stands at a position of other processes.

        Raises:
            CheckpointError: The loader is another one.
        """
        if self._sharded is None:
            return of_whole(position, self._whole, self._whole_target)
        return in_windows(position, self._whole, self._whole_target)  # type: ignore[arg-type]

    @property
    def _goes_through(self) -> str:
        return OWN if not self._shards else WHOLE if self._sharded is None else WINDOWS

    def _take_folder(self, saver: Saver, notices: Notices) -> None:
        """Make the folder for checkpoints this training's: rank 0, which writes them, holds it for all.

        Raises:
            CheckpointInUseError: Another process trains with it; on every rank.
            CheckpointError: It cannot be written to; on every rank.
        """
        # Said at every look, so that ranks wait for each other no longer than they are ready to.
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
        """Return the checkpoint to go on from, the same on every rank; None where there is none.

        Raises:
            CheckpointInUseError: Another process trains with the folder; on every rank.
            CheckpointError: Ranks have found different ones, or none that is whole.
        """
        self._take_folder(saver, notices)
        damage: dict[Path, str] = {}
        while True:
            found = saver.find(notices, damage)
            self.check_that_all_found(found)
            if found is None or found[1].get(SHARDS) is None:
                return found
            name, files = found[1][SHARDS]
            said = self.ranks.exchange("shards", dcp.damage_of_part(self.ranks, found[0].parent / name, files))
            wrong = next((one for one in said if one is not None), None)
            if wrong is None:
                return found
            damage[found[0]] = wrong

    def stand_together(self, error: BaseException, *, is_whole: bool) -> bool:
        """Tell the others of an error, and return whether all were at the same moment, which they can save together."""
        if not isinstance(error, RankFailedError):
            self.ranks.moment = self.ranks.moment if is_whole else -1
            self.ranks.fail(error)
        return self.ranks.stood_together

    def write(self, saver: Saver, contents: Contents, moment: Moment, kept: Kept) -> Path:
        """Write a checkpoint of a moment: rank 0 a file, and every rank its part of what is spread over them."""
        own = {**contents.part(moment, kept), "loader": self._goes_through}
        parts = self.ranks.exchange_tensors("state", own)
        files = self._write_shards(saver, moment, contents.spread()) if contents.is_sharded else None
        path = saver.write(contents.take(moment, kept, parts, files), moment) if self.decides else None
        path = Path(self.ranks.exchange("written", None if path is None else str(path))[0])
        saver.took(path, moment)
        if files is not None and self.decides:
            saver.remove_others()
        return path

    def _write_shards(self, saver: Saver, moment: Moment, tensors: Mapping[str, Tensor]) -> tuple[str, dcp.Files]:
        """Write what is spread over ranks, each its part, into a new folder; return its name and what is in it.

        Raises:
            CheckpointError: Some rank could not.
        """
        named = None
        if self.ranks.rank == 0:
            saver.remove_others()  # what was left by one that failed may be what has filled the disk
            named = saver.folder_for_shards(moment).name
        folder = saver.folder / self.ranks.exchange("shards", named)[0]
        try:
            return folder.name, dcp.write(self.ranks, tensors, folder)
        except RankFailedError:
            raise
        except Exception as error:
            saver.check_folder()
            if not folder.is_dir():  # rank 0 knows more
                raise CheckpointError(
                    f"the checkpoint {folder} could not be written, since it was removed meanwhile, and those before "
                    "it are as they were; leave the folder alone while training goes on, which another process may "
                    "have taken over"
                ) from error
            raise CheckpointError(
                f"the checkpoint {folder} could not be written ({first_line(error)}), and those before it are as they "
                "were; make room on that disk, or pass another folder as checkpoint="
            ) from error

    def read_shards(self, path: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Read what is spread over ranks, each its part, in place.

        Raises:
            CheckpointError: Some rank could not; what it was to be put into is of no use.
        """
        folder = path.parent / content[SHARDS][0]
        try:
            dcp.read(self.ranks, tensors, folder)
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint {folder} could not be read ({first_line(error)}); make everything as it was for that "
                "run, or pass resume=False to start anew"
            ) from error


def _accept(_: Sequence[int]) -> None:
    """Accept whatever ranks say of their loaders, where each has samples of its own."""


def _refuse_own_samples(loader: Any, name: str) -> None:
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if getattr(sampler, "num_replicas", 1) > 1:
            raise InvalidInputError(
                f"shard=True shares out what every rank's {name} gives, and this one's {type(sampler).__name__} does "
                "so already; leave one of them out"
            )
