"""Checkpoint files: whole or not there, and never taken for whole when they are not."""

import errno
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from autoaccum._system.notices import Notices
from autoaccum._training.checkpoint_files import Storage, check_that_it_can_be_kept
from autoaccum.errors import CheckpointError, InvalidInputError


@pytest.fixture
def storage(tmp_path):
    return Storage(tmp_path / "run")


@pytest.fixture
def notices():
    return Notices(silent=True)


def content_of(step):
    return {"step": step, "weights": torch.arange(100.0) + step, "text": "plain"}


def names(storage):
    return sorted(path.name for path in storage.folder.iterdir())


def is_content(found, step):
    return found.keys() == content_of(step).keys() and torch.equal(found["weights"], content_of(step)["weights"])


def read(path):
    found = Storage(path.parent).read_newest(Notices(silent=True))
    assert found is not None
    return found


def test_what_was_written_is_read(storage, notices):
    path = storage.write(content_of(7), 7)

    assert path.name == "step-00000007.pt"
    assert storage.read_newest(notices)[0] == path
    assert is_content(storage.read_newest(notices)[1], 7)


def test_plain_torch_can_load_a_file_without_running_code(storage):
    path = storage.write(content_of(7), 7)

    assert is_content(torch.load(path, weights_only=True), 7)


def test_newest_two_are_kept(storage):
    for step in (1, 2, 3, 4):
        storage.write(content_of(step), step)

    assert names(storage) == ["step-00000003.pt", "step-00000004.pt"]


def test_same_step_again_takes_the_place_of_the_first_alone(storage, notices):
    for step in (1, 2, 2):
        storage.write(content_of(step), step)

    assert names(storage) == ["step-00000001.pt", "step-00000002.pt"]


def test_file_written_last_is_the_newest_even_with_a_smaller_step_and_a_clock_gone_back(storage, notices, monkeypatch):
    storage.write(content_of(9), 9)
    monkeypatch.setattr("autoaccum._training.checkpoint_files.time.time_ns", lambda: 5)

    path = storage.write(content_of(3), 3)

    assert storage.read_newest(notices)[0] == path


def test_new_run_replaces_the_files_of_an_old_one_only_when_its_first_is_whole(storage, tmp_path, monkeypatch):
    for step in (8, 9):
        storage.write(content_of(step), step)
    new = Storage(storage.folder)
    with monkeypatch.context() as broken:
        broken.setattr("autoaccum._training.checkpoint_files.os.fsync", fails_with(errno.ENOSPC))
        with pytest.raises(CheckpointError):
            new.write(content_of(1), 1)
    before = names(storage)

    new.write(content_of(1), 1)

    assert before == ["step-00000008.pt", "step-00000009.pt"]
    assert names(storage) == ["step-00000001.pt"]


def test_other_files_in_the_folder_are_left_alone(storage):
    (storage.folder / "notes.txt").write_text("mine")
    (storage.folder / "step-1.pt").write_text("mine too")

    for step in (1, 2, 3):
        storage.write(content_of(step), step)
    storage.tidy()

    assert names(storage) == ["notes.txt", "step-00000002.pt", "step-00000003.pt", "step-1.pt"]


def test_what_a_killed_writer_left_is_removed(storage):
    (storage.folder / "step-00000005.pt.unfinished").write_bytes(b"half")

    storage.tidy()

    assert names(storage) == []


def test_file_that_somebody_removes_while_it_is_written_is_not_told_as_a_full_disk(storage):
    storage.write(content_of(1), 1)
    storage.guard = lambda: [path.unlink() for path in storage.folder.glob("*.unfinished")]

    with pytest.raises(CheckpointError, match="its unfinished file was removed meanwhile"):
        storage.write(content_of(2), 2)

    assert names(storage) == ["step-00000001.pt"]


def test_folder_named_as_an_unfinished_file_is_left_alone_and_in_nobodys_way(storage):
    (storage.folder / "step-00000005.pt.unfinished").mkdir()

    storage.tidy()
    storage.write(content_of(5), 5)

    assert names(storage) == ["step-00000005.pt", "step-00000005.pt.unfinished"]


def test_folder_in_the_place_of_a_checkpoint_is_told_as_one(storage):
    (storage.folder / "step-00000005.pt").mkdir()

    with pytest.raises(CheckpointError, match="since a folder has its name"):
        storage.write(content_of(5), 5)


def test_link_to_nothing_is_an_error_that_names_it(storage, notices):
    written = storage.write(content_of(1), 1).stat().st_mtime_ns
    link = storage.folder / "step-00000009.pt"
    link.symlink_to("/nowhere")
    # The file system's own clock may be some milliseconds behind, and the link would be the older one.
    os.utime(link, ns=(written + 1_000_000, written + 1_000_000), follow_symlinks=False)

    with pytest.raises(CheckpointError, match=r"step-00000009.pt cannot be read \(No such file"):
        storage.read_newest(notices)


def test_link_to_nothing_does_not_keep_the_next_from_being_written(storage):
    (storage.folder / "step-00000009.pt").symlink_to("/nowhere")

    storage.write(content_of(1), 1)

    assert names(storage) == ["step-00000001.pt"]


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged(path, data):
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_file_cut_short_anywhere_is_never_taken(storage):
    path = storage.write(content_of(1), 1)
    whole = path.read_bytes()

    for length in {*range(0, len(whole), 53), *range(len(whole) - 30, len(whole))}:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is whole"):
            read(path)


def test_flipped_bit_anywhere_is_noticed_unless_it_changes_nothing(storage):
    path = storage.write(content_of(1), 1)
    whole = path.read_bytes()
    noticed = 0

    for place in range(0, len(whole), 11):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            found = read(path)[1]
        except CheckpointError:
            noticed += 1
        else:
            assert is_content(found, 1), f"byte {place}"

    assert noticed > len(whole) // 11 // 3


