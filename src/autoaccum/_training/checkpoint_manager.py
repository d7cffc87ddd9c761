"""Writes and resumes the checkpoints of one training, across all of its processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from autoaccum._system import signals
from autoaccum._training.checkpoint_files import check_that_it_can_be_kept
from autoaccum._training.packing import without_tensors
from autoaccum._training.rank_coordination import WHOLE, part_of
from autoaccum.errors import CheckpointError, StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from autoaccum._distributed.dcp import Files
    from autoaccum._engine.finiteness import Finiteness
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_contents import Contents, Cutting
    from autoaccum._training.checkpoint_schedule import Saver
    from autoaccum._training.plan_lifecycle import Runners
    from autoaccum._training.progress import Course
    from autoaccum._training.rank_coordination import Company


# Names that ranks tell each other of what is not finite.
_NAMED = 8


class Keeping:
    """Writes checkpoints of where a training stands, and goes back to them.

    Args:
        saver: Writes and finds files.
        course: Where training stands.
        runners: Cut its windows.
        company: The other processes of this training; None where this is the only one.
        memory: Its limit is lifted for files.
        notices: Reports choices made for the user.
        finiteness: Knows whether what a checkpoint is to hold is finite.

    Attributes:
        saver: Writes and finds files.
        contents: Takes and restores the content of checkpoints; set before the first is written or resumed.
    """

    contents: Contents

    def __init__(
        self,
        saver: Saver,
        course: Course,
        runners: Runners,
        company: Company | None,
        memory: MemoryBackend,
        notices: Notices,
        finiteness: Finiteness,
    ) -> None:
        self.saver = saver
        self._course = course
        self._runners = runners
        self._company = company
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
        if self._company is None:
            for pause_s in self.saver.taking_folder(self._notices):
                time.sleep(pause_s)
            return self.saver.find(self._notices)
        self._company.take_folder(self.saver, self._notices)
        return self._company.find(self.saver, self._notices)

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
            kept = self.contents.take(self._course.moment, self._runners.cutting(), None)
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
            if self._company is None:
                return self._written()
            return self._written_with_others(self._company)

    def _is_refused(self) -> bool:
        """Whether some process holds values that are not finite: then the last checkpoint stays the newest."""
        damage = self._finiteness.damage()
        if self._company is not None:
            of_all = self._company.ranks.exchange("finite", damage[:_NAMED])
            damage = next((names for names in of_all if names), [])
        if not damage:
            return False
        self.saver.check_folder()  # as writing one would: a process that was taken over from does not go on
        moment = self._course.moment
        self._finiteness.tell_refusal(damage, moment.windows, self.saver.newest)
        self.saver.note(moment)  # the next one is due when it would have been after this one
        return True

    def _written(self, parts: list[dict[str, Any]] | None = None, files: tuple[str, Files] | None = None) -> Path:
        moment = self._course.moment
        return self.saver.write(self.contents.take(moment, self._runners.cutting(), parts, files), moment)

    def _written_with_others(self, company: Company) -> Path:
        moment = self._course.moment
        parts = company.parts_of_all(self.contents.part(moment, self._runners.cutting()))
        files = None
        if self.contents.is_sharded:
            files = company.write_shards(self.saver, moment, self.contents.spread())
        path = company.written_by_one(lambda: self._written(parts, files))
        self.saver.took(path, moment)
        if files is not None and company.ranks.rank == 0:
            self.saver.remove_others()
        return path

    def take_up(self, path: Path, content: dict[str, Any]) -> Cutting | None:
        """Restore a checkpoint; return how windows were cut, or None where other processes cut them.

        Raises:
            CheckpointError: It belongs to another run, or cannot be resumed.
        """
        self.contents.check(content, path)
        part = self._part_of(content, path)
        moment = self.contents.moment(content, part)
        if part is None:
            moment = self._course.taken_over(moment)
            self._notices.say(
                f"the checkpoint {path} was written by another number of processes: samples are redistributed, and "
                "random generators begin from new seeds"
            )
        # First, since a loader may turn out to be another one: then nothing else has been changed.
        with self._course.undone_on_error():
            self._course.go_to(moment)
            self.contents.put_back(content)
        if self.contents.is_sharded:
            assert self._company is not None
            self._company.read_shards(path, content, self.contents.spread())
            self._course.put_random_state_back()  # which reading has moved
        self.saver.note(moment)
        self._notices.say(
            f"resuming from the checkpoint {path}: {moment.windows} steps are done", key=f"{path} {moment.windows}"
        )
        for callback in self._runners.callbacks:
            callback.on_resume(path, step=moment.windows, epoch=moment.position.epoch)
        return None if part is None else self.contents.cutting(part)

    def _part_of(self, content: dict[str, Any], path: Path) -> Mapping[str, Any] | None:
        if self._company is not None:
            return self._company.part_of(content, path)
        return part_of(content, path, 0, 1, WHOLE)

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
        windows = self._course.moment.windows
        self._notices.say(f"step {windows + 1}: {damage}", key=f"damage {windows}")
        try:
            self.take_up(*found)
        except CheckpointError as error:
            raise error from damage
