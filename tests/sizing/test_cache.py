"""What a search found is kept from start to start: for the same job only, whole or not at all, never an exception."""

import dataclasses
import errno
import json
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

import warm
from autoaccum._sizing import cache as cache_module
from autoaccum._sizing.cache import Key, PlanCache, Remembered, key_of_command
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError

FOUND = Remembered(48, fixed_bytes=1 << 30, bytes_per_sample=12345, fastest=32)


def named(name, target_batch=64):
    return Key(cache_module.digest_of(name), target_batch, {"model": name, "limit_bytes": None})


KEY = named("a job")


@pytest.fixture
def notices():
    return Notices(silent=True)


@pytest.fixture
def cache(tmp_path, notices):
    return PlanCache(notices, tmp_path / "plans")


def files(cache):
    return sorted(cache._folder.iterdir())


def rewritten(path, **changes):
    """The file with some fields changed and a checksum that is right all the same."""
    content = json.loads(path.read_text()) | changes
    del content["checksum"]
    path.write_text(json.dumps(content | {"checksum": cache_module.digest_of(content)}))


def fails_with(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


# --- keeping and finding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [FOUND, Remembered(1), Remembered(2, 0, 0)], ids=["all known", "one", "zeros"])
def test_what_was_kept_is_found_by_the_next_start(cache, notices, found):
    cache.keep(KEY, found)

    assert PlanCache(notices, cache._folder).find(named("a job")) == found
    assert notices.texts == ()


def test_nothing_is_found_and_nothing_said_where_nothing_was_kept(cache, notices):
    assert cache.find(KEY) is None
    cache.keep(KEY, FOUND)
    assert cache.find(named("another job")) is None

    assert notices.texts == ()


def test_what_is_kept_later_takes_the_place_of_what_was_there(cache):
    cache.keep(KEY, FOUND)
    cache.keep(KEY, Remembered(7))

    assert cache.find(KEY) == Remembered(7)
    assert len(files(cache)) == 1


def test_what_is_forgotten_is_gone_and_forgetting_twice_is_nothing(cache, notices):
    cache.keep(KEY, FOUND)
    cache.keep(named("another job"), FOUND)

    cache.forget(KEY)
    cache.forget(KEY)

    assert cache.find(KEY) is None
    assert cache.find(named("another job")) == FOUND
    assert notices.texts == ()


def test_person_can_read_what_a_file_is_about(cache):
    cache.keep(KEY, FOUND)

    content = json.loads(files(cache)[0].read_text())

    assert content["about"] == {"model": "a job", "limit_bytes": None}
    assert content["found"]["micro_batch"] == 48


@pytest.mark.parametrize(
    "wrong",
    [
        {"micro_batch": 0},
        {"micro_batch": True},
        {"micro_batch": 4.0},
        {"fastest": 0},
        {"fastest": 49},
        {"fixed_bytes": -1},
        {"fixed_bytes": 1.5},
        {"bytes_per_sample": 1 << 63},
        {"memory": [1]},
        {"tried": 5},
        {"tried": "\x1b[2J"},
    ],
    ids=str,
)
def test_what_no_search_can_find_is_refused(wrong):
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        dataclasses.replace(FOUND, **wrong)


# --- where ------------------------------------------------------------------------------------------------------------


def test_environment_names_the_folder(tmp_path, notices, monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path / "elsewhere"))

    PlanCache(notices).keep(KEY, FOUND)

    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_folder_is_the_users_cache_unless_something_else_is_said(tmp_path, notices, monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)

    PlanCache(notices).keep(KEY, FOUND)

    assert len(list((tmp_path / "autoaccum").iterdir())) == 1


