"""Writes down what was on the device when memory first ran out in a call of `fit`, before it is let go.

One file a call, in a form that docs/oom-report.md describes; `_report/oom_view.py` reads it. Whatever goes wrong here
is said once and never reaches the training, and nothing that is looked at is held on to.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import traceback
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import check_path
from autoaccum._engine.alive import CATEGORIES, survey
from autoaccum._engine.places import Places
from autoaccum._oom import first_line
from autoaccum._system import safe_files
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from autoaccum._engine.alive import Alive
    from autoaccum._engine.step import TrainingStep
    from autoaccum._system.notices import Notices

FORMAT, VERSION = "autoaccum.oom_report", 1
# So many tensors and modules are named; the sums are over all.
_LARGEST = 20
_MODULES = 50
# Allocations and frees that the allocator remembers: a few steps of a large model, at several KB of host memory each
# (torch.cuda.memory._record_memory_history says so).
_HISTORY = 20_000
_FOREIGN = (f"{os.sep}torch{os.sep}", f"{os.sep}autoaccum{os.sep}")


class PostMortem:
    """Looks on while it is entered, until memory has run out once.

    Args:
        folder: Where the report goes; made if need be.
        step: The training step.
        notices: Where it is said what was written.
        compiles: Whether the model is going to be compiled: then no module leaves marks.

    Raises:
        InvalidInputError: Nothing can be written to the folder.
    """

    def __init__(
        self, folder: str | os.PathLike[str], step: TrainingStep, notices: Notices, *, compiles: bool = False
    ) -> None:
        self._folder = check_folder(folder)
        self._step = step
        self._notices = notices
        self._places = Places(step.objective.modules)
        self._marks = not compiles
        self._history: _History | None = None
        self._is_looking = False

    def __enter__(self) -> None:
        self._is_looking = True
        self._step.witness = self
        if self._marks:
            self._places.begin()
        if self._step.memory.device.type == "cuda":
            self._history = _History(self._step.memory.device)

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
        """Write down what is alive, with memory run out and `error` caught but not let go of.

        Args:
            error: What was raised.
            phase: What was being done.
            size: Samples in the micro-batch; None where none was at work.
            step: Number of the window, from 1; None outside of training.
            is_trial: Whether the size was tried to see whether it fits. Then only a failure that no smaller size can
                answer is worth a report.
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
    """The CUDA allocator's own record of what was allocated where; it costs some microseconds an allocation.

    Where somebody has it recorded already, it is left as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_ours = not torch._C._cuda_isHistoryEnabled()
        if self._is_ours:
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=_HISTORY, device=device
            )

    def write(self, path: Path, alive: Sequence[Alive]) -> str | None:
        """Write the allocator's snapshot as PyTorch's memory viewer reads it, and add source lines to what is alive.

        Returns:
            The file's name; None where there is none. What is alive is told all the same.
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
        """Record no more."""
        if self._is_ours:
            torch.cuda.memory._record_memory_history(None)


def check_folder_name(folder: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder as a path; whether it is there is not looked at. None stays None.

    Raises:
        InvalidInputError: It is no path of a folder.
    """
    return None if folder is None else check_path("oom_report", folder, "folder for the report")


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder as a path, made if need be.

    Raises:
        InvalidInputError: It cannot be written to.
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
    return {"autoaccum": version("autoaccum"), "torch": torch.__version__, "python": platform.python_version()}


def _lines(snapshot: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the address of each block in use and the user's line that asked for it."""
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            for frame in block.get("frames", ()):
                file = frame["filename"]
                if file.endswith(".py") and not any(part in file for part in _FOREIGN):
                    yield block["address"], f"{file}:{frame['line']}"
                    break
