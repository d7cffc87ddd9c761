"""Writes and reads the checkpoints of one run: a folder each, whole or not there at all.

A folder holds `state.pt`, a file of torch's that plain `torch.load(weights_only=True)` reads, so that no code runs;
and `manifest.json` with its SHA-256. It is written and flushed under another name, then renamed. An older one of the
same step is moved aside before and removed after that.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import re
import secrets
import shutil
from collections import Counter, OrderedDict
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from autoaccum._oom import first_line
from autoaccum._system import files
from autoaccum._system.own_distribution import __version__
from autoaccum.errors import CheckpointError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from autoaccum._system.notices import Notices

# Raised whenever an older autoaccum could not read a new checkpoint, or would read it wrongly.
FORMAT = 1
STATE, MANIFEST = "state.pt", "manifest.json"
# The newest, and one to fall back on where that was damaged afterwards.
_KEPT = 2
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = ".aside"
_MOST_MANIFEST_BYTES = 1 << 26
# Stands for an array of NumPy's, whose pickle would call NumPy's own functions with arguments of the file's choice.
_ARRAY = "autoaccum.array"
_MAPPINGS = (dict, OrderedDict, Counter)


class _DamagedError(Exception):
    """A checkpoint is not as it was written."""


class Storage:
    """The checkpoints in one folder, which belongs to one run.

    Args:
        folder: Made, with those above it, where it is missing.
        replaces: Whether the run is a new one: its first checkpoint moves those of earlier runs aside.

    Attributes:
        guard: Called before anything is renamed or removed that another process may have come to use; raises where one
            has. `FolderLock.check`, on the rank that writes.
        newest: The newest whole checkpoint of this run; None before the first.
        best: The one with the lowest validation loss; None before the first evaluation.
        best_loss: That loss.

    Raises:
        InvalidInputError: It cannot be a folder to write to.
    """

    def __init__(self, folder: Path, *, replaces: bool = False) -> None:
        self.folder = folder
        self.guard: Callable[[], None] = lambda: None
        self.best: Path | None = None
        self.best_loss: float | None = None
        self._replaces = replaces
        self._whole: list[Path] = []  # the newest first
        try:
            folder.mkdir(parents=True, exist_ok=True)
            reason = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission to write"
        except (OSError, ValueError) as error:  # ValueError: a null byte
            reason = getattr(error, "strerror", None) or str(error)
        if reason:
            raise InvalidInputError(
                f"checkpoint={str(folder)!r} cannot be a folder for checkpoints ({reason}); pass one that you may "
                "write to"
            )

    @property
    def newest(self) -> Path | None:
        """The newest whole checkpoint of this run; None before the first."""
        return self._whole[0] if self._whole else None

    def tidy(self) -> None:
        """Remove what killed writers left; one that is only suspended then fails at its rename."""
        self.guard()
        for path in self.folder.glob(f".step-*{files.UNFINISHED}"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f".step-*{_ASIDE}"):
            self._put_back(path)

    def found(self) -> list[Path]:
        """Return the folders of checkpoints, the newest first, whole or not."""
        paths = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read_newest(self, notices: Notices) -> tuple[Path, dict[str, Any]] | None:
        """Read the newest checkpoint that is whole; return None where the folder has none at all.

        Args:
            notices: Reports those that are not whole.

        Raises:
            CheckpointError: There are some, and none of them is whole.
        """
        damaged: list[str] = []
        found = self.found()
        for number, path in enumerate(found):
            try:
                content = _read(path)
            except _DamagedError as error:
                damaged.append(f"{path.name}: {error}")
                said = f"checkpoint {path} is cut short or damaged ({error}); the one before it is looked for"
                notices.say(said, level=logging.WARNING)
                continue
            self._whole = [path]
            for other in reversed(found[number:]):  # of equals the earliest is the best, as without a resume
                self._look_at_loss(other, notices)
            return path, content
        if damaged:
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {self.folder} is whole ({'; '.join(damaged)}); restore one "
                "from a backup, or pass resume=False to start from scratch"
            )
        return None

    def _look_at_loss(self, path: Path, notices: Notices) -> None:
        try:
            loss = manifest_of(path)["val_loss"]
            if loss is not None and path != self.newest:
                _check(path)
        except (_DamagedError, CheckpointError) as error:
            notices.say(f"checkpoint {path} is not taken for the best one: {error}", level=logging.WARNING)
        else:
            self._note_loss(path, loss)

    def _note_loss(self, path: Path, loss: float | None) -> None:
        if path == self.best and self.best_loss != loss:
            self.best = self.best_loss = None  # the step was written anew
        if loss is not None and (self.best_loss is None or loss < self.best_loss):
            self.best, self.best_loss = path, loss

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, content: dict[str, Any], step: int, *, val_loss: float | None = None) -> Path:
        """Write a checkpoint; what was there before stays until it is whole.

        Args:
            content: What it holds.
            step: The number of windows that are done.
            val_loss: The validation loss of that moment, if it was evaluated.

        Returns:
            Its path.

        Raises:
            CheckpointError: It could not be written, or what it is to hold could not be loaded again.
        """
        self.guard()
        path = self.folder / f"step-{step:08d}"
        unfinished = self.folder / f".{path.name}.{secrets.token_hex(8)}{files.UNFINISHED}"
        try:
            unfinished.mkdir()
            with (unfinished / STATE).open("wb") as file:
                checksum = _save(content, file)
                file.flush()
                os.fsync(file.fileno())
            _check_that_it_loads(unfinished / STATE)
            _write_manifest(unfinished, step, val_loss, checksum)
            self._rename(unfinished, path)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            self.guard()  # the folder may be gone, or of another process by now, which removes what is half written
            before = f"; those before it are still in {self.folder}" if self._whole else ""
            raise CheckpointError(
                f"the checkpoint {path} could not be written ({error.strerror or error}){before}; make room on that "
                "disk, or pass another folder as checkpoint="
            ) from error
        self.note_written(path, val_loss)
        for other in self.found():
            if other not in (*self._whole, self.best):
                self.guard()  # after they were listed: none of them is of another process that has come since
                with suppress(OSError):  # the new one is whole
                    _remove(other)
        return path

    def note_written(self, path: Path, val_loss: float | None = None) -> None:
        """Note that this process, or another one of this run, has written a checkpoint."""
        self._whole = [path, *(other for other in self._whole if other != path)][:_KEPT]
        self._note_loss(path, val_loss)

    def _rename(self, unfinished: Path, path: Path) -> None:
        """Give a checkpoint its name, in place of an older one, which comes back if that fails."""
        self.guard()
        if self._replaces:
            self._move_earlier_runs_aside()
        aside = None
        if path.exists() or path.is_symlink():
            aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_ASIDE}")
            path.rename(aside)
        try:
            unfinished.rename(path)
            files.flush_folder(self.folder)
        finally:
            if aside is not None:
                self._put_back(aside)

    def _put_back(self, aside: Path) -> None:
        """Remove what was moved aside if another has its name by now; else give that back."""
        path = self.folder / aside.name[1:].split(".")[0]
        if path.exists():
            _remove(aside)
        else:
            aside.rename(path)

    def _move_earlier_runs_aside(self) -> None:
        earlier = self.found()
        if earlier:
            numbers = (number for number in range(1, 2**31) if not (self.folder / f"earlier-{number}").exists())
            place = self.folder / f"earlier-{next(numbers)}"
            place.mkdir()
            for path in earlier:
                path.rename(place / path.name)
        self._replaces = False


def sha256_of(path: Path) -> str:
    """Return the checksum of a file.

    Raises:
        OSError: It cannot be read.
    """
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Turn an error of the file system into damage of a checkpoint, or one that names it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | files.NotAFileError):
            raise _DamagedError(f"{name} is missing, or no file") from error
        raise CheckpointError(
            f"the checkpoint {path} cannot be read ({error.strerror or error}); see to that, or pass another folder as "
            "checkpoint="
        ) from error


def manifest_of(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        _DamagedError: It is missing or not one.
        CheckpointError: It is of a newer autoaccum.
    """
    try:
        with _reading(path, MANIFEST):
            manifest = json.loads(files.read(path / MANIFEST, _MOST_MANIFEST_BYTES))
        form, sums, loss = manifest["format"], manifest["sha256"], manifest["val_loss"]
        if form > FORMAT:
            raise CheckpointError(
                f"the checkpoint {path} was written by autoaccum {manifest['autoaccum']} in format {form}, and this "
                f"one, {__version__}, reads formats up to {FORMAT}; use that version or a newer one, or pass "
                "resume=False to start from scratch"
            )
        if type(sums) is not dict or STATE not in sums or not isinstance(loss, int | float | None):
            raise _DamagedError(f"{MANIFEST} does not list {STATE}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _DamagedError(f"{MANIFEST} is missing or damaged, or it is of another program") from error
    return dict(manifest)


def _write_manifest(folder: Path, step: int, val_loss: float | None, checksum: str) -> None:
    content = {"autoaccum": __version__, "format": FORMAT, "step": step, "val_loss": val_loss}
    with (folder / MANIFEST).open("w") as file:
        json.dump({**content, "sha256": {STATE: checksum}}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    files.flush_folder(folder)


def _check(path: Path) -> None:
    """Compare the files of a checkpoint with their checksums.

    Raises:
        _DamagedError: One is another.
        CheckpointError: One cannot be read.
    """
    for name, expected in manifest_of(path)["sha256"].items():
        with _reading(path, name):
            is_right = sha256_of(path / name) == expected
        if not is_right:
            raise _DamagedError(f"wrong checksum of {name}")


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint."""
    _check(path)
    try:
        with _reading(path, STATE):
            content = _load(path / STATE)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be loaded by torch {torch.__version__}: {_unsafe(error)}; only plain values "
            "and tensors are loaded, since anything else can run code; use the versions that wrote it, or pass "
            "resume=False to start from scratch"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # the checksums are right, but not the archive around them
        raise _DamagedError(first_line(error)) from error
    if type(content) is not dict:
        raise _DamagedError("it is of another program")
    return _walked(content, _unpacked)  # type: ignore[no-any-return]


def _load(file: Path | io.BytesIO, *, mmap: bool = False) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def check_that_it_can_be_kept(content: dict[str, Any]) -> None:
    """Write a state, without its tensors, and read it back, in memory.

    Raises:
        CheckpointError: It cannot be written or loaded again.
    """
    buffer = io.BytesIO()
    _save(content, buffer, lambda value: None if isinstance(value, Tensor) else _packed(value))
    buffer.seek(0)
    _check_that_it_loads(buffer)


def _check_that_it_loads(written: Path | io.BytesIO) -> None:
    """Refuse, before it replaces anything, what could be written but not be loaded; values are not read from a file."""
    try:
        _load(written, mmap=not isinstance(written, io.BytesIO))
    except pickle.UnpicklingError as error:
        raise _cannot_be_kept(_unsafe(error)) from error


def _save(content: Any, file: Any, pack: Callable[[Any], Any] | None = None) -> str:
    """Write a content, each of its parts as `pack` returns it; return the file's SHA-256."""
    hashing = _HashingFile(file)
    try:
        torch.save(_walked(content, pack or _packed), hashing)  # type: ignore[arg-type]
    except RuntimeError as error:
        # torch reports any error of a file as one of its own, and on the way loses what was the matter.
        if hashing.error is not None:
            raise hashing.error from None
        if isinstance(error, RecursionError):
            raise _cannot_be_kept("it is nested too deeply, or holds itself") from error
        raise
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _cannot_be_kept(first_line(error)) from error
    return hashing.sha256.hexdigest()


class _HashingFile:
    """A file that computes the checksum of what is written to it, and remembers why it could not be written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.sha256.update(data)
            return int(self._file.write(data))
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _cannot_be_kept(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the state of this run cannot be kept in a checkpoint: {reason}; keep plain values and tensors in the "
        "state_dict() of models, optimizers, schedulers and loaders"
    )


def _walked(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a nested value with `leaf` applied to what is in it, from the outside to the inside."""
    value = leaf(value)
    if type(value) in _MAPPINGS:
        return type(value)({leaf(key): _walked(item, leaf) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_walked(item, leaf) for item in value)
    return value


def _packed(value: Any) -> Any:
    """Return a value of NumPy's as a number of Python's or a tagged tensor."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is np.ndarray:
        return {_ARRAY: torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C", copy=True))}
    return value


def _unpacked(value: Any) -> Any:
    is_array = type(value) is dict and len(value) == 1 and isinstance(value.get(_ARRAY), Tensor)
    return value[_ARRAY].numpy() if is_array else value


def _remove(path: Path) -> None:
    """Remove a checkpoint, or a link of its name; what a kill leaves of it is none that could be read."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    going = path.with_name(f".{path.name.strip('.')}.{secrets.token_hex(8)}{files.UNFINISHED}")
    path.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def _unsafe(error: pickle.UnpicklingError) -> str:
    """Return the part of torch's long message that names what cannot be loaded.

    The rest advises to load the file with code in it, in the first line already.
    """
    text = str(error)
    found = re.search(
        r"(Trying to load unsupported|Unsupported|Can only) [^\n]*?(?=( whose| was not| is not|\.? ?Please|\n|$))", text
    ) or re.search(r"(?<=WeightsUnpickler error: )[^\n]+", text)
    if found is not None:
        return found.group().strip()
    first = first_line(error)
    return "it holds what is not a plain value" if "weights_only" in first or "Weights only" in first else first
