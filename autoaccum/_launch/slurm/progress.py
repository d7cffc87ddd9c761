"""Writes the progress of a training to its job's folder, at most once a second."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from autoaccum._callbacks import Callback
from autoaccum._launch.slurm.folder import Progress
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from autoaccum._launch.slurm.folder import JobFolder
    from autoaccum._records import Plan, ProbeResult, StepReport
    from autoaccum._system.notices import Notices

# Not more often, to spare file systems that a whole cluster shares.
_EVERY_S = 1.0


class ProgressFile(Callback):
    """Updates the `progress.json` of a job. If it cannot be written, a notice says so, and training continues.

    Attributes:
        target_batch: The largest possible micro-batch until the first plan.
    """

    target_batch: int | None = None

    def __init__(self, folder: JobFolder, notices: Notices) -> None:
        self._folder = folder
        self._notices = notices
        before = folder.progress
        self._progress = Progress(phase="pre-flight") if before is None else replace(before, phase="pre-flight")
        self._last: tuple[StepReport, int] | None = None
        self._samples = 0
        self._written_at = self._counted_at = -math.inf
        self._write()

    @property
    def step(self) -> int:
        """Updates made."""
        self._take_last()
        return self._progress.step

    def end(self, phase: str, error: str | None = None) -> None:
        """Write the final phase."""
        self._note(phase=phase, error=error)
        self._write()

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """Write the length of the training."""
        by_epochs = None if epochs is None or steps_per_epoch is None else epochs * steps_per_epoch
        lengths = [length for length in (by_epochs, max_steps) if length is not None]
        # `on_resume` follows if training resumes from a checkpoint.
        self._note(phase="training", steps=min(lengths, default=None), epochs=epochs, step=0, epoch=None, error=None)
        self._note(micro_batch=self.target_batch, micro_batches=())
        self._counted_at = time.monotonic()
        self._write()

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:  # noqa: ARG002 - the protocol's
        """Write the cut."""
        self._note(micro_batch=plan.micro_batch)
        self._write()

    def on_step(self, report: StepReport, *, epoch: int) -> None:
        """Write an update."""
        self._last = report, epoch
        self._samples += report.samples
        now = time.monotonic()
        if now - self._written_at >= _EVERY_S:
            self._note(samples_per_s=self._samples / max(now - self._counted_at, 1e-9))
            self._samples, self._counted_at = 0, now
            self._write()

    def on_resume(self, path: Path, *, step: int, epoch: int) -> None:  # noqa: ARG002 - the protocol's
        """Write the step that training resumes from."""
        self._last = None
        self._note(step=step, epoch=epoch)
        self._write()

    def on_checkpoint(self, path: Path, *, step: int) -> None:  # noqa: ARG002 - the protocol's
        """Write the step; a signal may have come between the update and `on_step`."""
        self._take_last()
        self._note(step=step)
        self._write()

    def _take_last(self) -> None:
        """Record the last update. Its loss is read only here, because that waits for the device."""
        if self._last is None:
            return
        (report, epoch), self._last = self._last, None
        loss = float(report.loss)
        self._note(
            step=report.step,
            epoch=epoch,
            loss=loss if math.isfinite(loss) else None,
            micro_batches=report.micro_batches,
            micro_batch=max(report.micro_batches, default=None),
        )

    def _note(self, **changes: object) -> None:
        self._progress = replace(self._progress, **changes)  # type: ignore[arg-type]

    def _write(self) -> None:
        self._written_at = time.monotonic()
        self._take_last()
        try:
            self._folder.write_progress(replace(self._progress, written_at=time.time()))
        except InvalidInputError as error:
            self._notices.say(f"the progress of the job cannot be written: {error}")