def test_user_without_a_home_trains_without_a_cache_and_gets_no_folder_named_tilde(tmp_path, notices, monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "AUTOACCUM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: Path("~/.cache") / name)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["no such user"])
    monkeypatch.chdir(tmp_path)
    cache = PlanCache(notices)

    cache.keep(KEY, FOUND)

    assert cache.find(KEY) is None
    assert len(notices.texts) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_folder_and_files_are_for_their_user_alone_whatever_the_umask(cache):
    before = os.umask(0)
    try:
        cache.keep(KEY, FOUND)
    finally:
        os.umask(before)

    assert stat.S_IMODE(cache._folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(files(cache)[0].stat().st_mode) == 0o600


def test_command_has_the_key_that_earlier_versions_gave_it():
    key = key_of_command({"arguments": ["python", "train.py"], "world_size": 2, "target_batch": None}, 64, {})

    assert key.digest == "fd2d21227fa4945e25ec4221a789249d93b4c6439cfa8cad953b7a305c533c94"


# --- files that are of no use -----------------------------------------------------------------------------------------


def check_useless_then_replaced(cache, notices, match):
    assert cache.find(KEY) is None
    assert cache.find(KEY) is None
    assert len(notices.texts) == 1
    assert match in notices.texts[0]

    cache.keep(KEY, FOUND)
    assert cache.find(KEY) == FOUND
    assert len(notices.texts) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 500,
        b"\xff\xfe",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b'{"checksum": null}',
        b'{"checksum": 1, "format": 1, "found": null}',
        b"[" * 50_000,
        b'{"format": ' + b"9" * 10_000,
        b"x" * (1 << 20),
    ],
    ids=lambda data: repr(data[:30]),
)
def test_foreign_file_is_ignored_with_one_notice_and_replaced(cache, notices, data):
    cache.keep(KEY, Remembered(7))
    files(cache)[0].write_bytes(data)

    check_useless_then_replaced(cache, notices, "is damaged")


def test_file_cut_short_anywhere_or_with_a_flipped_bit_is_never_taken(cache, notices):
    cache.keep(KEY, FOUND)
    [path] = files(cache)
    whole = path.read_bytes()

    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        assert cache.find(KEY) is None, f"{length} bytes"
    for place in range(len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cache.find(KEY) in (None, FOUND), f"byte {place}"  # space for "!" between fields does not load either

    assert len(notices.texts) == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": 2}, "another version of autoaccum (format 2)"),
        ({"format": True}, "another version"),
        ({"format": None}, "another version"),
        ({"key": "0" * 64}, "belongs to another job"),
        ({"key": None}, "belongs to another job"),
        ({"found": [48]}, "is damaged"),
        ({"found": {}}, "is damaged"),
        ({"found": dataclasses.asdict(FOUND) | {"more": 1}}, "is damaged"),
        ({"found": {"micro_batch": "48"}}, "micro_batch must be a whole number"),
        ({"found": {"micro_batch": -48}}, "micro_batch must be at least 1"),
        ({"found": {"micro_batch": 65}}, "is damaged"),
        ({"found": {"micro_batch": 48, "fastest": 49}}, "fastest=49 is more"),
        ({"found": {"micro_batch": 48, "fixed_bytes": float("nan")}}, "fixed_bytes=nan"),
        ({"found": {"micro_batch": 48, "bytes_per_sample": 10**30}}, "bytes_per_sample=1000"),
    ],
    ids=str,
)
def test_every_field_is_checked(cache, notices, changes, match):
    cache.keep(KEY, Remembered(7))
    rewritten(files(cache)[0], **changes)

    check_useless_then_replaced(cache, notices, match)


def test_number_that_someone_changed_is_not_believed(cache, notices):
    cache.keep(KEY, FOUND)
    [path] = files(cache)
    path.write_text(path.read_text().replace("48", "58"))

    check_useless_then_replaced(cache, notices, "is damaged")


def test_link_in_place_of_a_file_is_neither_followed_nor_written_through(cache, notices, tmp_path):
    cache.keep(KEY, Remembered(7))
    [path] = files(cache)
    mine = path.rename(tmp_path / "mine.json")
    path.symlink_to(mine)
    before = mine.read_bytes()

    check_useless_then_replaced(cache, notices, "is a link")

    assert mine.read_bytes() == before
    assert not path.is_symlink()


