"""What a process leaves for `autoaccum run` to read; tests/launch/test_run.py has who writes it, and when."""

import pytest

from autoaccum._system import reason_file
from autoaccum._system.launched import REASON_FILE
from autoaccum._system.reason_file import OUT_OF_MEMORY, RUNNING, Reason
from autoaccum.errors import StateDamagedError


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / "reason.json"
    monkeypatch.setenv(REASON_FILE, str(path))
    return path


def test_what_is_written_is_read_with_a_message_that_is_cut(path):
    reason_file.write(Reason(OUT_OF_MEMORY, 8, 1, "x" * 10_000))

    assert reason_file.read(path) == Reason(OUT_OF_MEMORY, 8, 1, "x" * 2000)


def test_lack_of_memory_takes_the_place_of_all_else_and_stays(path):
    for reason in (Reason(RUNNING, 4), Reason(RUNNING, 8), Reason(OUT_OF_MEMORY, 8, 1), Reason(RUNNING, 4)):
        reason_file.write(reason)

    assert reason_file.read(path) == Reason(OUT_OF_MEMORY, 8, 1)


def test_without_a_wrapper_or_a_place_nothing_is_written(tmp_path, monkeypatch):
    for value in ("", str(tmp_path / "none" / "reason.json")):
        monkeypatch.setenv(REASON_FILE, value)
        reason_file.write(Reason(OUT_OF_MEMORY))

    assert list(tmp_path.iterdir()) == []


def test_optimizer_that_was_half_way_when_memory_ran_out_lacked_memory(path):
    @reason_file.writes_reason
    def fails():
        raise StateDamagedError("part old, part new") from MemoryError()

    with pytest.raises(StateDamagedError):
        fails()

    assert reason_file.read(path) == Reason(OUT_OF_MEMORY, message="part old, part new")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"reason": 3}', '{"message": "x"}', "[" * 100_000])
def test_what_is_no_reason_is_none(path, text):
    path.write_text(text)

    assert reason_file.read(path) is None
