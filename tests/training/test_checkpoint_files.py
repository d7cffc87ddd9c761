"""Checkpoints are folders that are whole or not there, and never taken for whole when they are not.

Here by `Storage` itself: a disk fails between two steps of its writing, or one checkpoint is damaged a hundred times.
"""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from autoaccum._system.notices import Notices  # an argument
from autoaccum._training import checkpoint_files as module
from autoaccum._training.checkpoint_files import Storage
from autoaccum.errors import CheckpointError


@pytest.fixture
def storage(tmp_path):
    return Storage(tmp_path / "run")


def content_of(step):
    return {"step": step, "weights": torch.arange(100.0) + step, "text": "plain"}


def names(storage):
    return sorted(path.name for path in storage.folder.iterdir())


def is_content(found, step):
    return found.keys() == content_of(step).keys() and torch.equal(found["weights"], content_of(step)["weights"])


def read(storage):
    return Storage(storage.folder).read_newest(Notices(silent=True))


def test_same_step_again_takes_the_place_of_the_first_if_it_can(storage, monkeypatch):
    for step, value in ((1, 1), (2, 2), (2, 3)):
        storage.write(content_of(value), step)
    rename = Path.rename

    def fails(path, target):
        if path.name.endswith(".unfinished"):
            raise OSError(errno.EIO, "gone")
        return rename(path, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", fails)
        with pytest.raises(CheckpointError, match="gone"):
            storage.write(content_of(4), 2)

    assert names(storage) == ["step-00000001", "step-00000002"]
    assert is_content(read(storage)[1], 3)


def test_what_a_kill_between_two_renames_left_is_put_right(storage):
    path = storage.write(content_of(1), 1)
    path.rename(storage.folder / ".step-00000001.0123.aside")
    (storage.folder / ".step-00000001.4567.unfinished").mkdir()
    shutil.copytree(storage.write(content_of(2), 2), storage.folder / ".step-00000002.0123.aside")

    storage.tidy()

    assert names(storage) == ["step-00000001", "step-00000002"]
    assert is_content(read(storage)[1], 2)


def test_new_run_moves_those_of_earlier_runs_aside_when_its_first_is_whole(storage, monkeypatch):
    for step in (8, 9):
        storage.write(content_of(step), step)
    new = Storage(storage.folder, replaces=True)
    with monkeypatch.context() as broken:
        broken.setattr("autoaccum._training.checkpoint_files.os.fsync", fails_with(errno.ENOSPC))
        with pytest.raises(CheckpointError):
            new.write(content_of(1), 1)
    before = names(storage)

    for step in (1, 2, 3):
        new.write(content_of(step), step)
    Storage(storage.folder, replaces=True).write(content_of(1), 1)

    assert before == ["step-00000008", "step-00000009"]
    assert names(storage) == ["earlier-1", "earlier-2", "step-00000001"]
    assert is_content(Storage(storage.folder / "earlier-1").read_newest(Notices(silent=True))[1], 9)


def test_other_files_in_the_folder_are_left_alone(storage):
    (storage.folder / "notes.txt").write_text("mine")
    (storage.folder / "step-1").write_text("mine too")

    for step in (1, 2, 3):
        storage.write(content_of(step), step)
    storage.tidy()

    assert names(storage) == ["notes.txt", "step-00000002", "step-00000003", "step-1"]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state.pt", "manifest.json"])
def test_cut_or_flipped_anywhere_is_never_taken_for_whole(storage, name):
    path = storage.write(content_of(1), 1) / name
    whole = path.read_bytes()
    drawn = random.Random(1)  # noqa: S311

    for _ in range(100):
        if drawn.random() < 0.5:
            path.write_bytes(whole[: drawn.randrange(len(whole))])
        else:
            flipped = bytearray(whole)
            flipped[drawn.randrange(len(whole))] ^= 1 << drawn.randrange(8)
            path.write_bytes(flipped)
        try:
            found = read(storage)[1]
        except CheckpointError:
            continue
        assert is_content(found, 1)  # a flipped bit in the manifest may say nothing of the files


# --- errors while writing ---------------------------------------------------------------------------------------------


def fails_with(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    "call",
    [
        "_training.checkpoint_files.os.fsync",
        "_training.checkpoint_files._HashingFile.flush",
        "_system.files.flush_folder",
        "file",
    ],
)
def test_failing_disk_is_told_by_its_own_words_and_the_one_before_stays(storage, monkeypatch, call):
    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(step, said):
        with monkeypatch.context() as broken:
            if call == "file":  # in the middle of torch's own writing
                broken.setattr(module._HashingFile, "__init__", lambda self, _: init(self, Full()))
            else:
                broken.setattr(f"autoaccum.{call}", fails_with(errno.ENOSPC))
            with pytest.raises(CheckpointError, match=said):
                storage.write(content_of(step), step)

    init = module._HashingFile.__init__
    write(1, r"step-00000001 could not be written \(No space left on device\); make room")  # there is none before
    storage.write(content_of(1), 1)
    write(2, r"step-00000002 could not be written \(No space left on device\); those before it are still in")

    assert names(storage) == ["step-00000001"]


def test_old_one_that_cannot_be_removed_is_no_error(storage, monkeypatch):
    rename = Path.rename

    def fails(path, target):
        if path.name.startswith("step-"):
            raise OSError(errno.ENOENT, "gone")
        return rename(path, target)

    for step in (1, 2):
        storage.write(content_of(step), step)
    monkeypatch.setattr(Path, "rename", fails)
    storage.write(content_of(3), 3)

    assert is_content(read(storage)[1], 3)


def test_file_system_that_cannot_flush_a_folder_is_no_error(storage, monkeypatch):
    fsync = os.fsync

    def of_files_alone(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.EINVAL, "not here")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_alone)

    storage.write(content_of(1), 1)

    assert is_content(read(storage)[1], 1)


def test_interrupt_while_writing_leaves_nothing_half_done(storage, monkeypatch):
    storage.write(content_of(1), 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("autoaccum._training.checkpoint_files._check_that_it_loads", interrupted)

    with pytest.raises(KeyboardInterrupt):
        storage.write(content_of(2), 2)

    assert names(storage) == ["step-00000001"]


def test_manifest_that_cannot_be_read_for_now_is_no_damage(tmp_path, monkeypatch):
    storage = Storage(tmp_path)
    for step in (1, 2):
        storage.write({"x": step}, step)

    def stale(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(module.files, "read", stale)
        with pytest.raises(CheckpointError, match="cannot be read"):
            Storage(tmp_path).read_newest(Notices(silent=True))

    assert Storage(tmp_path).read_newest(Notices(silent=True))[1] == {"x": 2}
