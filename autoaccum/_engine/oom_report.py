"""Writes a report of what was on the device when memory first ran out in a call of `fit`, before it is freed.

Each call writes at most one file, in the format described in docs/oom-report.md; `_report/oom_view.py` reads it. An
error in this module is reported once and never reaches the training. Nothing that is inspected is kept alive.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import traceback
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import check_path
from autoaccum._engine.live_storages import CATEGORIES, survey
from autoaccum._engine.tensor_origins import Places
from autoaccum._oom import first_line
from autoaccum._system import safe_files, signals
from autoaccum._system.own_distribution import __version__
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.live_storages import Alive
    from autoaccum._system.notices import Notices

FORMAT, VERSION = "autoaccum.oom_report", 1
# Number of tensors and modules listed by name; totals cover all.
_LARGEST = 20
_MODULES = 50
# Allocations and frees that the allocator records: a few steps of a large model, at several KB of host memory each
# (documentation of torch.cuda.memory._record_memory_history).
_HISTORY = 20_000
_FOREIGN = (f"{os.sep}torch{os.sep}", f"{os.sep}autoaccum{os.sep}")


class PostMortem:
    """While entered, writes a report the first time memory runs out.

    Args:
        folder: Folder for the report; created if missing.
        step: The training step.
        notices: Reports what was written.

    Raises:
        InvalidInputError: The folder is not writable.
    """

    def __init__(self, folder: str | os.PathLike[str], step: TrainingStep, notices: Notices) -> None:
        self._folder = check_folder(folder)
        self._step = step
        self._notices = notices
        self._places = Places(step.objective.modules)
        self._history: _History | None = None
        self._is_looking = False

    def __enter__(self) -> None:
        try:
            with signals.held():  # an interrupt would leave hooks on all modules of the process
                self._begin()
        except BaseException:
            self._end()
            raise

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        self._end()

    def see(
        self,
        error: BaseException,
        *,
        phase: str,
        size: int | None,
        step: int | None = None,
        is_trial: bool = False,
    ) -> None:
        """Write down what is alive. Call after memory ran out, while `error` is caught but not yet released.

        Args:
            error: The error that was raised.
            phase: The phase in which it was raised.
            size: Samples in the micro-batch; None if none was being processed.
            step: Number of the window, from 1; None outside of training.
            is_trial: Whether this was a trial of whether the size fits. Then only a failure that no smaller size can
                avoid is worth a report.
        """
        if not self._is_looking or (is_trial and size is not None and size > 1):
            self._places.forget()
            return
        failure = ""
        try:
            self._write(error, phase, size, step)
        except Exception as problem:  # noqa: BLE001 - whatever it is, training matters more
            failure = first_line(problem)
            traceback.clear_frames(problem.__traceback__)
        finally:
            self._end()
        if failure:
            self._notices.say(f"memory ran out, and no report of it could be written to {self._folder} ({failure})")

    def _begin(self) -> None:
        self._is_looking = True
        self._step.witness = self.see
        self._places.begin()
        if self._step.memory.device.type == "cuda":
            self._history = _History(self._step.memory.device)

    def _end(self) -> None:
        self._is_looking = False
        self._step.witness = None
        self._places.end()
        if self._history is not None:
            self._history.end()
            self._history = None

    def _write(self, error: BaseException, phase: str, size: int | None, step: int | None) -> None:
        memory = self._step.memory
        reading, peak, neighbours = memory.reading(), memory.peak_bytes(), memory.neighbours()
        with memory.lifted():
            alive = survey(error, self._step, self._places.names, is_marked=self._places.is_marking)
            at_work = self._places.at_work
            now = datetime.now(UTC)
            where = phase.replace(" ", "-") if step is None else f"step{step:08d}"
            path = self._folder / f"oom-{where}-{now:%Y%m%dT%H%M%S.%fZ}.json"
            snapshot = None if self._history is None else self._history.write(path.with_suffix(".pickle"), alive)
            record = {
                "format": FORMAT,
                "version": VERSION,
                "time": now.isoformat(timespec="seconds"),
                "software": _software(),
                "step": step,
                "phase": phase,
                "micro_batch": size,
                "error": type(error).__name__,
                "message": first_line(error),
                "failed_in": [
                    {"module": place.module, "kind": place.kind, "source": place.source} for place in at_work
                ],
                "device": {"name": memory.name, "type": memory.device.type, "index": memory.device.index},
                "memory": {**asdict(reading), "peak_bytes": peak},
                "neighbours": [asdict(other) for other in neighbours],
                "alive": _summary(alive),
                "allocator_snapshot": snapshot,
            }
            safe_files.write(path, json.dumps(record, indent=1, allow_nan=False).encode() + b"\n")
        self._notices.say(f"memory ran out; what was alive is in {path} (autoaccum report --oom {path} shows it)")


class _History:
    """The CUDA allocator's own record of what was allocated where. It costs a few microseconds per allocation.

    If recording is already enabled, it is left as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_ours = not torch._C._cuda_isHistoryEnabled()
        if self._is_ours:
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=_HISTORY, device=device
            )

    def write(self, path: Path, alive: Sequence[Alive]) -> str | None:
        """Write the allocator's snapshot for PyTorch's memory viewer, and add source lines to what is alive.

        Returns:
            The file's name; None if it could not be written. The report is complete without it.
        """
        try:
            snapshot = torch.cuda.memory._snapshot()
            lines = dict(_lines(snapshot))
            for one in alive:
                one.source = lines.get(one.address, one.source)
            with safe_files.replacing(path) as unfinished, unfinished.open("wb") as file:
                pickle.dump(snapshot, file)
        except Exception as problem:  # noqa: BLE001 - private to PyTorch, and only an addition
            traceback.clear_frames(problem.__traceback__)
            return None
        return path.name

    def end(self) -> None:
        """Stop recording."""
        if self._is_ours:
            torch.cuda.memory._record_memory_history(None)


