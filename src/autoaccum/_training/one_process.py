"""What a training does together with the other processes of it, where there are none.

`SeveralRanks` (`rank_coordination.py`) overrides all of this; nothing else in a training asks whether there are others.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from autoaccum._data.batches import Window, stream
from autoaccum._distributed.loader import of_whole
from autoaccum.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from autoaccum._data.loader_state import Position, Track
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.peers import Peers
    from autoaccum._engine.step import TrainingStep
    from autoaccum._records import Plan
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_contents import Contents, Kept, Moment
    from autoaccum._training.checkpoint_schedule import Saver

# What a process may wish to happen after a window, as bits.
SAVE, END = 1, 2
# What a process goes through: all samples, its part of every window of them, or samples that are its own.
WHOLE, WINDOWS, OWN = "whole", "windows", "own"


class OneProcess:
    """The only process of a training.

    Args:
        loader: As for `fit`.
        target_batch: Samples a window.
        last_window: As for `fit`.

    Attributes:
        loader: What this process loads from.
        target_batch: Samples of a window that are this process's.
        is_alone: Whether it is the only one.
        ranks: All ranks; None where there is only this process.
        peers: Make the windows together; None where there is only this process.
    """

    is_alone = True
    ranks: Ranks | None = None
    peers: Peers | None = None

    def __init__(self, loader: Iterable[Any], target_batch: int, last_window: str) -> None:
        self.loader = loader
        self.target_batch = target_batch
        self._whole_target = target_batch
        self._last_window = last_window

    @property
    def at_end(self) -> Window | None:
        """What stands for a window at the end of an epoch, of which other ranks may have some left."""
        return None

    @property
    def decides(self) -> bool:
        """Whether this process decides where clocks differ, and prints for all."""
        return True

    def begin(self, step: TrainingStep, wishes: Callable[[int], int], grows_to: int | None) -> None:
        """Make ready to make windows.

        Args:
            step: The training step.
            wishes: Returns what this process wishes to happen after a window, given how many windows ahead that is.
            grows_to: The largest micro-batch that is wanted of a model that is spread over ranks, where sizes grow.
        """

    # --- whose samples are whose --------------------------------------------------------------------------------------

    def part_of_validation(self, val_loader: Iterable[Any]) -> Iterable[Any]:
        """Return what gives this process's part of validation data."""
        return val_loader

    def windows(self, batches: Track, skip: int) -> Iterator[Window]:
        """Return an epoch's windows, of which this process's part is `part`.

        Args:
            batches: The epoch's batches, from where it resumes.
            skip: Samples of the first batch that are used already.
        """
        return stream(batches, self.target_batch, last_window=self._last_window, skip=skip)

    def part(self, window: Window) -> Window:
        """Return this process's part of what `windows` gave."""
        return window

    def look_at(self, first: Window) -> None:
        """Look, once, whether each process has samples of its own."""

    def is_to_be_dropped(self, part: Window) -> bool:  # noqa: ARG002
        """Whether a window is too short to be made, where such are left out; here `windows` leaves them out."""
        return False

    def has_anything(self, window: Window | None) -> bool:
        """Whether the loader of any process has given something in this epoch, of which this is the first window."""
        return window is not None

    def tell_plans(self, plan: Plan | None) -> None:
        """Say what each process begins with, where that was found out beforehand."""

    # --- after a window -----------------------------------------------------------------------------------------------

    def note_moment(self, windows: int) -> None:
        """Note that so many windows are done."""

    def wishes_of_all(self, wishes: Callable[[int], int]) -> int:
        """Return what any process wishes to happen after the window that was just made; `wishes` as for `begin`."""
        return wishes(0)

    def of_all(self, what: str, own: Any) -> list[Any]:  # noqa: ARG002
        """Return what each process says."""
        return [own]

    def meet_at_end(self) -> None:
        """See that no other process has failed after its last update."""

    def stand_together(self, error: BaseException, *, is_whole: bool) -> bool:  # noqa: ARG002
        """Tell the others of an error, and return whether all were at the same moment, which they can save together."""
        return True

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def check_that_all_found(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        """Refuse to resume from a checkpoint that not all processes have found."""

    def find(self, saver: Saver, notices: Notices) -> tuple[Path, dict[str, Any]] | None:
        """Take the folder for checkpoints, and return the one to resume from; None where there is none.

        Raises:
            CheckpointInUseError: Another process trains with the folder.
            CheckpointError: There are some, and none can be read; or there is none, and there must be.
        """
        for pause_s in saver.taking_folder(notices):
            time.sleep(pause_s)
        return saver.find(notices)

    def write(self, saver: Saver, contents: Contents, moment: Moment, kept: Kept) -> Path:
        """Write a checkpoint of a moment, and return its path."""
        return saver.write(contents.take(moment, kept, None), moment)

    def read_shards(self, path: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Read what is spread over processes, each its part, in place."""

    def part_of(self, content: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        """Return what a checkpoint holds of this process; None where it was written by others.

        Raises:
            CheckpointError: It was, in the middle of an epoch, and cannot be shared out again.
        """
        return part_of(content, path, 0, 1, WHOLE)

    def position_of(self, position: Position) -> Position:
        """Return where this training stands at a position of other processes.

        Raises:
            CheckpointError: The loader is another one.
        """
        return of_whole(position, self.loader, self._whole_target)


def part_of(
    content: Mapping[str, Any], path: Path, rank: int, size: int, goes_through: str
) -> Mapping[str, Any] | None:
    """Return what a checkpoint holds of one of `size` processes; None where it was written by others.

    Args:
        content: What is in it.
        path: Where it is.
        rank: The number of this process.
        size: How many there are.
        goes_through: What this process goes through.

    Raises:
        CheckpointError: It was, in the middle of an epoch, and some had or have samples of their own.
    """
    parts = content.get("ranks") or [content]
    wrote = str(parts[0].get("loader", WHOLE if len(parts) == 1 else OWN))
    if len(parts) == size and wrote == goes_through:
        found: Mapping[str, Any] = parts[rank]
        return found
    if not any(part["position"]["batches"] for part in parts):
        return None
    by = f"{len(parts)} process{'es' if len(parts) > 1 else ''}"
    if wrote == OWN:
        raise CheckpointError(
            f"the checkpoint {path} was written by {by} in the middle of an epoch, each with a loader of its own "
            f"(shard=False), and what these had left cannot be given to {_here(size, goes_through)}; go on with {by} "
            "and the same loaders, or pass resume=False to start anew"
        )
    if goes_through == OWN:
        raise CheckpointError(
            f"the checkpoint {path} was written by {by} in the middle of an epoch of a loader that gives all samples, "
            f"and what it had left cannot be given to {_here(size, goes_through)}; pass shard=True with a loader that "
            f"gives all samples to every process, go on with {by} as before, or pass resume=False to start anew"
        )
    return None


def _here(size: int, goes_through: str) -> str:
    if size == 1:
        return "this one process"
    return f"these {size}, " + ("each with a loader of its own" if goes_through == OWN else "which share one out")