def test_folder_in_place_of_a_file_is_left_alone(cache, notices):
    cache.keep(KEY, FOUND)
    [path] = files(cache)
    path.unlink()
    path.mkdir()

    assert cache.find(KEY) is None
    cache.keep(KEY, FOUND)
    cache.forget(KEY)

    assert files(cache) == [path]
    assert path.is_dir()
    assert len(notices.texts) == 2
    assert "a folder, a pipe or a device" in notices.texts[0]
    assert "cannot be written to" in notices.texts[1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_pipe_in_place_of_a_file_is_not_waited_for(cache, notices):
    cache.keep(KEY, FOUND)
    [path] = files(cache)
    path.unlink()
    os.mkfifo(path)

    check_useless_then_replaced(cache, notices, "a folder, a pipe or a device")


# --- folders that cannot be used --------------------------------------------------------------------------------------


def check_training_goes_on(cache, notices):
    cache.find(KEY)
    cache.keep(KEY, FOUND)
    cache.keep(KEY, FOUND)
    cache.forget(KEY)

    assert len(notices.texts) == 1
    assert "AUTOACCUM_CACHE_DIR" in notices.texts[0]


@pytest.mark.parametrize("below", ["", "further/down"])
def test_file_in_place_of_the_folder_costs_one_notice(tmp_path, notices, below):
    (tmp_path / "file").write_text("mine")

    check_training_goes_on(PlanCache(notices, tmp_path / "file" / below), notices)

    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("folder", ["a\0b", "x" * 5000, "~nobody-of-this-name/cache"], ids=["null", "long", "nobody"])
def test_folder_that_cannot_be_one_costs_one_notice(notices, folder):
    check_training_goes_on(PlanCache(notices, Path(folder)), notices)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc, in which nobody can make a folder")
def test_folder_that_cannot_be_made_costs_one_notice(notices):
    check_training_goes_on(PlanCache(notices, Path("/proc/autoaccum")), notices)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="permissions do not hold root back")
@pytest.mark.parametrize("mode", [0o500, 0o000])
def test_folder_without_permission_costs_one_notice(cache, notices, mode):
    cache._folder.mkdir(mode=mode)
    try:
        check_training_goes_on(cache, notices)
    finally:
        cache._folder.chmod(0o700)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EMFILE])
@pytest.mark.parametrize(
    "call", ["os.open", "pathlib.Path.write_bytes", "pathlib.Path.replace", "pathlib.Path.mkdir", "os.scandir"]
)
def test_failing_disk_costs_one_notice_and_leaves_what_was_there(cache, notices, monkeypatch, call, number):
    cache.keep(KEY, Remembered(7))
    with monkeypatch.context() as broken:
        broken.setattr(call, fails_with(number))
        cache.keep(KEY, FOUND)
        cache.keep(KEY, FOUND)

    assert len(notices.texts) == 1
    assert os.strerror(number) in notices.texts[0]
    assert len(files(cache)) == 1
    assert cache.find(KEY) == (FOUND if call == "os.scandir" else Remembered(7))


def test_disk_that_is_full_in_the_middle_of_a_file_leaves_nothing_half_written(cache, notices):
    resource = pytest.importorskip("resource", reason="file sizes cannot be limited here")
    cache.keep(KEY, Remembered(7))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        cache.keep(KEY, FOUND)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert cache.find(KEY) == Remembered(7)
    assert len(files(cache)) == 1
    assert len(notices.texts) == 1


def test_file_that_cannot_be_marked_as_used_is_found_all_the_same(cache, notices, monkeypatch):
    cache.keep(KEY, FOUND)
    monkeypatch.setattr("autoaccum._sizing.cache.os.utime", fails_with(errno.EROFS))

    assert cache.find(KEY) == FOUND
    assert notices.texts == ()