def test_values_that_torch_would_load_wrongly_are_noticed(storage):
    path = storage.write(content_of(1), 1)
    weights = content_of(1)["weights"].numpy().tobytes()
    damaged(path, path.read_bytes().replace(weights, weights[::-1]))
    assert not is_content(torch.load(path, weights_only=True), 1)

    with pytest.raises(CheckpointError, match="wrong checksum"):
        read(path)


def test_one_before_is_taken_where_the_newest_is_damaged_and_it_is_said(storage):
    storage.write(content_of(1), 1)
    newest = storage.write(content_of(2), 2)
    damaged(newest, newest.read_bytes()[:-40])
    notices = Notices(silent=True)

    path, content = Storage(storage.folder).read_newest(notices)

    assert path.name == "step-00000001.pt"
    assert is_content(content, 1)
    assert len(notices.texts) == 1
    assert "step-00000002.pt is cut short or damaged" in notices.texts[0]


def test_damaged_file_does_not_count_as_one_of_the_two_that_are_kept(storage, notices):
    storage.write(content_of(1), 1)
    newest = storage.write(content_of(2), 2)
    damaged(newest, b"")
    again = Storage(storage.folder)
    again.read_newest(notices)

    again.write(content_of(3), 3)

    assert names(storage) == ["step-00000001.pt", "step-00000003.pt"]


def test_none_whole_is_an_error_that_names_them_and_what_to_do(storage, notices):
    for step in (1, 2):
        damaged(storage.write(content_of(step), step), b"not an archive")

    with pytest.raises(CheckpointError, match=r"none of the 2 .*step-00000002.pt: .*step-00000001.pt: .*resume=False"):
        Storage(storage.folder).read_newest(notices)


def test_no_file_at_all_is_no_error(storage, notices):
    assert storage.read_newest(notices) is None


# --- errors while writing ---------------------------------------------------------------------------------------------


def fails_with(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    "call",
    [
        "_training.checkpoint_files.os.fsync",
        "_training.checkpoint_files.os.utime",
        "_training.checkpoint_files._NotingFile.flush",
        "_system.files._flush_folder",
    ],
)
def test_failing_disk_is_told_and_the_one_before_stays(storage, notices, monkeypatch, call):
    storage.write(content_of(1), 1)
    with monkeypatch.context() as broken:
        broken.setattr(f"autoaccum.{call}", fails_with(errno.ENOSPC))
        with pytest.raises(CheckpointError, match=r"step-00000002.pt could not be written \(No space left on device\)"):
            storage.write(content_of(2), 2)

    assert "step-00000001.pt" in names(storage)
    assert not [name for name in names(storage) if "unfinished" in name]


def test_full_disk_in_the_middle_of_the_file_is_told_by_its_own_words(storage, monkeypatch):
    from autoaccum._training import checkpoint_files as module  # noqa: PLC0415

    written = []

    class Full(module._NotingFile):
        def write(self, data):
            written.append(len(data))
            if len(written) > 3:
                self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise self.error
            return super().write(data)

    monkeypatch.setattr(module, "_NotingFile", Full)

    with pytest.raises(CheckpointError, match="No space left on device"):
        storage.write(content_of(1), 1)

    assert names(storage) == []


def test_folder_that_is_gone_is_told_and_nothing_is_said_to_be_there_still(storage):
    storage.write(content_of(1), 1)
    shutil.rmtree(storage.folder)

    with pytest.raises(CheckpointError, match="its folder is gone, and with it those before"):
        storage.write(content_of(2), 2)


def test_interrupt_while_writing_leaves_nothing_half_done(storage, monkeypatch):
    storage.write(content_of(1), 1)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("autoaccum._training.checkpoint_files._check_that_it_loads", interrupted)

    with pytest.raises(KeyboardInterrupt):
        storage.write(content_of(2), 2)

    assert names(storage) == ["step-00000001.pt"]


class Own:
    """Something of a user's that only running code could rebuild."""


@pytest.mark.parametrize("value", [Own(), lambda: 0, Path("x"), torch.nn.Linear(1, 1)], ids=lambda v: type(v).__name__)
def test_what_could_not_be_loaded_safely_is_refused_before_it_replaces_anything(storage, value):
    storage.write(content_of(1), 1)

    with pytest.raises(CheckpointError, match="cannot be kept in a checkpoint"):
        storage.write({"scheduler": value}, 2)
    with pytest.raises(CheckpointError, match="cannot be kept in a checkpoint"):
        check_that_it_can_be_kept({"scheduler": value})

    assert names(storage) == ["step-00000001.pt"]


@pytest.mark.parametrize(
    "value",
    [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.arange(3, dtype=np.uint32), 1 << 100, {1, 2}],
    ids=repr,
)
def test_numbers_of_numpy_and_python_come_back_as_they_were(storage, notices, value):
    storage.write({"value": value}, 1)

    found = storage.read_newest(notices)[1]["value"]

    assert type(found) is type(value)
    assert pickle.dumps(found) == pickle.dumps(value)


@pytest.mark.parametrize("made", ["file", "file/below"])
def test_folder_that_cannot_be_one_is_refused_with_its_name(tmp_path, made):
    (tmp_path / "file").write_text("a file")

    with pytest.raises(InvalidInputError, match=r"checkpoint='.*file.*' cannot be a folder"):
        Storage(tmp_path / made)


def test_folder_is_made_with_those_above_it(tmp_path):
    Storage(tmp_path / "a" / "b").write(content_of(1), 1)

    assert (tmp_path / "a" / "b" / "step-00000001.pt").is_file()
