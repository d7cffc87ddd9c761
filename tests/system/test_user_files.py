import pytest

from autoaccum._system.user_files import beside, check_place
from autoaccum.errors import InvalidInputError


def test_the_file_takes_its_place_at_the_end(tmp_path):
    place = tmp_path / "report.html"
    place.write_text("before")

    with beside(place) as unfinished:
        unfinished.write_text("after")
        assert place.read_text() == "before"

    assert place.read_text() == "after"


def test_what_fails_on_the_way_changes_nothing(tmp_path):
    place = tmp_path / "report.html"
    place.write_text("before")

    def fail():
        with beside(place) as unfinished:
            unfinished.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert place.read_text() == "before"
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("path", [None, 3, b"report.html", "", "a\0b", ["report.html"]])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(InvalidInputError, match=r"^path="), beside(path):
        raise AssertionError


@pytest.mark.parametrize(("name", "why"), [("none/report.html", "no such folder"), (".", "it is a folder")])
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path, name, why):
    with pytest.raises(InvalidInputError, match=why):
        check_place(tmp_path / name)
