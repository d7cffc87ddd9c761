"""Writes and resumes the checkpoints of one training, across all of its processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from autoaccum._system import signals
from autoaccum._training.checkpoint_files import check_that_it_can_be_kept
from autoaccum.errors import CheckpointError, StateDamagedError

if TYPE_CHECKING:
    from pathlib import Path

    from autoaccum._engine.finiteness import Finiteness
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_contents import Contents, Kept
    from autoaccum._training.checkpoint_schedule import Saver
    from autoaccum._training.plan_lifecycle import PlanLifecycle
    from autoaccum._training.progress import TrainingProgress
    from autoaccum._training.rank_coordination import Coordinator


# The most names of non-finite tensors that ranks exchange.
_NAMED = 8


class CheckpointManager:
    """Writes checkpoints of a training's state and restores them.

    Args:
        saver: Writes and finds files.
        contents: Collects and restores what a checkpoint holds.
        progress: Tracks the moment.
        lifecycle: Holds the plans and the callbacks.
        world: The processes of this training.
        memory: The memory backend; its limit is lifted while files are read and written.
        notices: Reports choices made for the user.
        finiteness: Checks whether the state is finite.

    Attributes:
        saver: Writes and finds files.
        contents: Collects and restores what a checkpoint holds.
        spent_s: Seconds spent on writing.
    """

    def __init__(
        self,
        saver: Saver,
        contents: Contents,
        progress: TrainingProgress,
        lifecycle: PlanLifecycle,
        world: Coordinator,
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
        self.spent_s = 0.0

    def check(self) -> None:
        """Check that a checkpoint can be written and read, before the first one is due.

        Raises:
            CheckpointError: The state holds something that cannot be stored in a file.
        """
        # The copy is not part of the memory that training takes.
        with self._memory.lifted():
            check_that_it_can_be_kept(self.contents.take(self._progress.moment, self._lifecycle.kept))

    def write(self) -> Path | None:
        """Write a checkpoint of the present moment and return its path; None if the state is not finite.

        Raises:
            CheckpointError: It could not be written, or another process has taken over the folder; earlier checkpoints
                are unchanged.
        """
        # Half a checkpoint is useless, so interrupts wait.
        started = time.perf_counter()
        try:
            with signals.held(), self._memory.lifted():
                if self._is_refused():
                    return None
                return self._world.write(self.saver, self.contents, self._progress.moment, self._lifecycle.kept)
        finally:
            self.spent_s += time.perf_counter() - started

    def _is_refused(self) -> bool:
        """Whether any process holds non-finite state, in which case the last checkpoint is worth more than this one."""
        of_all = self._world.of_all("finite", self._finiteness.damage()[:_NAMED])
        damage: list[str] = next((names for names in of_all if names), [])
        if not damage:
            return False
        self.saver.check_folder()  # as writing would: a process that has lost the lease must not continue
        moment = self._progress.moment
        self._finiteness.tell_refusal(damage, moment.windows, self.saver.newest)
        self.saver.note(moment)  # so that the next checkpoint is due after a full interval
        return True

    def take_up(self, path: Path, content: dict[str, Any]) -> Kept | None:
        """Restore a checkpoint; return its cut and plans, or None if other processes wrote it.

        Raises:
            CheckpointError: It belongs to another run, or cannot be resumed.
        """
        self.contents.check(content, path)
        part = self._world.part_of(content, path)
        moment = self.contents.moment(content, part)
        if part is None:
            moment = self._progress.taken_over(moment)
            self._notices.say(
                f"the checkpoint {path} was written by a different number of processes: samples are redistributed, and "
                "random generators begin from new seeds"
            )
        # The loader first: if it is not the one of the checkpoint, nothing else has been changed.
        self._progress.go_to(moment)
        self.contents.put_back(content)
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
            damage: The reason to go back.

        Raises:
            StateDamagedError: No checkpoint is intact.
            CheckpointError: The checkpoint cannot be resumed.
        """
        self._memory.release()
        with self._memory.lifted():
            found = self.saver.storage.read_back()
        if found is None:
            raise damage
        windows = self._progress.moment.windows
        self._notices.say(f"step {windows + 1}: {damage}", key=f"damage {windows}")
        try:
            self.take_up(*found)
        except CheckpointError as error:
            raise error from damage
