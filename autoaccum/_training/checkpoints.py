"""Decides when a checkpoint of a run is due, writes it, and resumes from one, while no other process uses the folder.

`checkpoint_files` reads and writes the files; `checkpoint_contents` knows what is in them.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import counted
from autoaccum._distributed.whole_state import gathered
from autoaccum._oom import first_line, is_device_lost, is_oom
from autoaccum._sizing.cutting import Cutting
from autoaccum._system import signals
from autoaccum._system.folder_lock import FolderLock
from autoaccum._training.checkpoint_contents import Contents
from autoaccum._training.checkpoint_files import Storage, check_that_it_can_be_kept
from autoaccum.errors import CheckpointError, InvalidInputError

if TYPE_CHECKING:
    from autoaccum._data.loader_state import Position
    from autoaccum._engine.finiteness import Finiteness
    from autoaccum._training.checkpoint_contents import LoopState
    from autoaccum._training.checkpoint_settings import Saving
    from autoaccum._training.fit_context import FitContext
    from autoaccum._training.plan_lifecycle import PlanLifecycle
    from autoaccum._training.progress import TrainingProgress

# The most names of non-finite tensors that ranks exchange.
_NAMED = 8


class Checkpoints:
    """The checkpoints of one training, across all of its processes.

    Args:
        call: The call of `fit`.
        saving: The folder, and when a checkpoint is due.
        progress: Tracks the state of the loop.
        lifecycle: Knows how windows are cut.
        finiteness: Knows whether the state may be kept.

    Attributes:
        saving: As above.
        storage: The files.
        lock: The right to write them.
        spent_s: Seconds spent on writing.
        differences: In what the resume is not exact, on any process.
    """

    def __init__(
        self,
        call: FitContext,
        saving: Saving,
        progress: TrainingProgress,
        lifecycle: PlanLifecycle,
        finiteness: Finiteness,
    ) -> None:
        self.storage = Storage(saving.folder, replaces=saving.resume is False)
        if saving.note.is_dir():
            raise InvalidInputError(f"{saving.note} is a folder, and fit writes a file of that name; remove it")
        self.spent_s = 0.0
        self.differences: tuple[str, ...] = ()
        self.saving = saving
        self._world, self._memory, self._notices = call.world, call.step.memory, call.notices
        self._contents, self._progress, self._lifecycle = Contents(call), progress, lifecycle
        self._finiteness = finiteness
        self.lock = FolderLock(saving.folder)
        self._saved: tuple[Position, dict[str, Any] | None] | None = None
        self._saved_at = time.monotonic()

    # --- the folder ---------------------------------------------------------------------------------------------------

    def _take_folder(self) -> None:
        """Take the lock on the folder, on rank 0 for all, waiting while another process trains there.

        Raises:
            CheckpointInUseError: Another process trains there and does not end; raised on every rank.
            CheckpointError: The folder cannot be written to.
        """
        tell = self._world.gather
        if not self._world.is_main:
            while (said := tell("folder", None)[0]) is None:
                pass
            if isinstance(said, CheckpointError):
                raise said
            return
        try:
            for pause_s in self.lock.taking(self._notices.say):
                tell("folder", None)  # so that the wait for the lock does not run into the exchange's timeout
                time.sleep(pause_s)
        except CheckpointError as error:
            tell("folder", error)
            raise
        self.storage.guard = self.lock.check
        self.storage.tidy()
        tell("folder", "taken")

    def find(self) -> tuple[Path, dict[str, Any]] | None:
        """Take the folder and return the checkpoint to resume from; None for a fresh start, which is reported.

        Raises:
            CheckpointInUseError: Another process trains with the folder; raised on every rank.
            CheckpointError: No checkpoint can be read, none exists and one is required, or ranks found different ones.
        """
        self._take_folder()
        found = self._found()
        said = self._world.gather("checkpoint", None if found is None else (found[0].name, found[1].get("windows")))
        for rank, one in enumerate(said):
            if one != said[0]:
                names = [("none" if one is None else one[0]) for one in (said[0], one)]
                raise CheckpointError(
                    f"rank 0 finds the checkpoint {names[0]} and rank {rank} finds {names[1]}; use a folder that all "
                    "ranks can see"
                )
        return found

    def _found(self) -> tuple[Path, dict[str, Any]] | None:
        folder = self.storage.folder
        if self.saving.resume is False:
            self.saving.note.unlink(missing_ok=True)
            if earlier := len(self.storage.found()):
                self._notices.say(
                    f"training starts from scratch (resume=False); the {earlier} checkpoints in {folder} move to a "
                    "folder earlier-N in it as soon as the first new one is written"
                )
            return None
        found = self.storage.read_newest(self._notices)
        if found is None and self.saving.resume is True:
            raise CheckpointError(
                f"resume=True, and there is no checkpoint in {folder}; pass the folder of the run to go on with, or "
                "resume='auto', which starts from scratch where there is none"
            )
        if found is None:
            self._notices.choose(f"a start from scratch, as {folder} has no checkpoint yet", "resume=True requires one")
        return found

    # --- when ---------------------------------------------------------------------------------------------------------

    def is_due(self, windows: int) -> bool:
        """Whether to write one after so many windows, at this time."""
        every = self.saving.every
        by_steps = isinstance(every, int) and windows % every == 0
        by_time = isinstance(every, float) and time.monotonic() - self._saved_at >= every
        return by_steps or by_time

    @property
    def has_best_state(self) -> bool:
        """Whether the validation loss of the present state is lower than that of every checkpoint."""
        loss, best = self._progress.state.val_loss, self.storage.best_loss
        return loss is not None and (best is None or loss < best)

    @property
    def has_this_state(self) -> bool:
        """Whether the newest checkpoint was taken in the present state."""
        state = self._progress.state
        return self._saved is not None and self._saved[0] is state.position and self._saved[1] == state.stopped

    def _note(self, state: LoopState) -> None:
        self._saved, self._saved_at = (state.position, state.stopped), time.monotonic()

    # --- writing ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that a checkpoint can be written and read, before the first one is due.

        Raises:
            CheckpointError: The state holds something that cannot be stored in a file.
        """
        # The copy is not part of the memory that training takes. An interrupt would become an error of torch's writer.
        with signals.deferred(), self._memory.lifted():
            check_that_it_can_be_kept(self._contents.taken(self._progress.state, self._lifecycle.kept))

    def save(self) -> Path | None:
        """Write a checkpoint of the present state and return its path; None if the state is not finite.

        Raises:
            CheckpointError: It could not be written, or another process has taken over the folder; earlier checkpoints
                are unchanged.
        """
        # Half a checkpoint is useless, so interrupts wait.
        started = time.perf_counter()
        try:
            with signals.deferred(), self._memory.lifted():
                if self._is_refused():
                    return None
                return self._write()
        finally:
            self.spent_s += time.perf_counter() - started

    def _is_refused(self) -> bool:
        """Whether any process holds non-finite state, in which case the last checkpoint is worth more than this one."""
        of_all = self._world.gather("finite", self._finiteness.damage()[:_NAMED])
        damage: list[str] = next((names for names in of_all if names), [])
        if not damage:
            return False
        self.storage.guard()  # as writing would: a process that has lost the lock must not continue
        state = self._progress.state
        self._finiteness.tell_refusal(damage, state.windows, self.storage.newest)
        self._note(state)  # so that the next checkpoint is due after a full interval
        return True

    def _write(self) -> Path:
        """Write the state of all processes, on rank 0, and return the path."""
        state, kept, contents, world = self._progress.state, self._lifecycle.kept, self._contents, self._world
        parts = path = None
        if world.ranks is not None:
            parts = world.ranks.exchange("state", {**contents.part(state, kept), "loader": world.loader_mode})
        if world.is_main or contents.is_sharded:
            content = contents.taken(state, kept, parts)
            if world.ranks is not None and contents.is_sharded:
                content = gathered(world.ranks, content)  # whole tensors in place of parts
            if world.is_main:
                path = self.storage.write(content, state.windows, val_loss=state.val_loss)
                self.saving.note.unlink(missing_ok=True)  # the checkpoint has its sizes
        path = Path(world.gather("written", None if path is None else str(path))[0])
        self.storage.note_written(path, state.val_loss)
        self._note(state)
        return path

    # --- resuming -----------------------------------------------------------------------------------------------------

    def resume(self, path: Path, content: dict[str, Any]) -> Cutting:
        """Restore a checkpoint, and say which settings it overrides and what is not exact; return how windows are cut.

        Raises:
            CheckpointError: It belongs to another run, or cannot be resumed.
        """
        try:
            self._contents.check(content, path)
            part = self._world.part_of(content, path)
            if part is not None:
                self._contents.check_part(part)
            state = self._contents.loop_state(content, part)
            kept = None if part is None else part["cutting"]
            overridden = self._contents.overridden(content)
        except CheckpointError:
            raise
        except Exception as error:
            if is_device_lost(error) or is_oom(error):
                raise
            raise CheckpointError(
                f"{path} is not a checkpoint of autoaccum's fit, or its content was edited ({type(error).__name__}: "
                f"{first_line(error)}); pass a folder of its own as checkpoint=, or resume=False to start from scratch"
            ) from error
        if part is None:
            state = self._progress.taken_over(state)
            self._notices.say(
                f"the checkpoint {path} was written by a different number of processes: samples are redistributed, and "
                "random generators begin from new seeds"
            )
        # The loader first: if it is not the one of the checkpoint, nothing else has been changed.
        self._progress.go_to(state)
        self._contents.restore(content)
        self._note(state)
        self._notices.choose(f"resuming after step {state.windows} from {path}", "resume=False starts from scratch")
        if overridden:
            self._notices.say(f"the checkpoint's settings override this call's: {', '.join(overridden)}")
        cutting, differences = self._lifecycle.resume(kept), self._progress.differences
        before, now = (cutting if kept is None else Cutting.of_state(kept)).plan.micro_batch, cutting.plan.micro_batch
        if before != now and not self._progress.is_over:
            split = f"micro-batches are of {counted(now, 'sample')}, of {before} at the checkpoint"
            differences = [*differences, f"{split}, so sums are rounded otherwise"]
        told = dict.fromkeys(text for texts in self._world.gather("resumed", differences) for text in texts)
        self.differences = tuple(told)
        for text in self.differences:
            self._notices.say(f"the resume is not exact: {text}", level=logging.WARNING)
        self._lifecycle.observers.on_resume(path, step=state.windows, epoch=state.position.epoch)
        return cutting
