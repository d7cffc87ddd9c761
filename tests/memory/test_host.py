"""What only the host backend does; the checks lower the process's own limit, so they run in a child.

Control groups and a machine short of memory are read by `_linux` and `Host` themselves: no test can make those.
"""

import sys

import pytest
import torch

from autoaccum._memory import _linux
from autoaccum._memory.host import Host
from memory._child import run_checks

MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a limit on the host takes Linux")


@pytest.fixture(scope="module")
def found():
    return run_checks(
        "peak_counts_what_the_heap_has_kept",
        "random_state_is_untouched",
        "tighter_limit_of_the_process_stays_in_force",
        "process_at_its_own_limit_is_refused",
        "second_thread_is_refused",
        "processes_do_not_inherit_the_limit",
        "batches_of_the_loader_are_exempt",
        "limit_is_lifted_until_the_outermost_block_ends",
        # Leaves the process as it is on another system.
        "system_without_limits_refuses_one_and_works_without",
    )


def test_tighter_limit_that_holds_anyway_stays_in_force_and_is_told(found):
    seen = found["tighter_limit_of_the_process_stays_in_force"]

    # What the process gave back when the limit began (the heap's end, stacks of threads that ended) is room too.
    assert 0 < seen["limit"] <= seen["room"] + 4 * MIB < 400 * MIB
    assert seen["free"] <= seen["room"] + 4 * MIB


def test_limit_is_lifted_until_the_outermost_block_ends(found):
    assert found["limit_is_lifted_until_the_outermost_block_ends"] == [True, True, False]


def test_process_that_reached_its_own_limit_is_refused_with_the_remedy(found):
    said = found["process_at_its_own_limit_is_refused"]

    assert said.startswith("InvalidInputError")
    assert "100.0 MiB" in said
    assert "ulimit -d" in said


def test_onednn_that_is_lost_is_told_also_where_little_memory_is_left():
    # In a process of its own, whose thread computes no convolution any more. Its kernels take megabytes for each size.
    (seen,) = run_checks("onednn_that_is_lost_is_told_where_little_is_free").values()

    assert "could not create a primitive" in seen["tried"]
    assert seen["said"].startswith("DeviceLostError"), seen
    assert "new process" in seen["said"]
    assert not seen["is lack of memory"]


def test_allocations_that_failed_under_a_limit_of_the_process_leave_its_room_as_it_was():
    # glibc moved the thread to an arena that gave nothing back, in which after some failures no sample fitted.
    room = run_checks("room_after_failures")["room_after_failures"]

    assert room["after"] > room["before"] - 4 * MIB


def test_peak_counts_blocks_that_the_heap_has_kept(found):
    assert found["peak_counts_what_the_heap_has_kept"] >= 60  # MiB, of 64


def test_limit_in_a_second_thread_is_refused_and_both_leave_the_process_as_it_was(found):
    seen = found["second_thread_is_refused"]

    assert "the thread 'first' already has a limit" in seen["refusal"]
    assert seen["limited"] != seen["before"]
    assert seen["after"] == seen["before"]
    assert seen["afterwards"] == "limited"


@pytest.mark.parametrize("how", ["fork in a step", "callback", "loader"])
def test_process_that_is_started_under_a_limit_gets_what_there_was_before(found, how):
    seen = found["processes_do_not_inherit_the_limit"]

    assert seen["limited"] != seen["before"]
    assert seen[how] == seen["before"]


@pytest.mark.slow  # a process for each limit
def test_batches_of_the_loader_count_neither_for_the_limit_nor_for_the_hard_one_above_it(found):
    seen = found["batches_of_the_loader_are_exempt"]

    assert (seen["before"], seen["then"], seen["used"]) == (False, True, 0)
    assert seen["free"] == 16 * MIB


@pytest.mark.slow  # trials under a real limit, for which the process is started anew
@pytest.mark.parametrize("limit_mib", [pytest.param(20, marks=pytest.mark.sweep), 40])
def test_small_convolutional_net_trains_under_small_limits_and_uses_them(limit_mib):
    # In a process of its own: it once ended in most runs with a device that was lost inside native code.
    seen = run_checks("small_convolutional_net_trains", MIB=str(limit_mib))["small_convolutional_net_trains"]

    assert seen["steps"] == 4
    assert seen["largest"] < 256
    assert seen["peak"] < 1.04 * limit_mib * MIB
    assert limit_mib < 40 or seen["one micro-batch less"] > 0.97 * limit_mib * MIB  # else the search may go on


