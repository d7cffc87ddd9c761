"""What a search found is kept from start to start, whole or not at all, and never an exception."""

import errno
import json
import os
import stat

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._sizing import cache as cache_module
from autoaccum._sizing.cache import Key, PlanCache, Remembered
from autoaccum._system.notices import Notices  # an argument

POINTS = {"fits": [[48, 10, 1]], "bytes": [[12345, 48, 10, 1]]}
FOUND = Remembered(48, POINTS, fastest=32, memory=("checkpoint",))


def named(name, target_batch=64):
    return Key(cache_module.digest_of(name), target_batch, {"model": name, "limit_bytes": None})


KEY = named("a job")


@pytest.fixture
def notices():
    return Notices(silent=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def cache(folder, notices):
    return PlanCache(notices)


def files(folder):
    return sorted(folder.iterdir())


# --- through the public API -------------------------------------------------------------------------------------------


def trained(**options):
    """The micro-batches of a short training, and what it said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    sizes = []

    class Noting(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            sizes.append(report.micro_batches)

    device = autoaccum.Simulated("200KiB")
    loader = [(torch.randn(64, 64), torch.randn(64, 64)) for _ in range(3)]
    loss = nn.MSELoss()
    autoaccum.fit(model, loader, 64, loss=loss, device=device, callbacks=[Noting()], **{"progress": False, **options})
    return sizes


@pytest.mark.parametrize(("width", "begins_with"), [(20, 64), (60, 8), (10, 64)])
def test_next_start_with_texts_of_another_width_begins_with_what_is_known_of_theirs(folder, width, begins_with):
    """Texts take 1 KiB a token. Of wider ones, memory may grow with the square: a search would begin with 2."""

    class Texts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, tokens):
            torch.empty(tokens.numel(), 1024, dtype=torch.uint8)
            return self.weight * tokens.float().mean(1)

    def sizes(width):
        loader = [(torch.ones(64, width, dtype=torch.long), torch.zeros(64))] * 3
        device = autoaccum.Simulated("1500KiB")
        result = autoaccum.fit(Texts(), loader, 64, loss=nn.MSELoss(), device=device, progress=False)
        assert result.oom_events == 0
        return [report.micro_batches for report in result.history]

    sizes(20)

    assert sizes(width)[0][0] == begins_with
    assert len(files(folder)) == 1


@pytest.mark.parametrize("memory", [None, "auto"])
@pytest.mark.parametrize(
    "found",
    [
        {"micro_batch": True},
        {"micro_batch": 10**9},
        {"frontier": 3},
        {"frontier": {"fits": [["a"], [0, 1], [2.0]], "fails": {}, "bytes": [[10**30, 1, 1], [5]]}},
        {"frontier": {"fits": [[10**9, 10**9, 10**9]], "fails": [[1, 1, 1]], "bytes": [[1, 1, 1, 1]]}},
        {"fastest": 4.0},
        {"memory": "checkpoint"},
        {"memory": ["nonsense", "checkpoint"]},
        {"unheard_of": 1},
    ],
    ids=str,
)
def test_value_that_no_search_finds_is_ignored_by_the_next_start(folder, memory, found):
    trained(save_memory=memory)
    (path,) = files(folder)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "found": content["found"] | found}))

    assert len(trained(save_memory=memory)) == 3


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\0" * 500, b"\xff\xfe", b"[]", b"3", b"null", b"{}", b'{"found": null}', b"[" * 50_000),
        *(b"x" * (1 << 20), b'{"found": {"micro_batch": ' + b"9" * 10_000),
    ],
    ids=lambda data: repr(data[:30]),
)
def test_foreign_file_is_ignored_in_words_and_replaced(folder, data, capfd):
    first = trained()
    (path,) = files(folder)
    path.write_bytes(data)

    capfd.readouterr()
    assert trained(progress="lines") == first
    assert "holds what cannot be used for this job" in capfd.readouterr().err
    assert trained()[0] == first[-1]


def test_empty_folder_name_turns_the_cache_off(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert trained() == trained()
    assert files(tmp_path) == []


# --- one result -------------------------------------------------------------------------------------------------------


def test_what_is_forgotten_is_gone_and_forgetting_twice_is_nothing(cache):
    cache.keep(KEY, FOUND)
    cache.keep(named("another job"), FOUND)

    cache.forget(KEY)
    cache.forget(KEY)

    assert cache.find(KEY) is None
    assert cache.find(named("another job")) == FOUND


def test_folder_is_the_users_cache_unless_something_else_is_said(tmp_path, notices, monkeypatch):
    monkeypatch.delenv("AUTOACCUM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    PlanCache(notices).keep(KEY, FOUND)

    assert len(files(tmp_path / "autoaccum")) == 1


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_folder_and_files_are_for_their_user_alone_whatever_the_umask(cache, folder):
    before = os.umask(0)
    try:
        cache.keep(KEY, FOUND)
    finally:
        os.umask(before)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(files(folder)[0].stat().st_mode) == 0o600


# --- folders that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["{}/file", "{}/file/below", "x" * 5000, "~nobody-of-this-name", "/proc/autoaccum"])
def test_folder_that_cannot_be_one_costs_one_notice(tmp_path, notices, monkeypatch, place):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", place.format(tmp_path))
    cache = PlanCache(notices)

    cache.find(KEY)
    cache.keep(KEY, FOUND)
    cache.keep(KEY, FOUND)
    cache.forget(KEY)

    assert len(notices.texts) == 1
    assert "set AUTOACCUM_CACHE_DIR to a writable folder" in notices.texts[0]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("call", ["os.open", "pathlib.Path.write_bytes", "pathlib.Path.replace", "pathlib.Path.mkdir"])
def test_failing_disk_costs_one_notice_and_leaves_what_was_there(cache, folder, notices, monkeypatch, call):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache.keep(KEY, Remembered(7))
    with monkeypatch.context() as broken:
        broken.setattr(call, fails)
        cache.keep(KEY, FOUND)
        cache.keep(KEY, FOUND)

    assert len(notices.texts) == 1
    assert os.strerror(errno.ENOSPC) in notices.texts[0]
    assert len(files(folder)) == 1
    assert cache.find(KEY) == Remembered(7)
