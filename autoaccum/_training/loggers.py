"""A callback that logs a training to a file of JSON lines.

Reading a loss waits for the device, so a step is written when the next event arrives: by then its numbers have arrived,
and training does not wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import distributed

from autoaccum._arguments import check_path
from autoaccum._callbacks import Callback
from autoaccum._system.output import log
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path
    from typing import BinaryIO

    from autoaccum._records import Evaluation, FitResult, MemoryEvent, Plan, ProbeResult, StepReport, Trial

_PLAN = ("target_batch", "micro_batches", "micro_batch", "accum_steps")
_PROBE = ("micro_batch", "limit_bytes", "fixed_bytes", "bytes_per_sample")
_STEP = (
    *("step", "samples", "loss", "losses", "micro_batches", "oom_events", "elapsed_s", "peak_bytes", "grad_norm"),
    *("skipped", "learning_rates", "noise_scale", "repeats"),
)
_RESULT = ("steps", "samples", "oom_events", "elapsed_s", "stopped", "noise_scale")


class JSONLinesLog(Callback):
    """Appends one JSON object a line for each event, flushed line by line; of several processes, on rank 0 alone.

    Every object has "event" and "time" (seconds since 1970, when it happened). By event, the further keys
    are:

    - "fit_start": epochs, max_steps, steps_per_epoch (null: not known or not set)
    - "trial": size, fits, peak_bytes, elapsed_s
    - "plan": step (from which it holds), target_batch, micro_batches, micro_batch,
      accum_steps, probe (null, or micro_batch, limit_bytes, fixed_bytes, bytes_per_sample)
    - "step": step, epoch, samples, loss, losses, micro_batches, oom_events (how often memory ran out), elapsed_s,
      peak_bytes, grad_norm, skipped, learning_rates (of the optimizer step, one for each group of the optimizer),
      noise_scale (null where it was not measured), repeats (why the window was begun again, each time)
    - "oom": step, phase, size, message
    - "epoch_end": epoch
    - "evaluation": epoch, step, loss, metrics, samples, elapsed_s, losses
    - "checkpoint": step, path
    - "resume": step, epoch, path; steps beyond that one, in the lines before, are void: they are done again
    - "fit_end": completed; where true also steps, samples, oom_events, elapsed_s, stopped (why a callback has ended the
      run early, or null), noise_scale (of the whole run)

    A number that is NaN or infinite is null. A process that is killed can leave a last line that is cut short; the run
    that goes on begins a line of its own. Events that cannot be written (a full disk) are dropped, with one notice in
    the log "autoaccum"; training goes on, and so does the log once there is room again.

    Args:
        path: The file to append to; it is made, with its folder, if missing.

    Raises:
        InvalidInputError: It is not a path.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = check_path("path", path, "file for the log")
        self._file: BinaryIO | None = None
        self._is_cut = False  # whether the file's last line has no end
        self._has_complained = False
        self._held: tuple[float, int, StepReport] | None = None  # the last step: when it was, its epoch, its report

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """Open the file.

        Raises:
            InvalidInputError: It cannot be opened for writing.
        """
        if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: what a buffer cannot write it keeps, and tries again in the middle of another line.
            self._file = self.path.open("ab+", buffering=0)
            self._file.seek(max(0, self._file.tell() - 1))
            self._is_cut = self._file.read(1) not in (b"", b"\n")
        except OSError as error:
            raise InvalidInputError(
                f"the log {str(self.path)!r} cannot be opened for writing ({error.strerror}); "
                "pass a path in a folder that you may write to"
            ) from error
        self._write("fit_start", epochs=epochs, max_steps=max_steps, steps_per_epoch=steps_per_epoch)

    def on_trial(self, trial: Trial) -> None:
        """Write the trial."""
        self._write("trial", **_fields(trial))

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Write the plan."""
        self._write("plan", step=step, **_fields(plan, _PLAN), probe=None if probe is None else _fields(probe, _PROBE))

    def on_step(self, report: StepReport, *, epoch: int) -> None:
        """Write the step before this one."""
        self._write_held()
        self._held = time.time(), epoch, report

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:
        """Write where memory ran out."""
        self._write("oom", step=step, **_fields(event))

    def on_epoch_end(self, epoch: int) -> None:
        """Write the end of the epoch."""
        self._write("epoch_end", epoch=epoch)

    def on_evaluation(self, evaluation: Evaluation, *, epoch: int, step: int) -> None:
        """Write the evaluation."""
        self._write("evaluation", epoch=epoch, step=step, **_fields(evaluation))

    def on_checkpoint(self, path: Path, *, step: int) -> None:
        """Write the checkpoint's path."""
        self._write("checkpoint", step=step, path=str(path))

    def on_resume(self, path: Path, *, step: int, epoch: int) -> None:
        """Write from which step on the lines before are void."""
        self._write("resume", step=step, epoch=epoch, path=str(path))

    def on_fit_end(self, result: FitResult | None) -> None:
        """Write the end and close the file."""
        if self._file is None:
            return
        try:
            self._write("fit_end", completed=result is not None, **({} if result is None else _fields(result, _RESULT)))
        finally:
            with contextlib.suppress(OSError):  # where the last write came to nothing
                self._file.close()
            self._file = None

    def _write(self, event: str, **values: Any) -> None:
        self._write_held()
        self._write_line(event, time.time(), values)

    def _write_held(self) -> None:
        held, self._held = self._held, None
        if held is not None and self._file is not None:
            at_s, epoch, report = held
            # If the device was lost, the step's numbers are, too. Another error would hide the one that says so.
            with contextlib.suppress(RuntimeError):
                self._write_line("step", at_s, {"epoch": epoch, **_fields(report, _STEP)})

    def _write_line(self, event: str, at_s: float, values: dict[str, Any]) -> None:
        if self._file is None:  # of another rank
            return
        line = json.dumps(_plain({"event": event, "time": at_s, **values}), allow_nan=False).encode() + b"\n"
        line = b"\n" + line if self._is_cut else line
        try:
            written = self._file.write(line)
            reason = "" if written == len(line) else "there was room for a part of a line only"
            self._is_cut = bool(reason) and not line[:written].endswith(b"\n")
        except OSError as error:
            reason = error.strerror or str(error)
        if reason and not self._has_complained:
            self._has_complained = True
            log(
                f"the log {str(self.path)!r} cannot be written ({reason}); training goes on, and events are missing "
                "there",
                logging.WARNING,
            )


def _fields(record: Any, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return attributes of a record by name; without names, all of its fields."""
    return {name: getattr(record, name) for name in names or [field.name for field in fields(record)]}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, which lacks NaN and infinity."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
