"""Writes files that are whole or not there: each is written beside its place under a free name, and then renamed.

A reader never meets half a file, a writer that is killed leaves what was there before, and no link in the place of
either file is written through.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from autoaccum._system import safe_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# The ending of a file that is being written: a killed writer leaves it behind.
UNFINISHED = ".unfinished"


@contextlib.contextmanager
def replacing(
    path: Path,
    *,
    ending: str = UNFINISHED,
    mode: int = 0o666,
    overwrites: bool = True,
    flushes_rename: bool = False,
    before_rename: Callable[[], None] | None = None,
) -> Iterator[Path]:
    """Yield an empty file beside `path`, which takes its place when the block ends; if the block raises, it is removed.

    Args:
        path: The file to replace.
        ending: Of the unfinished file's name; matplotlib, for one, chooses the format by it.
        mode: Permissions of the file, of which the umask takes some.
        overwrites: Whether an existing file is replaced.
        flushes_rename: Whether the rename is flushed to the disk, so that it survives a loss of power. The block
            flushes the file itself, through the descriptor that it writes to.
        before_rename: Runs just before the rename; what it raises keeps the file from taking its place.

    Raises:
        FileExistsError: There is such a file, and `overwrites` is False.
        OSError: The file cannot be written.
    """
    # A name that nobody can guess: nobody else writes to what is renamed.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{ending}")
    safe_files.create(unfinished, mode).close()
    try:
        yield unfinished
        if before_rename is not None:
            before_rename()
        if overwrites:
            unfinished.replace(path)
        else:
            os.link(unfinished, path)
        if flushes_rename:
            _flush_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write(path: Path, data: bytes, *, mode: int = 0o666, overwrites: bool = True) -> None:
    """Write a whole file; the arguments are those of `replacing`.

    Raises:
        FileExistsError: There is such a file, and `overwrites` is False.
        OSError: The file cannot be written.
    """
    with replacing(path, mode=mode, overwrites=overwrites) as unfinished:
        unfinished.write_bytes(data)


def _flush_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows flushes no folders
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
