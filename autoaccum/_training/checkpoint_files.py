"""Writes and reads the checkpoint files of one folder, each of which is whole or not there.

A file must load without running code (by plain `torch.load(weights_only=True)`, with nothing added to what that
allows), and a folder of further files that it names must exist: that is written first. Otherwise its content is not
looked at here.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from autoaccum._oom import first_line
from autoaccum._system import files
from autoaccum._training import file_digest
from autoaccum._training.packing import PackingError, packed, unpacked
from autoaccum.errors import CheckpointError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from autoaccum._system.notices import Notices

# The newest, and one to fall back on where that was damaged afterwards.
_KEPT = 2
_NAME = re.compile(r"step-\d{8,}\.pt")
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
        """Remove the unfinished files of killed writers; one that is only suspended then fails at its rename."""
        self.guard()
        for path in self.folder.glob(f"step-*{files.UNFINISHED}"):
            if not path.is_dir():  # which no writer leaves
                path.unlink(missing_ok=True)

    def found(self) -> list[Path]:
        """Return the files of checkpoints, the newest first, whole or not."""
        files = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(files, key=lambda path: (_time_ns(path), path.name), reverse=True)

    def read_newest(
        self, notices: Notices, known_damage: Mapping[Path, str] | None = None
    ) -> tuple[Path, dict[str, Any]] | None:
        """Read the newest checkpoint that is whole; return None where the folder has none at all.

        Args:
            notices: Reports those that are not whole.
            known_damage: Damage that is known already, by file.

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
                "from a backup, or pass resume=False to start from scratch"
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
        writing = files.replacing(path, flushes_rename=True, before_rename=self.guard)
        with _explained(path, self.guard), writing as unfinished:
            with unfinished.open("r+b") as file:
                with file_digest.sealing(file) as sealed:
                    _save(content, sealed)
                file.flush()
                os.fsync(file.fileno())
            _check_that_it_loads(unfinished)
            self._make_the_newest(unfinished)
        self._whole = [path, *(other for other in self._whole if other != path)][:_KEPT]
        for other in [other for other in self.found() if other not in self._whole]:
            if other.is_symlink() or not other.is_dir():  # a folder is not of any writer
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


@contextmanager
def _explained(path: Path, guard: Callable[[], None]) -> Iterator[None]:
    """Turn an error of the file system into one that names the checkpoint and what is left."""
    try:
        yield
    except OSError as error:
        kept = "and those before it are as they were"
        if not path.parent.is_dir():
            raise CheckpointError(
                f"the checkpoint {path} could not be written, since its folder is gone, and with it those before; "
                "leave the folder alone while training goes on, or pass another as checkpoint="
            ) from error
        guard()  # another process that has taken the folder over removes what is half written
        if path.is_dir():
            why = f", since a folder has its name, {kept}; rename that folder, or pass another as checkpoint="
        elif isinstance(error, FileNotFoundError):
            why = f", since its unfinished file was removed meanwhile, {kept}; leave the folder alone during a training"
        else:
            why = f" ({error.strerror or error}), {kept}; make room on that disk, or pass another folder as checkpoint="
        raise CheckpointError(f"the checkpoint {path} could not be written{why}") from error


def check_that_it_can_be_kept(content: dict[str, Any]) -> None:
    """Raise `CheckpointError` for what could not be written or loaded again; writes no file."""
    buffer = io.BytesIO()
    _save(content, buffer)
    buffer.seek(0)
    _check_that_it_loads(buffer)


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    noting = _NotingFile(file)
    try:
        torch.save(packed(content), noting)  # type: ignore[arg-type]
    except RuntimeError:
        # torch reports any error of a file as one of its own, and on the way loses what was the matter.
        if noting.error is not None:
            raise noting.error from None
        raise
    except (pickle.PicklingError, AttributeError, TypeError, PackingError) as error:  # the first three are pickle's
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
        with files.open_regular(path, follows=True) as file:
            if not file_digest.check(file):
                raise _DamagedError("its checksum is missing: it is cut short, or of another program")
            file.seek(0)
            content = _loaded(file, path)
    except (file_digest.BrokenSealError, files.NotRegularError) as error:
        raise _DamagedError(str(error)) from error
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read ({error.strerror or error}); see to that, or pass another folder as "
            "checkpoint="
        ) from error
    if not isinstance(content, dict):
        raise not_ours(path)
    return content


def _loaded(file: BinaryIO, path: Path) -> Any:
    try:
        return unpacked(_load(file))
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    except PackingError as error:
        raise malformed(path, str(error)) from error
    except OSError:
        raise
    except Exception as error:  # the sums are right, but not the archive around them
        raise _DamagedError(first_line(error)) from error


def _refused(path: Path, error: pickle.UnpicklingError) -> CheckpointError:
    reason = _unsafe(error)
    return CheckpointError(
        f"the checkpoint {path} cannot be loaded by torch {torch.__version__}: {reason}; only plain values and tensors "
        "are loaded, since anything else can run code; use the versions that wrote it, or pass resume=False to start "
        "from scratch"
    )


def not_ours(path: Path) -> CheckpointError:
    """Return the error for a file of another program."""
    return CheckpointError(f"{path} is not a checkpoint of autoaccum; pass a folder of its own as checkpoint=")


def malformed(path: Path, reason: str) -> CheckpointError:
    """Return the error for a file that is whole and holds what no training has written."""
    return CheckpointError(
        f"the checkpoint {path} is not cut short, and yet malformed: {reason}; nothing was changed; restore it from a "
        "backup, delete it to go on from the one before, or pass resume=False to start from scratch"
    )


def _load(file: Path | BinaryIO, *, mmap: bool = False) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def _unsafe(error: pickle.UnpicklingError) -> str:
    """Return the part of torch's long message that names what cannot be loaded.

    The rest advises to load the file with code in it, in the first line already.
    """
    text = str(error)
    found = re.search(
        r"(Unsupported|Unsupported global:|Can only) [^\n]*?(?=( was not| is not|\.? ?Please|\n|$))", text
    ) or re.search(r"(?<=WeightsUnpickler error: )[^\n]+", text)
    if found is not None:
        return found.group().strip()
    first = first_line(error)
    return "it holds what is not a plain value" if "weights_only" in first or "Weights only" in first else first
