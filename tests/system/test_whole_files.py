"""Files that are whole or not there, whatever happens while they are written."""

import os
import stat

import pytest

from autoaccum._system import whole_files
from autoaccum._system.whole_files import UNFINISHED, replacing, write


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_file_takes_its_place_when_the_block_ends_and_not_before(tmp_path):
    place = tmp_path / "file.json"
    place.write_text("before")

    with replacing(place) as unfinished:
        unfinished.write_text("after")
        assert place.read_text() == "before"
        assert unfinished.parent == tmp_path
        assert unfinished.name.endswith(UNFINISHED)

    assert place.read_text() == "after"
    assert names(tmp_path) == ["file.json"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_block_that_raises_leaves_what_was_there_and_nothing_else(tmp_path, error):
    write(tmp_path / "file", b"before")

    def write_half():
        with replacing(tmp_path / "file") as unfinished:
            unfinished.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        write_half()

    assert (tmp_path / "file").read_bytes() == b"before"
    assert names(tmp_path) == ["file"]


def test_refusal_before_the_rename_leaves_what_was_there(tmp_path):
    write(tmp_path / "file", b"before")

    def refuse():
        raise PermissionError

    with pytest.raises(PermissionError), replacing(tmp_path / "file", before_rename=refuse) as unfinished:
        unfinished.write_bytes(b"after")

    assert (tmp_path / "file").read_bytes() == b"before"
    assert names(tmp_path) == ["file"]


def test_existing_file_stays_where_it_must_not_be_overwritten(tmp_path):
    write(tmp_path / "file", b"first", overwrites=False)

    with pytest.raises(FileExistsError):
        write(tmp_path / "file", b"second", overwrites=False)

    assert (tmp_path / "file").read_bytes() == b"first"
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_permissions_are_those_asked_for_within_the_umask(tmp_path, mode):
    before = os.umask(0o022)
    try:
        write(tmp_path / "file", b"", mode=mode)
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode & ~0o022


def test_link_in_the_place_of_the_file_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "file").symlink_to(tmp_path / "precious")

    write(tmp_path / "file", b"new")

    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "precious").read_text() == "mine"


def test_link_that_has_the_unfinished_files_name_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("autoaccum._system.whole_files.secrets.token_hex", lambda _: "guessed")
    (tmp_path / f"file.guessed{UNFINISHED}").symlink_to(tmp_path / "nothing")

    with pytest.raises(FileExistsError):
        write(tmp_path / "file", b"new")

    assert names(tmp_path) == [f"file.guessed{UNFINISHED}"]


def test_rename_is_flushed_after_it_was_made_where_that_is_asked_for(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(whole_files, "_flush_folder", lambda folder: flushed.append((folder, names(folder))))

    with replacing(tmp_path / "file", flushes_rename=True):
        pass
    with replacing(tmp_path / "other"):
        pass

    assert [folder for folder, _ in flushed] == [tmp_path]
    assert "file" in flushed[0][1]
