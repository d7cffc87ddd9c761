"""The file by which a process tells its wrapper why it ended."""

import json

import pytest

from autoaccum._system import reason_file
from autoaccum._system.launched import REASON_FILE
from autoaccum._system.reason_file import OUT_OF_MEMORY, Reason


@pytest.fixture
def path(monkeypatch, tmp_path):
    path = tmp_path / "reason.json"
    monkeypatch.setenv(REASON_FILE, str(path))
    return path


def test_what_is_left_is_found(path):
    reason = Reason(OUT_OF_MEMORY, 8, 1, "no room")

    assert reason_file.write(reason)

    assert reason_file.read(path) == reason
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_without_a_wrapper_nothing_is_left(monkeypatch):
    monkeypatch.delenv(REASON_FILE, raising=False)

    assert not reason_file.write(Reason(OUT_OF_MEMORY))


def test_a_folder_that_is_gone_costs_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(REASON_FILE, str(tmp_path / "gone" / "reason.json"))

    assert not reason_file.write(Reason(OUT_OF_MEMORY))


def test_lack_of_memory_takes_the_place_of_what_came_of_it_and_never_the_other_way(path):
    reason_file.write(Reason("peer_failed", rank=0))
    reason_file.write(Reason("peer_failed", rank=2))
    first = reason_file.read(path)
    reason_file.write(Reason(OUT_OF_MEMORY, 8, 1))
    reason_file.write(Reason("peer_failed", rank=3))

    assert first == Reason("peer_failed", rank=0)
    assert reason_file.read(path) == Reason(OUT_OF_MEMORY, 8, 1)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"reason": 3}', b"\xff\xfe", b"[" * 60_000])
def test_what_nobody_could_have_left_is_nothing(tmp_path, content):
    (tmp_path / "reason.json").write_bytes(content)

    assert reason_file.read(tmp_path / "reason.json") is None


@pytest.mark.parametrize(("micro_batch", "found"), [(0, None), (-3, None), (True, None), ("8", None), (8, 8)])
def test_a_size_that_cannot_be_is_not_known(tmp_path, micro_batch, found):
    (tmp_path / "reason.json").write_text(json.dumps({"reason": OUT_OF_MEMORY, "micro_batch": micro_batch}))

    assert reason_file.read(tmp_path / "reason.json").micro_batch == found


def test_no_file_is_no_reason(tmp_path):
    assert reason_file.read(tmp_path / "reason.json") is None
