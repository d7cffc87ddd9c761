"""Files in places that others may write to: no link is written through, no pipe is waited for, none is half there."""

import os
import shutil

import pytest

from autoaccum._system import files
from autoaccum._system.files import beside, check_place
from autoaccum._system.notices import Notices
from autoaccum._training.checkpoint_files import Storage  # writes the files
from autoaccum.errors import InvalidInputError


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text("mine")
    return path


def test_link_in_the_place_of_a_checkpoint_is_replaced_and_not_written_through(tmp_path, precious):
    storage = Storage(tmp_path / "run")
    (storage.folder / "step-00000001").symlink_to(precious)

    path = storage.write({"x": 1}, 1)

    assert not path.is_symlink()
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["", "manifest.json", "state.pt"])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_has_the_name_of_a_checkpoint_and_is_none_is_passed_over(tmp_path, kind, name):
    storage = Storage(tmp_path)
    storage.write({"x": 1}, 1)
    place = storage.write({"x": 2}, 2) / name
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    _ = place.mkdir() if kind == "folder" else place.write_bytes(b"\0" * 100)

    path, content = Storage(tmp_path).read_newest(Notices(silent=True))
    storage.write({"x": 3}, 3)

    assert (path.name, content) == ("step-00000001", {"x": 1})
    assert Storage(tmp_path).read_newest(Notices(silent=True))[1] == {"x": 3}


def test_report_is_written_beside_its_place_under_a_name_that_nobody_can_guess(tmp_path, precious):
    place = tmp_path / "report.html"
    guessed = tmp_path / f".report.{os.getpid()}.html"
    guessed.symlink_to(precious)

    with beside(place) as unfinished:
        assert unfinished.suffix == ".html"
        unfinished.write_text("text")

    assert place.read_text() == "text"
    assert precious.read_text() == "mine"


# --- files that are whole or not there --------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_file_takes_its_place_when_the_block_ends_and_not_before(tmp_path):
    place = tmp_path / "file.json"
    place.write_text("before")

    with files.replacing(place) as unfinished:
        unfinished.write_text("after")
        assert place.read_text() == "before"
        assert unfinished.parent == tmp_path
        assert unfinished.name.endswith(files.UNFINISHED)

    assert place.read_text() == "after"
    assert names(tmp_path) == ["file.json"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_block_that_raises_leaves_what_was_there_and_nothing_else(tmp_path, error):
    files.write(tmp_path / "file", b"before")

    def write_half():
        with files.replacing(tmp_path / "file") as unfinished:
            unfinished.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        write_half()

    assert (tmp_path / "file").read_bytes() == b"before"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("path", [None, b"report.html", "a\0b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(InvalidInputError, match=r"^path="), beside(path):
        raise AssertionError


@pytest.mark.parametrize(("name", "why"), [("none/report.html", "no such folder"), (".", "it is a folder")])
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path, name, why):
    with pytest.raises(InvalidInputError, match=why):
        check_place(tmp_path / name, "--html")
