"""What only the host backend does; the checks lower the process's own limit, so they run in a child."""

import sys

import pytest
import torch

from autoaccum._memory import Host, _linux
from autoaccum.errors import InvalidInputError
from memory._child import run_checks

MIB = 2**20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a limit on the host takes Linux")


@pytest.fixture(scope="module")
def found():
    return run_checks(
        "random_state_is_untouched",
        "environment_is_as_before",
        "exit_puts_the_limit_back",
        "lifted_puts_the_old_limit_in_force",
        "tighter_limit_of_the_process_stays_in_force",
        "room_that_an_earlier_training_left_in_the_heap_counts",
        "process_at_its_own_limit_is_refused",
        "threads_started_under_a_limit_do_not_end_the_process",
        "onednn_that_refuses_everything_is_told",
        "onednn_that_refuses_everything_is_told_where_little_is_free",
        "matrix_products_of_many_sizes_leave_nothing_behind",
        "matrix_products_have_the_same_bits_where_a_limit_is_used_up",
        "peak_is_none_where_it_cannot_be_reset",
        "system_without_limits_refuses_one_and_works_without",
    )


def test_exit_puts_the_rlimit_back_also_on_an_exception(found):
    seen = found["exit_puts_the_limit_back"]

    assert seen["inside"] > 0
    assert seen["inside"] != seen["before"]
    assert seen["after"] == seen["before"]
    assert seen["after_exception"] == seen["before"]


def test_lifted_limit_is_not_inherited_and_comes_back_on_an_exception(found):
    seen = found["lifted_puts_the_old_limit_in_force"]

    assert seen["lifted"] == seen["before"]
    assert seen["process"] == seen["before"]
    assert seen["again"] == seen["limited"] != seen["before"]


def test_tighter_limit_that_holds_anyway_stays_in_force_and_is_told(found):
    seen = found["tighter_limit_of_the_process_stays_in_force"]

    # What the heap gives back when the limit begins (some pages, by malloc_trim) is room too.
    assert 0 < seen["limit"] <= 301 * MIB
    assert seen["free"] <= 301 * MIB


def test_room_that_an_earlier_training_left_in_the_heap_is_not_used_beyond_the_limit(found):
    seen = found["room_that_an_earlier_training_left_in_the_heap_counts"]

    assert seen["ran_out"] is True
    assert 40 <= seen["count"] <= 56  # without that, 100 and more
    assert 40 * MIB <= seen["peak"] <= 50 * MIB
    assert seen["resident"] <= 57 * MIB
    assert seen["used"] < MIB
    assert seen["mapped"] < 30 * MIB  # after a limit has ended, the heap has its room back


def test_process_that_reached_its_own_limit_is_refused_with_the_remedy(found):
    said = found["process_at_its_own_limit_is_refused"]

    assert said.startswith("InvalidInputError")
    assert "100.0 MiB" in said
    assert "ulimit -d" in said


def test_steps_that_fail_in_convolutions_leave_nothing_behind():
    # In a process of its own, since oneDNN keeps a primitive for each size (0.5 to 1 MiB) where one ran before the
    # first limit; and in another where oneDNN was lost, which is told.
    for _ in range(4):
        seen = run_checks("twenty_failing_steps_leave_nothing_behind")["twenty_failing_steps_leave_nothing_behind"]
        if not (isinstance(seen, str) and "DeviceLostError" in seen):
            break

    assert seen["failed"] == 20
    assert seen["left"] < 5 * MIB


@pytest.mark.parametrize("threads", [2, 4])
def test_matrix_products_leave_nothing_behind_once_it_is_given_back(found, threads):
    seen = found["matrix_products_of_many_sizes_leave_nothing_behind"]
    free = seen[f"free, {threads} threads"]

    assert free["trimmed"] < MIB
    if seen["has_mkl"]:
        assert free["kept"] > 2 * MIB  # else there was nothing to give back


@pytest.mark.parametrize("threads", [2, 4])
def test_matrix_products_under_a_limit_take_nothing_of_it_for_their_buffers(found, threads):
    seen = found["matrix_products_of_many_sizes_leave_nothing_behind"]
    limited = seen[f"limited, {threads} threads"]

    assert limited["kept"] < MIB
    assert limited["trimmed"] < MIB
    if seen["has_mkl"]:
        assert seen["limited, nothing held"]["kept"] > 2 * MIB  # else they would have taken nothing anyway


def test_matrix_products_have_the_same_bits_where_a_limit_is_used_up(found):
    seen = found["matrix_products_have_the_same_bits_where_a_limit_is_used_up"]

    assert seen == {"tried": 12, "other": []}


def test_onednn_that_refuses_everything_is_a_lost_device_and_not_lack_of_memory(found):
    seen = found["onednn_that_refuses_everything_is_told"]

    assert seen["said"].startswith("DeviceLostError")
    assert "could not create a primitive" in seen["said"]
    assert "new process" in seen["said"]
    assert seen["oom"] is False


def test_onednn_that_refuses_everything_is_told_also_where_little_is_free(found):
    assert found["onednn_that_refuses_everything_is_told_where_little_is_free"].startswith("DeviceLostError")


def test_threads_are_started_before_the_limit(found):
    assert found["threads_started_under_a_limit_do_not_end_the_process"] == 1024 * 256 * 64


def test_warming_up_draws_no_random_numbers(found):
    assert found["random_state_is_untouched"] is True


def test_environment_is_not_changed_for_the_user(found):
    assert found["environment_is_as_before"] is True


def test_peak_is_none_where_the_kernel_does_not_reset_it(found):
    assert found["peak_is_none_where_it_cannot_be_reset"] is None


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


def test_fraction_of_the_host_is_of_the_tightest_control_group(monkeypatch):
    monkeypatch.setattr(_linux, "group_limits", lambda: iter([_linux.GroupLimit(300 * MIB, 0)]))

    assert Host().total_for_fraction() == 300 * MIB


def test_unreadable_status_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(_linux, "_PROC", tmp_path)

    assert _linux.status_bytes("VmData") is None


def test_unwritable_clear_refs_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(_linux, "_PROC", tmp_path / "missing")

    assert _linux.reset_high_water() is False


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


def test_system_without_control_groups_has_no_group_limits(tmp_path):
    assert list(_linux.group_limits(tmp_path)) == []


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_that_is_not_positive_is_refused(limit):
    with pytest.raises(InvalidInputError, match="leaves no memory"), Host().limited(limit):
        pass
