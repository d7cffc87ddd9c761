"""Counters of processes that the kernel ended for lack of memory, read from files of the real formats."""

import pytest

from autoaccum._memory._linux import read_kills, risen

EVENTS = "low 0\nhigh 0\nmax 31\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def process_files(folder, *, cgroup, mountinfo, vmstat="nr_free_pages 1\noom_kill 7\n"):
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    (folder / "proc" / "self" / "mountinfo").write_text(mountinfo)
    (folder / "proc" / "vmstat").write_text(vmstat)
    return folder / "proc"


MOUNT = "41 31 0:38 / {}/cgroup rw,relatime - {}\n"


@pytest.mark.parametrize(
    ("group", "mount", "name", "text"),
    [
        ("0::", "cgroup2 cgroup2 rw", "memory.events", EVENTS),
        ("3:cpu:/\n4:memory:", "cgroup cgroup rw,memory", "memory.oom_control", CONTROL),
    ],
    ids=["version 2", "version 1"],
)
def test_kills_of_the_own_group_are_counted_and_not_what_a_neighbour_group_went_through(
    tmp_path, group, mount, name, text
):
    own = tmp_path / "cgroup" / "slice" / "job"
    own.mkdir(parents=True)
    (own / name).write_text(text.format(3))
    (own.parent / name).write_text(text.format(4))
    proc = process_files(tmp_path, cgroup=f"{group}/slice/job\n", mountinfo=MOUNT.format(tmp_path, mount))

    assert read_kills(proc) == {f"{own}/{name}": 3}


def test_only_without_a_group_the_machine_is_asked(tmp_path):
    proc = process_files(tmp_path, cgroup="", mountinfo="")

    assert read_kills(proc) == {f"{proc}/vmstat": 7}


def test_only_what_was_there_before_can_have_risen():
    assert risen({"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 2, "d": 9}) == {"a": 1}
