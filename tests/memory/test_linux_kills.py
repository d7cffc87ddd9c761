"""Counters of processes that the kernel ended for lack of memory, read from files of the real formats."""

from autoaccum._memory._linux import read_kills, risen

EVENTS = "low 0\nhigh 0\nmax 31\noom 2\noom_kill {}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


def process_files(folder, *, cgroup, mountinfo, vmstat="nr_free_pages 1\noom_kill 7\n"):
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    (folder / "proc" / "self" / "mountinfo").write_text(mountinfo)
    (folder / "proc" / "vmstat").write_text(vmstat)
    return folder / "proc"


def test_version_2_counts_in_memory_events(tmp_path):
    group = tmp_path / "cgroup" / "job"
    group.mkdir(parents=True)
    (group / "memory.events").write_text(EVENTS.format(3))
    mount = f"41 31 0:38 / {tmp_path}/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
    proc = process_files(tmp_path, cgroup="0::/job\n", mountinfo=mount)

    assert read_kills(proc) == {f"{group}/memory.events": 3}


def test_what_a_neighbour_group_went_through_is_not_counted(tmp_path):
    group = tmp_path / "cgroup" / "slice" / "job"
    group.mkdir(parents=True)
    (group / "memory.events").write_text(EVENTS.format(0))
    (group.parent / "memory.events").write_text(EVENTS.format(4))
    mount = f"41 31 0:38 / {tmp_path}/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
    proc = process_files(tmp_path, cgroup="0::/slice/job\n", mountinfo=mount)

    assert read_kills(proc) == {f"{group}/memory.events": 0}


def test_version_1_counts_in_oom_control(tmp_path):
    group = tmp_path / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text(CONTROL.format(5))
    mount = f"35 31 0:32 / {tmp_path}/memory rw,relatime - cgroup cgroup rw,memory\n"
    proc = process_files(tmp_path, cgroup="4:memory:/job\n3:cpu:/\n", mountinfo=mount)

    assert read_kills(proc) == {f"{group}/memory.oom_control": 5}


def test_only_without_a_group_the_machine_is_asked(tmp_path):
    proc = process_files(tmp_path, cgroup="", mountinfo="")

    assert read_kills(proc) == {f"{proc}/vmstat": 7}


def test_only_what_was_there_before_can_have_risen():
    assert risen({"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 2, "d": 9}) == {"a": 1}
