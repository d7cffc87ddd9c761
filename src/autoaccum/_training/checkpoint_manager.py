"""Writes and resumes the checkpoints of one training, across all of its processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._system import signals
from autoaccum._training.checkpoint_files import check_that_it_can_be_kept
from autoaccum._training.packing import without_tensors
from autoaccum.errors import CheckpointError, StateDamagedError

if TYPE_CHECKING:
    from pathlib import Path

    from autoaccum._engine.finiteness import Finiteness
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_contents import Contents, Kept
    from autoaccum._training.checkpoint_schedule import Saver
    from autoaccum._training.one_process import OneProcess
    from autoaccum._training.plan_lifecycle import PlanLifecycle
    from autoaccum._training.progress import TrainingProgress


# Names that ranks tell each other of what is not finite.
_NAMED = 8


class CheckpointManager:
    """Writes checkpoints of where a training stands, and goes back to them.

    Args:
        saver: Writes and finds files.
        contents: What a checkpoint holds.
        progress: Where training stands.
        lifecycle: Cut its windows.
        world: The processes of this training.
        memory: Its limit is lifted for files.
        notices: Reports choices made for the user.
        finiteness: Knows whether what a checkpoint is to hold is finite.

    Attributes:
        saver: Writes and finds files.
        contents: What a checkpoint holds.
    """

    def __init__(
        self,
        saver: Saver,
        contents: Contents,
        progress: TrainingProgress,
        lifecycle: PlanLifecycle,
        world: OneProcess,
        memory: MemoryBackend,
        notices: Notices,
        finiteness: Finiteness,
    ) -> None:
        self.saver = saver
        self.contents = contents
        self._progress = progress
        self._lifecycle = lifecycle
        self._world = world
        self._memory = memory
        self._notices = notices
        self._finiteness = finiteness

    def find(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the checkpoint to begin with, its path and what is in it; None for a fresh start.

        The folder is this training's from then on, until `end`.

        Raises:
            CheckpointInUseError: Another process trains with this folder.
            CheckpointError: None can be read; or there is none, and `resume=True` requires one.
        """
        return self._world.find(self.saver, self._notices)

    def end(self) -> None:
        """Release the lease on the folder."""
        self.saver.release_folder()

    def check(self) -> None:
        """Check that a checkpoint can be written, before the first one is due.

        Raises:
            InvalidInputError: It holds what no file can.
        """
        # No part of what training takes.
        with self._memory.lifted():
            kept = self.contents.take(self._progress.moment, self._lifecycle.kept, None)
            check_that_it_can_be_kept(without_tensors(kept))

    def write(self) -> Path | None:
        """Write a checkpoint of the present moment and return its path; None where it would not be finite.

        Raises:
            CheckpointError: It could not be written, or the folder is another process's by now; those before it are as
                they were.
        """
        # Half of it is worth nothing, so interrupts wait.
        with signals.held(), self._memory.lifted():
            if self._is_refused():
                return None
            return self._world.write(self.saver, self.contents, self._progress.moment, self._lifecycle.kept)

    def _is_refused(self) -> bool:
        """Whether some process holds what is no longer finite: then the last checkpoint is worth more than this one."""
        of_all = self._world.of_all("finite", self._finiteness.damage()[:_NAMED])
        damage: list[str] = next((names for names in of_all if names), [])
        if not damage:
            return False
        self.saver.check_folder()  # as writing one would: a process that was taken over from does not go on
        moment = self._progress.moment
        self._finiteness.tell_refusal(damage, moment.windows, self.saver.newest)
        self.saver.note(moment)  # the next one is due when it would have been after this one
        return True

    def take_up(self, path: Path, content: dict[str, Any]) -> Kept | None:
        """Become what a checkpoint holds; return how windows were cut, where it was this process that cut them.

        Raises:
            CheckpointError: It belongs to another run, or cannot be resumed.
        """
        self.contents.check(content, path)
        part = self._world.part_of(content, path)
        moment = self.contents.moment(content, part)
        if part is None:
            moment = self._progress.taken_over(moment)
            self._notices.say(
                f"the checkpoint {path} was written by another number of processes: samples are redistributed, and "
                "random generators begin from new seeds"
            )
        # First, since a loader may turn out to be another one: then nothing else has been changed.
        with self._progress.undone_on_error():
            self._progress.go_to(moment)
            self.contents.put_back(content)
        if self.contents.is_sharded:
            self._world.read_shards(path, content, self.contents.spread())
            self._progress.put_random_state_back()  # which reading has moved
        self.saver.note(moment)
        self._notices.say(
            f"resuming from the checkpoint {path}: {moment.windows} steps are done", key=f"{path} {moment.windows}"
        )
        for callback in self._lifecycle.callbacks:
            callback.on_resume(path, step=moment.windows, epoch=moment.position.epoch)
        return None if part is None else self.contents.kept(part)

    def go_back(self, damage: StateDamagedError) -> None:
        """Go back to the last checkpoint of this run.

        Args:
            damage: Why.

        Raises:
            StateDamagedError: There is none that is whole.
            CheckpointError: It cannot be resumed.
        """
        self._memory.release()
        with self._memory.lifted():
            found = self.saver.find_again()
        if found is None:
            raise damage
        windows = self._progress.moment.windows
        self._notices.say(f"step {windows + 1}: {damage}", key=f"damage {windows}")
        try:
            self.take_up(*found)
        except CheckpointError as error:
            raise error from damage
