"""A folder of checkpoint files: each written beside its place and renamed, each taken only where it is whole.

What is in a file is not looked at here, except that it can be loaded without running code (`weights_only=True`), and
that a folder with further files which it names is there: it is written first, so that a file never lacks its folder.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import secrets
import shutil
import time
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from autoaccum import shards
from autoaccum.errors import CheckpointError, InvalidInputError
from autoaccum.oom import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from autoaccum.notices import Notices

# The newest, and one to fall back on where that was damaged afterwards.
_KEPT = 2
_NAME = re.compile(r"step-\d{8,}\.pt")
_UNFINISHED = ".unfinished"
# The name of such a folder, with what is in it, stands under this key.
SHARDS = "shards"
_OF_SHARDS = re.compile(r"step-\d{8,}\.\d+\.shards")
# The order of files is the order of their times, and not every file system tells times apart that are nearer.
_APART_NS = 1_000_000


class _DamagedError(Exception):
    """A file is not as it was written."""


class Storage:
    """The checkpoints in one folder, which belongs to one run.

    Args:
        folder: Made, with those above it, where it is missing.

    Attributes:
        guard: Called before anything is renamed or removed that another process may have come to use; raises where one
            has. `Lease.check`, on the rank that writes.

    Raises:
        InvalidInputError: It cannot be a folder to write to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.guard: Callable[[], None] = lambda: None
        self._whole: list[Path] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            reason = "" if os.access(folder, os.W_OK | os.X_OK) else "no permission to write"
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError as error:  # a null byte
            reason = str(error)
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
        """Remove what a writer that was killed has left behind.

        A writer that is only suspended cannot bring its file to its place after that.
        """
        self.guard()
        for path in self.folder.glob(f"step-*{_UNFINISHED}"):
            if not path.is_dir():  # which no writer leaves
                path.unlink(missing_ok=True)

    def folder_for_shards(self, step: int) -> Path:
        """Return a folder that is not there yet, for what a checkpoint of this step has beside its file."""
        return self.folder / f"step-{step:08d}.{time.time_ns()}.shards"

    def remove_others(self) -> None:
        """Remove folders that belong to no checkpoint that is there."""
        needed = set()
        for path in self.found():
            with contextlib.suppress(Exception):  # one that cannot be read has none
                needed.add(_load(path, mmap=True)[SHARDS][0])
        others = [path for path in self.folder.iterdir() if _OF_SHARDS.fullmatch(path.name)]
        self.guard()  # after they were listed: none of them is of another process that has come since
        for path in others:
            if path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)

    def found(self) -> list[Path]:
        """Return the files of checkpoints, the newest first, whole or not."""
        files = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(files, key=lambda path: (_time_ns(path), path.name), reverse=True)

    def read_newest(
        self, notices: Notices, known_damage: Mapping[Path, str] | None = None
    ) -> tuple[Path, dict[str, Any]] | None:
        """Take up the newest checkpoint that is whole; return None where there is none at all.

        Args:
            notices: Where it is said that one is not whole.
            known_damage: What was found wrong with some of them already.

        Raises:
            CheckpointError: There are some, and none of them is whole.
        """
        damaged: list[str] = []
        for path in self.found():
            try:
                if known_damage and path in known_damage:
                    raise _DamagedError(known_damage[path])  # noqa: TRY301 - told like any other
                content = _read(path)
            except _DamagedError as error:
                damaged.append(f"{path.name}: {error}")
                notices.say(f"checkpoint {path} is cut short or damaged ({error}); the one before it is looked for")
                continue
            self._whole = [path]
            return path, content
        if damaged:
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {self.folder} is whole ({'; '.join(damaged)}); restore one "
                "from a backup, or pass resume=False to start anew"
            )
        return None

    def read_back(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest checkpoint of this run, wherever it came from; None where there is none that is whole."""
        for path in self._whole:
            with contextlib.suppress(_DamagedError, CheckpointError):
                return path, _read(path)
        return None

    def write(self, content: dict[str, Any], step: int) -> Path:
        """Write a checkpoint; what was there before stays until it is whole.

        Returns:
            Its path.

        Raises:
            CheckpointError: It could not be written, or what it is to hold could not be loaded again.
        """
        path = self.folder / f"step-{step:08d}.pt"
        # Nobody else writes under this name, so that what is renamed is what was written here.
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
        with _told(path, self.guard), _removed_unless_renamed(unfinished):
            with unfinished.open("xb") as file:
                _save(content, file)
                file.flush()
                os.fsync(file.fileno())
            _check_that_it_loads(unfinished)
            self._make_the_newest(unfinished)
            self.guard()
            unfinished.replace(path)
            _flush_folder(self.folder)
        self._whole = [path, *(other for other in self._whole if other != path)][:_KEPT]
        for other in [other for other in self.found() if other not in self._whole]:
            self.guard()  # after they were listed, as above
            other.unlink(missing_ok=True)
        return path

    def took(self, path: Path) -> None:
        """Note that another process of this run has written a checkpoint."""
        self._whole = [path, *(other for other in self._whole if other != path)][:_KEPT]

    def _make_the_newest(self, path: Path) -> None:
        """Give a file a time after all others, whatever the clock of this machine says."""
        latest = max((_time_ns(other) for other in self.found()), default=0)
        now = max(time.time_ns(), latest + _APART_NS)
        os.utime(path, ns=(now, now))


def _time_ns(path: Path) -> int:
    # A link to nothing has a time of its own: reading it is then an error that names it.
    return (path.stat() if path.exists() else path.lstat()).st_mtime_ns


@contextlib.contextmanager
def _removed_unless_renamed(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _told(path: Path, guard: Callable[[], None]) -> Iterator[None]:
    """Say of an error while writing what was written, and what there still is."""
    try:
        yield
    except OSError as error:
        if path.parent.is_dir():
            guard()  # another process that has taken the folder over removes what is half written
        else:
            raise CheckpointError(
                f"the checkpoint {path} could not be written, since its folder is gone, and with it those before; "
                "leave the folder alone while training goes on, or pass another as checkpoint="
            ) from error
        if isinstance(error, FileNotFoundError):
            raise CheckpointError(
                f"the checkpoint {path} could not be written, since its unfinished file was removed meanwhile, and "
                "those before it are as they were; leave the folder alone while training goes on"
            ) from error
        raise CheckpointError(
            f"the checkpoint {path} could not be written ({error.strerror or error}), and those before it are as they "
            "were; make room on that disk, or pass another folder as checkpoint="
        ) from error


def check_that_it_can_be_kept(content: dict[str, Any]) -> None:
    """Refuse what could not be written, or not be loaded again, without a file.

    Raises:
        CheckpointError: It is so.
    """
    buffer = io.BytesIO()
    _save(content, buffer)
    buffer.seek(0)
    _check_that_it_loads(buffer)


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    noting = _NotingFile(file)
    try:
        torch.save(content, noting)  # type: ignore[arg-type]
    except RuntimeError:
        # torch reports any error of a file as one of its own, and on the way loses what was the matter.
        if noting.error is not None:
            raise noting.error from None
        raise
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # the three that pickle raises
        raise _cannot_be_kept(first_line(error)) from error


class _NotingFile:
    """A file that remembers why it could not be written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _check_that_it_loads(written: Path | BinaryIO) -> None:
    """Refuse, before it replaces anything, what could be written but not be loaded; values are not read from a file."""
    try:
        _load(written, mmap=not isinstance(written, io.BytesIO))
    except pickle.UnpicklingError as error:
        raise _cannot_be_kept(_unsafe(error)) from error


def _cannot_be_kept(reason: str) -> CheckpointError:
    return CheckpointError(
        f"the state of this run cannot be kept in a checkpoint: {reason}; keep plain values and tensors in the "
        "state_dict() of models, optimizers, schedulers and loaders"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        _check_sums(path)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read ({error.strerror or error}); see to that, or pass another folder as "
            "checkpoint="
        ) from error
    try:
        content = _load(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be loaded by torch {torch.__version__}: {_unsafe(error)}; use the versions "
            "that wrote it, or pass resume=False to start anew"
        ) from error
    except Exception as error:  # the sums are right, but not the archive around them
        raise _DamagedError(first_line(error)) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no checkpoint of autoaccum; pass a folder of its own as checkpoint=")
    if content.get(SHARDS) is not None:
        name, files = content[SHARDS]
        wrong = shards.damage(path.parent / name, files)
        if wrong is not None:
            raise _DamagedError(wrong)
    return content


def _check_sums(path: Path) -> None:
    """Compare all contents with their checksums, which torch writes but does not look at when it loads."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # a damaged archive fails in many ways: struct.error, NotImplementedError, EOFError, ...
        raise _DamagedError(first_line(error)) from error
    if bad is not None:
        raise _DamagedError(f"wrong checksum of {bad}")


def _load(file: Path | BinaryIO, *, mmap: bool = False) -> Any:
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def _numpy_globals() -> list[Any]:
    """What NumPy's numbers and arrays are rebuilt by: schedulers often hold some, and none of it runs code.

    The modules are private and were renamed in NumPy 2, so the functions are asked of the objects themselves.
    """
    rebuilds: tuple[Any, ...] = (np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0])
    named = [
        (rebuild, f"numpy.{core}.{module}.{rebuild.__name__}")
        for rebuild in rebuilds
        for core in ("core", "_core")
        for module in ("multiarray", "numeric")
    ]
    return [*named, np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + "?efd"}]


_NUMPY = _numpy_globals()


def _unsafe(error: pickle.UnpicklingError) -> str:
    """Return the part of torch's long message that names what cannot be loaded."""
    text = str(error)
    found = re.search(
        r"(Unsupported|Unsupported global:|Can only) [^\n]*?(?=( was not| is not|\.? ?Please|\n|$))", text
    )
    return found.group().strip() if found else first_line(error)


def _flush_folder(folder: Path) -> None:
    """Make a rename last through a loss of power."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows has no such thing
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
