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


@pytest.fixture
def write_as(path, monkeypatch):
    """A function that writes a reason as a rank of three."""

    def written(rank, reason):
        for name, value in {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        reason_file.write(reason)

    return written


def test_what_is_written_is_read_with_a_message_that_is_cut(path):
    reason_file.write(Reason(OUT_OF_MEMORY, 8, message="x" * 10_000))

    assert reason_file.read(path) == Reason(OUT_OF_MEMORY, 8, message="x" * 2000)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_lack_of_memory_of_one_rank_counts_whatever_others_write_and_when(path, write_as, order):
    words = [Reason(RUNNING, 4), Reason(OUT_OF_MEMORY, 8), Reason(RUNNING, 4)]

    for rank in order:
        write_as(rank, words[rank])

    assert reason_file.read(path) == Reason(OUT_OF_MEMORY, 8, rank=1)


def test_of_several_ranks_that_lacked_memory_the_smallest_size_counts(path, write_as):
    for rank, size in enumerate((None, 6, 8)):
        write_as(rank, Reason(OUT_OF_MEMORY, size))

    assert reason_file.read(path) == Reason(OUT_OF_MEMORY, 6, rank=1)


def test_the_last_word_of_a_rank_counts(path, write_as):
    for reason in (Reason(OUT_OF_MEMORY, 8), Reason(RUNNING, 4)):
        write_as(1, reason)

    assert reason_file.read(path) == Reason(RUNNING, 4, rank=1)


def test_lack_of_memory_that_was_survived_is_taken_back_by_the_next_call(path):
    @reason_file.writes_reason
    def call(error=None):
        if error is not None:
            raise error

    with pytest.raises(MemoryError):
        call(MemoryError())
    left = reason_file.read(path)
    call()

    assert left == Reason(OUT_OF_MEMORY)
    assert reason_file.read(path) is None


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