def test_interrupt_while_writing_goes_on_to_its_caller_and_leaves_nothing_half_done(cache, monkeypatch):
    cache.keep(KEY, Remembered(7))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("pathlib.Path.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.keep(KEY, FOUND)

    assert cache.find(KEY) == Remembered(7)
    assert len(files(cache)) == 1


# --- old files --------------------------------------------------------------------------------------------------------


def aged(path, days):
    then = time.time() - days * 24 * 3600
    os.utime(path, (then, then))


def test_files_that_nobody_used_for_months_are_deleted_when_one_is_written(cache):
    cache.keep(named("old"), FOUND)
    cache.keep(named("used"), FOUND)
    cache.keep(named("young"), FOUND)
    for name, days in (("old", 91), ("used", 91), ("young", 89)):
        aged(cache._path(named(name)), days)
    cache.find(named("used"))

    cache.keep(KEY, FOUND)

    assert cache.find(named("old")) is None
    assert cache.find(named("used")) == cache.find(named("young")) == cache.find(KEY) == FOUND


def test_of_too_many_files_those_used_last_stay(cache, monkeypatch):
    monkeypatch.setattr(cache_module, "_MOST_FILES", 3)
    for number in range(6):
        cache.keep(named(str(number)), FOUND)
        aged(cache._path(named(str(number))), 10 - number)

    cache.keep(KEY, FOUND)

    assert [cache.find(named(str(number))) for number in range(6)] == [None] * 4 + [FOUND] * 2
    assert cache.find(KEY) == FOUND


def test_file_just_written_stays_though_all_others_are_of_the_future(cache, monkeypatch):
    monkeypatch.setattr(cache_module, "_MOST_FILES", 2)
    for name in ("first", "second"):
        cache.keep(named(name), FOUND)
        aged(cache._path(named(name)), -1000)

    cache.keep(KEY, FOUND)

    assert cache.find(KEY) == FOUND
    assert len(files(cache)) == 2


def test_what_a_killed_writer_left_is_removed_but_not_what_one_may_be_writing(cache):
    cache.keep(KEY, FOUND)
    [path] = files(cache)
    left, young = (path.with_name(f"{path.name}.{name}.unfinished") for name in ("left", "young"))
    for unfinished in (left, young):
        unfinished.write_text("half")
    aged(left, 1)

    cache.keep(named("another"), FOUND)

    assert not left.exists()
    assert young.exists()


def test_nothing_but_own_plain_files_is_ever_deleted(cache, tmp_path):
    cache.keep(KEY, FOUND)
    others = [cache._folder / name for name in ("notes.txt", "plan-1.json", f"plan-{'0' * 32}.json.bak")]
    link, folder = (cache._folder / f"plan-{digit * 32}.json" for digit in "12")
    for other in others:
        other.write_text("mine")
        aged(other, 1000)
    link.symlink_to(others[0])
    folder.mkdir()
    aged(folder, 1000)

    cache.keep(KEY, FOUND)

    assert all(path.exists() for path in [*others, link, folder])


# --- several processes ------------------------------------------------------------------------------------------------

CROWD = """
import random, sys
from pathlib import Path
from autoaccum._sizing import cache as plan_cache
from autoaccum._system.notices import Notices
from autoaccum._sizing.cache import Key, PlanCache, Remembered

plan_cache._MOST_FILES = 5
own, turns = map(int, sys.argv[2:])
random.seed(own)
notices = Notices(silent=True)
cache = PlanCache(notices, Path(sys.argv[1]))
keys = [Key(plan_cache.digest_of(number), 10_000, {"text": "x" * 4000}) for number in range(8)]
print("ready", flush=True)
sys.stdin.readline()
hits = 0
for turn in range(1, turns):
    key = random.choice(keys[:2] if turn % 2 else keys)
    found = cache.find(key)
    if found is not None:
        hits += 1
        assert found.fixed_bytes == found.micro_batch * 7 and found.fastest == found.micro_batch, found
    size = turn * 10 + own
    cache.keep(key, Remembered(size, size * 7, None, size))
    if turn % 50 == 0:
        cache.forget(key)
print(hits, *notices.texts)
"""


@pytest.mark.parametrize("turns", [60, pytest.param(150, marks=pytest.mark.sweep)])
def test_processes_that_write_read_and_delete_at_once_never_meet_half_a_file(tmp_path, turns):
    processes = [
        subprocess.Popen(
            [*warm.python(), "-c", CROWD, str(tmp_path), str(number), str(turns)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"

    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate()[0].split(maxsplit=1) for process in processes]

    assert [process.returncode for process in processes] == [0, 0, 0]
    assert all(len(words) == 1 and int(words[0]) > turns * 2 // 15 for words in said), said
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".json"]
