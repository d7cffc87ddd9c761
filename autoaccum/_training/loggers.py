"""Callbacks that log a training: to a file of JSON lines, and to TensorBoard.

Reading a loss waits for the device, so both write a step when the next event arrives: by then its numbers have arrived,
and training does not wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from contextlib import contextmanager
from os import SEEK_END
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_path
from autoaccum._callbacks import Callback
from autoaccum._json import evaluation_record, finite, oom_record, plan_record, probe_record, step_record, trial_record
from autoaccum._oom import first_line
from autoaccum._system.output import log
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from os import PathLike
    from pathlib import Path
    from typing import BinaryIO

    from autoaccum._records import Evaluation, FitResult, MemoryEvent, Plan, ProbeResult, StepReport, Trial


class _OneStepLate(Callback):
    """Holds each step back until the next event, then hands it to `_write_step`."""

    def __init__(self) -> None:
        self._held: tuple[StepReport, int, float] | None = None

    def _write_step(self, report: StepReport, *, epoch: int, at_s: float) -> None:
        raise NotImplementedError

    def on_step(self, report: StepReport, *, epoch: int) -> None:
        """Hold this step back and write the one before."""
        self._write_held()
        self._held = (report, epoch, time.time())

    def _write_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            report, epoch, at_s = held
            self._write_step(report, epoch=epoch, at_s=at_s)


class JSONLinesLog(_OneStepLate):
    """Appends one JSON object a line for each event, flushed line by line.

    Every object has "event" and "time" (seconds since 1970, when it happened). By event, the further keys
    are:

    - "fit_start": epochs, max_steps, steps_per_epoch (null: not known or not set)
    - "trial": size, fits, peak_bytes, elapsed_s
    - "plan": step (from which it holds), target_batch, micro_batches, micro_batch,
      accum_steps, probe (null, or micro_batch, limit_bytes, fixed_bytes, bytes_per_sample)
    - "step": step, epoch, samples, loss, losses, micro_batches, oom_events (how often memory ran out), elapsed_s,
      peak_bytes, grad_norm, skipped, learning_rates (of the update, one for each group of the optimizer), noise_scale
      (null where it was not measured)
    - "oom": step, phase, size, message
    - "epoch_end": epoch
    - "evaluation": epoch, step, loss, metrics, samples, elapsed_s
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
        super().__init__()
        self.path = check_path("path", path, "file for the log")
        self._file: BinaryIO | None = None
        self._is_cut = False
        self._has_complained = False

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """Open the file.

        Raises:
            InvalidInputError: It cannot be opened for writing.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # It stays open over many calls; on_fit_end, which always comes, closes it.
            # Unbuffered: what a buffer cannot write it keeps, and tries again in the middle of another line.
            self._file = self.path.open("ab", buffering=0)
            self._is_cut = _is_cut_short(self.path)
        except OSError as error:
            raise InvalidInputError(
                f"the log {str(self.path)!r} cannot be opened for writing ({error.strerror}); "
                "pass a path in a folder that you may write to"
            ) from error
        self._write("fit_start", {"epochs": epochs, "max_steps": max_steps, "steps_per_epoch": steps_per_epoch})

    def on_trial(self, trial: Trial) -> None:
        """Write the trial."""
        self._write("trial", trial_record(trial))

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Write the plan."""
        found = None if probe is None else probe_record(probe)
        self._write("plan", {"step": step, **plan_record(plan), "probe": found})

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:
        """Write where memory ran out."""
        self._write("oom", {"step": step, **oom_record(event)})

    def on_epoch_end(self, epoch: int) -> None:
        """Write the end of the epoch."""
        self._write("epoch_end", {"epoch": epoch})

    def on_evaluation(self, evaluation: Evaluation, *, epoch: int, step: int) -> None:
        """Write the evaluation."""
        self._write("evaluation", {"epoch": epoch, "step": step, **evaluation_record(evaluation)})

    def on_checkpoint(self, path: Path, *, step: int) -> None:
        """Write the checkpoint's path."""
        self._write("checkpoint", {"step": step, "path": str(path)})

    def on_resume(self, path: Path, *, step: int, epoch: int) -> None:
        """Write from which step on the lines before are void."""
        self._write("resume", {"step": step, "epoch": epoch, "path": str(path)})

    def on_fit_end(self, result: FitResult | None) -> None:
        """Write the end and close the file."""
        if self._file is None:
            return
        try:
            self._write("fit_end", _end_record(result))
        finally:
            with contextlib.suppress(OSError):  # where the last write came to nothing
                self._file.close()
            self._file = None

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        self._write_held()
        self._write_line(event, fields, at_s=time.time())

    def _write_step(self, report: StepReport, *, epoch: int, at_s: float) -> None:
        try:
            fields = step_record(report)
        except RuntimeError:
            # The device was lost, and this step's numbers with it. The error that ends the call tells so; a
            # second one from here would hide it.
            return
        self._write_line("step", {"epoch": epoch, **fields}, at_s=at_s)

    def _write_line(self, event: str, fields: dict[str, Any], *, at_s: float) -> None:
        assert self._file is not None, "on_fit_start comes first"
        line = json.dumps({"event": event, "time": at_s, **fields}, allow_nan=False).encode() + b"\n"
        before = b"\n" if self._is_cut else b""
        try:
            written = self._file.write(before + line)
        except OSError as error:
            self._complain(error.strerror or str(error))
            return
        if written < len(before + line):
            self._is_cut = written > len(before) or (self._is_cut and not written)
            self._complain("there was room for a part of a line only")
        else:
            self._is_cut = False

    def _complain(self, reason: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            log(
                f"the log {str(self.path)!r} cannot be written ({reason}); training goes on, and events are "
                "missing there",
                logging.WARNING,
            )


def _is_cut_short(path: Path) -> bool:
    """Whether the file's last line has no end."""
    with path.open("rb") as file:
        length = file.seek(0, SEEK_END)
        file.seek(max(0, length - 1))
        return file.read(1) not in (b"", b"\n")


class TensorBoardLog(_OneStepLate):
    """Writes scalars for TensorBoard. Where training goes on from a checkpoint, what was beyond it is hidden.

    By step: "train/loss" (and "train/loss/NAME" where there are several), "train/learning_rate" (or
    "train/learning_rate/0" and so on, where the optimizer has several groups), "train/grad_norm" and
    "train/noise_scale" where they are known, "train/samples_per_s", "memory/peak_bytes", "memory/oom_events",
    "plan/micro_batch"; at each evaluation "evaluation/loss" and "evaluation/NAME" for each metric.

    Args:
        log_dir: The folder for the event files.

    Raises:
        InvalidInputError: It is not a path, or TensorBoard is not installed.
    """

    def __init__(self, log_dir: str | PathLike[str]) -> None:
        super().__init__()
        self.log_dir = check_path("log_dir", log_dir, "folder for the event files")
        self._make_writer = _summary_writer()
        self._writer: Any = None
        self._has_complained = False
        self._oom_events = 0

    def on_fit_start(
        self,
        *,
        epochs: int | None,  # noqa: ARG002 - the protocol's
        max_steps: int | None,  # noqa: ARG002
        steps_per_epoch: int | None,  # noqa: ARG002
    ) -> None:
        """Open the event file.

        Raises:
            InvalidInputError: It cannot be opened for writing.
        """
        self._oom_events = 0
        self._writer = self._made()

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:  # noqa: ARG002 - the protocol's
        """Write the largest micro-batch."""
        self._add("plan/micro_batch", plan.micro_batch, step)

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:  # noqa: ARG002 - the protocol's
        """Write how often memory ran out so far."""
        self._oom_events += 1
        self._add("memory/oom_events", self._oom_events, step)

    def on_evaluation(self, evaluation: Evaluation, *, epoch: int, step: int) -> None:  # noqa: ARG002 - the protocol's
        """Write the loss, what it is made of, and the metrics."""
        self._add("evaluation/loss", evaluation.loss, step)
        if len(evaluation.losses) > 1:
            for name, loss in evaluation.losses.items():
                self._add(f"evaluation/loss/{name}", loss, step)
        for name, value in evaluation.metrics.items():
            self._add(f"evaluation/{name}", value, step)

    def on_resume(self, path: Path, *, step: int, epoch: int) -> None:  # noqa: ARG002 - the protocol's
        """Begin another event file, with which TensorBoard hides what it has of later steps."""
        self._held = None
        with self._failures_told():
            self._close()
            self._writer = self._make_writer(str(self.log_dir), purge_step=step + 1)

    def on_fit_end(self, result: FitResult | None) -> None:  # noqa: ARG002 - the protocol's
        """Write the last step and close the event file."""
        if self._writer is None:
            return
        self._write_held()
        with self._failures_told():
            self._close()

    def _write_step(self, report: StepReport, *, epoch: int, at_s: float) -> None:  # noqa: ARG002 - the base's
        try:
            scalars = _step_scalars(report)
        except RuntimeError:  # the device was lost; see JSONLinesLog
            return
        for name, value in scalars.items():
            self._add(name, value, report.step, walltime=at_s)

    def _made(self) -> Any:
        try:
            return self._make_writer(str(self.log_dir))
        except OSError as error:
            raise InvalidInputError(
                f"the event file in {str(self.log_dir)!r} cannot be opened for writing ({error.strerror}); pass a "
                "folder that you may write to"
            ) from error

    def _add(self, name: str, value: float, step: int, walltime: float | None = None) -> None:
        if self._writer is not None:
            with self._failures_told():
                self._writer.add_scalar(name, value, step, walltime=walltime)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    @contextmanager
    def _failures_told(self) -> Iterator[None]:
        """Give the log up where TensorBoard fails: its thread that writes does not begin again after an error."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, training matters more
            self._writer = None
            if not self._has_complained:
                self._has_complained = True
                log(
                    f"the event file in {str(self.log_dir)!r} cannot be written ({first_line(error)}); "
                    "training goes on without it",
                    logging.WARNING,
                )


def _step_scalars(report: StepReport) -> dict[str, float]:
    scalars: dict[str, float] = {"train/loss": report.loss}
    if len(report.losses) > 1:
        scalars |= {f"train/loss/{name}": loss for name, loss in report.losses.items()}
    rates = report.learning_rates
    for number, rate in enumerate(rates):
        if rate is not None:
            scalars["train/learning_rate" if len(rates) == 1 else f"train/learning_rate/{number}"] = rate
    if report.grad_norm is not None:
        scalars["train/grad_norm"] = report.grad_norm
    if report.noise_scale is not None:
        scalars["train/noise_scale"] = report.noise_scale
    if report.elapsed_s > 0:
        scalars["train/samples_per_s"] = report.samples / report.elapsed_s
    if report.peak_bytes is not None:
        scalars["memory/peak_bytes"] = report.peak_bytes
    return scalars


def _end_record(result: FitResult | None) -> dict[str, Any]:
    if result is None:
        return {"completed": False}
    return {
        "completed": True,
        "steps": result.steps,
        "samples": result.samples,
        "oom_events": result.oom_events,
        "elapsed_s": result.elapsed_s,
        "stopped": result.stopped,
        "noise_scale": finite(result.noise_scale),
    }


def _summary_writer() -> Callable[..., Any]:
    try:
        # Here rather than at the head of the file: TensorBoard is optional, and takes longer to import than
        # autoaccum.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        raise InvalidInputError(
            "TensorBoardLog needs TensorBoard, which is not installed; pip install tensorboard"
        ) from error
    return SummaryWriter