@pytest.mark.sweep  # how often is seen by many runs: memory that really runs out inside native code
@pytest.mark.parametrize("how", ["fit", "find"])
def test_search_under_a_limit_of_the_process_fails_seldom_and_finds_most_of_what_a_fresh_process_has_room_for(how):
    # With AVX-512, MKL takes 45 MiB from some size on that no smaller one shows, and keeps some for each size. Memory
    # that runs out inside oneDNN loses the device now and then, which the error says.
    runs = [under_a_limit_of_the_process(how, 400, mib=100) for _ in range(2)]
    assert all(isinstance(run, dict) or "DeviceLostError" in run for run in runs), runs
    found = next(run for run in runs if isinstance(run, dict))
    assert found["failures"] <= (4 if how == "fit" else 5), found
    too_many = found["size"] + 1 if how == "find" else -(-400 // (found["steps"] - 1))
    enough = 0.8 if how == "fit" else 0.9
    assert under_a_limit_of_the_process("by hand", int(too_many / enough) + 1, mib=100) is False


def under_a_limit_of_the_process(how, size, *, mib):
    named = {"HOW": how, "SIZE": str(size), "MIB": str(mib), "AUTOACCUM_CACHE_DIR": ""}
    # In a fresh process: the memory of one that was forked has room that its origin left.
    return run_checks("limit_of_the_process", is_fresh=True, **named)["limit_of_the_process"]


def test_limit_that_is_too_small_for_one_sample_is_refused_with_one_that_would_do():
    seen = run_checks("limit_too_small_for_one_sample")["limit_too_small_for_one_sample"]

    assert seen["said"].startswith("DoesNotFitError")
    assert "would do" in seen["said"]
    assert seen["updates"] == 0
    assert seen["then"] == 1


def test_warming_up_draws_no_random_numbers(found):
    assert found["random_state_is_untouched"] is True


def test_other_systems_refuse_a_limit_and_work_without_one(found):
    seen = found["system_without_limits_refuses_one_and_works_without"]

    assert seen["free"] > 0
    assert seen["peak"] is None
    assert seen["said"].startswith("InvalidInputError")
    assert "leave memory_limit out" in seen["said"]


def test_ensure_believes_the_machine_when_it_refuses_only_on_a_fresh_reading(monkeypatch):
    host = Host()
    answers = iter([10 * MIB, 100 * MIB])
    monkeypatch.setattr("autoaccum._memory.host._machine_free", lambda: next(answers))
    host.ensure(MIB)

    host.ensure(50 * MIB)  # the first answer would have refused this

    assert next(answers, None) is None


def test_ensure_refuses_what_the_machine_does_not_have(monkeypatch):
    monkeypatch.setattr("autoaccum._memory.host._machine_free", lambda: 10 * MIB)

    with pytest.raises(torch.OutOfMemoryError, match=r"50\.0 MiB are needed and 10\.0 MiB"):
        Host().ensure(50 * MIB)


def test_reading_takes_the_tightest_control_group(monkeypatch):
    groups = [_linux.GroupLimit(900 * MIB, 100 * MIB), _linux.GroupLimit(300 * MIB, 250 * MIB)]
    monkeypatch.setattr(_linux, "group_limits", lambda: iter(groups))

    reading = Host().reading()

    assert reading.total_bytes == 300 * MIB
    assert reading.free_bytes == 50 * MIB


def make_groups(tmp_path, *, kind, options, line, part="/"):
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    (proc / "cgroup").write_text(f"{line}\n")
    (proc / "mountinfo").write_text(f"32 31 0:29 {part} {mount} rw,relatime - {kind} cgroup {options}\n")
    return proc, mount


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_groups_of_version_2_are_walked_up_and_cache_is_not_use(tmp_path):
    proc, mount = make_groups(tmp_path, kind="cgroup2", options="rw", line="0::/job/step")
    write(mount / "job/step", memory__max="max\n", memory__high="max\n", memory__current="7\n")
    write(
        mount / "job",
        memory__max="1000\n",
        memory__high="800\n",
        memory__current="500\n",
        memory__stat="anon 300\ninactive_file 150\n",
    )

    assert list(_linux.group_limits(proc)) == [_linux.GroupLimit(800, 350)]


def test_groups_of_version_1_know_their_value_for_no_limit(tmp_path):
    proc, mount = make_groups(tmp_path, kind="cgroup", options="rw,memory", line="4:memory:/job")
    write(mount, memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="1\n")
    write(
        mount / "job",
        memory__limit_in_bytes="4096\n",
        memory__usage_in_bytes="2048\n",
        memory__stat="total_inactive_file 48\n",
    )

    assert list(_linux.group_limits(proc)) == [_linux.GroupLimit(4096, 2000)]


def test_container_whose_path_lies_outside_its_mount_reads_the_mount_itself(tmp_path):
    proc, mount = make_groups(tmp_path, kind="cgroup2", options="rw", line="0::/elsewhere", part="/docker/abc")
    write(mount, memory__max="4096\n", memory__current="96\n")

    assert list(_linux.group_limits(proc)) == [_linux.GroupLimit(4096, 96)]
