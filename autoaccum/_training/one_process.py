"""Coordination between the processes of a training, implemented for a single process.

`SeveralRanks` (`rank_coordination.py`) overrides it for several, so the rest of a training need not distinguish them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from autoaccum._data.regrouping import stream, stream_of_tokens
from autoaccum.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from autoaccum._data.batches import Window
    from autoaccum._data.loader_state import Track
    from autoaccum._data.pieces import Split
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.peers import Peers
    from autoaccum._records import Plan
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_contents import Contents, Kept, Moment
    from autoaccum._training.checkpoint_schedule import Saver

# What a process may request after a window, as bits.
SAVE, END, STOP = 1, 2, 4
# What a process's loader gives: all samples, its part of every window of them, or samples of its own.
WHOLE, WINDOWS, OWN = "whole", "windows", "own"


class OneProcess:
    """The only process of a training.

    Args:
        loader: As for `fit`.
        target_batch: Number of samples per window, or of tokens.
        drop_last: As for `fit`.
        split: As for `fit`.
        in_tokens: Whether the target is in tokens.

    Attributes:
        loader: The loader that this process reads.
        split: As the argument.
        target_batch: Number of samples of a window that belong to this process.
        is_alone: Whether this is the only process.
        ranks: All ranks; None for a single process.
        peers: The ranks that make windows together; None for a single process.
    """

    is_alone = True
    ranks: Ranks | None = None
    peers: Peers | None = None

    def __init__(
        self,
        loader: Iterable[Any],
        target_batch: int,
        drop_last: bool,
        split: Split | None = None,
        *,
        in_tokens: bool = False,
    ) -> None:
        self._in_tokens = in_tokens
        self.loader = loader
        self.split = split
        self.target_batch = target_batch
        self._whole_target = target_batch
        self._drop_last = drop_last

    @property
    def at_end(self) -> Window | None:
        """Stands for a window at the end of this process's epoch; other ranks may have windows left."""
        return None

    @property
    def decides(self) -> bool:
        """Whether this process takes decisions that depend on clocks, and prints for all."""
        return True

    def begin(self, step: TrainingStep, wishes: Callable[[int], int], grows_to: int | None) -> None:
        """Prepare to make windows.

        Args:
            step: The training step.
            wishes: Returns what this process requests after a window, given how many windows ahead that window is.
            grows_to: The largest micro-batch to grow to, for a model that is sharded across ranks; None if sizes do not
                grow.
        """

    # --- data sharding ------------------------------------------------------------------------------------------------

    def part_of_validation(self, val_loader: Iterable[Any]) -> Iterable[Any]:
        """Return an iterable over this process's part of the validation data."""
        return val_loader

    def windows(self, batches: Track, skip: int) -> Iterator[Window]:
        """Return an epoch's windows; `part` takes this process's part of each.

        Args:
            batches: The epoch's remaining batches.
            skip: Number of samples of the first batch that were used already.
        """
        regrouped = stream_of_tokens if self._in_tokens else stream
        return regrouped(batches, self.target_batch, drop_last=self._drop_last, skip=skip, split=self.split)

    def part(self, window: Window) -> Window:
        """Return this process's part of a window from `windows`."""
        return window

    def look_at(self, first: Window) -> None:
        """Check, once, whether processes read the same samples."""

    def is_to_be_dropped(self, part: Window) -> bool:  # noqa: ARG002
        """Whether to leave out a window that is too short; False here, since `windows` leaves them out."""
        return False

    def has_anything(self, window: Window | None) -> bool:
        """Whether any process's loader gave samples in this epoch, given its first window."""
        return window is not None

    def tell_plans(self, plan: Plan | None) -> None:
        """Report each process's initial plan, if a probe found one before training."""

    # --- after a window -----------------------------------------------------------------------------------------------

    def note_moment(self, windows: int) -> None:
        """Record the number of windows that are done."""

    def wishes_of_all(self, wishes: Callable[[int], int]) -> int:
        """Return the requests of all processes after the window just made, as bits; `wishes` as for `begin`."""
        return wishes(0)

    def of_all(self, what: str, own: Any) -> list[Any]:  # noqa: ARG002
        """Return the value of each process."""
        return [own]

    def meet_at_end(self) -> None:
        """Check that no other process failed after its last update."""

    def stand_together(self, error: BaseException, *, is_whole: bool) -> bool:  # noqa: ARG002
        """Tell other processes of an error; return whether all are at the same moment and can save it together."""
        return True

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def check_that_all_found(self, found: tuple[Path, dict[str, Any]] | None) -> None:
        """Check that all processes found the same checkpoint."""

    def find(self, saver: Saver, notices: Notices) -> tuple[Path, dict[str, Any]] | None:
        """Take the lease on the checkpoint folder and return the checkpoint to resume from; None if there is none.

        Raises:
            CheckpointInUseError: Another process trains with the folder.
            CheckpointError: No checkpoint can be read, or none exists and one is required.
        """
        for pause_s in saver.taking_folder(notices):
            time.sleep(pause_s)
        return saver.find(notices)

    def write(self, saver: Saver, contents: Contents, moment: Moment, kept: Kept) -> Path:
        """Write a checkpoint of a moment and return its path."""
        return saver.write(contents.take(moment, kept), moment)

    def read_shards(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Read this process's shards of the state in place; a single process has none."""

    def part_of(self, content: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
        """Return this process's part of a checkpoint; None if other processes wrote it.

        Raises:
            CheckpointError: Other processes wrote it in the middle of an epoch, and its rest cannot be divided anew.
        """
        return part_of(content, path, 0, 1, WHOLE)


def part_of(
    content: Mapping[str, Any], path: Path, rank: int, size: int, goes_through: str
) -> Mapping[str, Any] | None:
    """Return the part of a checkpoint that belongs to one of `size` processes; None if other processes wrote it.

    Args:
        content: The checkpoint's content.
        path: The checkpoint's path.
        rank: The rank of this process.
        size: The number of processes.
        goes_through: What this process's loader gives: `WHOLE`, `WINDOWS` or `OWN`.

    Raises:
        CheckpointError: Other processes wrote it in the middle of an epoch, and its rest cannot be divided anew.
    """
    parts = content.get("ranks") or [content]
    wrote = str(parts[0].get("loader", WHOLE if len(parts) == 1 else OWN))
    if len(parts) == size and wrote == goes_through:
        found: Mapping[str, Any] = parts[rank]
        return found
    if wrote == goes_through != OWN or not any(part["position"]["batches"] for part in parts):
        return None
    raise CheckpointError(
        f"the checkpoint {path} was written by {_these(len(parts), wrote)} in the middle of an epoch, and the rest of "
        f"it cannot be given to {_these(size, goes_through)}; go on with as many processes and shard= as before until "
        "an epoch ends, or pass resume=False to start from the beginning"
    )


def _these(size: int, goes_through: str) -> str:
    if size == 1:
        return "one process"
    return f"{size} processes " + ("with loaders of their own (shard=False)" if goes_through == OWN else "(shard=True)")