def check_folder_name(folder: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder as a path, without checking whether it exists. None stays None.

    Raises:
        InvalidInputError: It is not a path to a folder.
    """
    return None if folder is None else check_path("oom_report", folder, "folder for the report")


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder as a path, creating it if missing.

    Raises:
        InvalidInputError: It is not writable.
    """
    path = check_path("oom_report", folder, "folder for the report")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            f"oom_report={str(path)!r} cannot be used as a folder ({error.strerror or error}); pass another"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidInputError(f"oom_report={str(path)!r} cannot be written to; pass another folder")
    return path.resolve()


def _summary(alive: Sequence[Alive]) -> dict[str, Any]:
    modules: dict[tuple[str | None, str | None], list[Alive]] = {}
    for one in alive:
        modules.setdefault((one.module, one.kind), []).append(one)
    by_module = sorted(modules.items(), key=lambda entry: -_sum(entry[1]))
    return {
        "bytes": _sum(alive),
        "storages": len(alive),
        "by_category": [
            {"category": category, "bytes": _sum(those), "storages": len(those)}
            for category in CATEGORIES
            if (those := [one for one in alive if one.category == category])
        ],
        "by_module": [
            {
                "module": module,
                "kind": kind,
                "bytes": _sum(those),
                "activations_bytes": _sum([one for one in those if one.category == "activations"]),
                "storages": len(those),
            }
            for (module, kind), those in by_module[:_MODULES]
        ],
        "largest": [asdict(one) for one in alive[:_LARGEST]],
    }


def _sum(those: Sequence[Alive]) -> int:
    return sum(one.bytes for one in those)


def _software() -> dict[str, str]:
    return {"autoaccum": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _lines(snapshot: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the address of each block in use and the line of user code that allocated it."""
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            for frame in block.get("frames", ()):
                file = frame["filename"]
                if file.endswith(".py") and not any(part in file for part in _FOREIGN):
                    yield block["address"], f"{file}:{frame['line']}"
                    break
