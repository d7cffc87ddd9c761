"""What the doctor says of control groups, limits of the process, and a Slurm job."""

import json
import subprocess
import sys
import time

import pytest
import torch

from autoaccum._doctor import limits
from autoaccum._doctor.findings import Fact, Problem

GIB = 2**30


def found(environment=None, **places):
    findings = list(limits.of_limits(environment or {}, **places))
    facts = {one.name: one for one in findings if isinstance(one, Fact)}
    return facts, [one.text for one in findings if isinstance(one, Problem)]


def group(folder, limit, used):
    """Return what /proc/self is for a process in a control group with these numbers of bytes."""
    proc, mount = folder / "proc", folder / "mount"
    (mount / "job").mkdir(parents=True)
    proc.mkdir()
    (proc / "cgroup").write_text("0::/job\n")
    (proc / "mountinfo").write_text(f"32 31 0:29 / {mount} rw,relatime - cgroup2 cgroup2 rw\n")
    (mount / "job" / "memory.max").write_text(f"{limit}\n")
    (mount / "job" / "memory.current").write_text(f"{used}\n")
    return proc


def test_limit_of_a_control_group_is_shown(tmp_path):
    facts, problems = found(proc=group(tmp_path, 8 * GIB, 2 * GIB))

    assert facts["control group"].text == "2.0 GiB of 8.0 GiB used"
    assert (facts["control group"].value, facts["Slurm job"].value) == (8 * GIB, None)
    assert problems == []


def test_limit_of_the_process_is_shown_and_a_problem_where_it_is_small():
    code = (
        "import resource, json, torch; from autoaccum._doctor import examine; "
        "held = int(open('/proc/self/status').read().split('VmData:')[1].split()[0]) * 1024; "
        "resource.setrlimit(resource.RLIMIT_DATA, (held + 200 * 2**20, resource.RLIM_INFINITY)); "
        "print(json.dumps(examine({}).to_dict()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)

    assert 0 < document["limits"]["free for training"] <= 200 * 2**20
    assert document["limits"]["RLIMIT_DATA"] > 200 * 2**20
    assert any("raise the limit above (ulimit" in text for text in document["problems"])


@pytest.mark.parametrize(
    "asked", [{"SLURM_MEM_PER_NODE": "4096"}, {"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "2"}]
)
def test_memory_of_a_slurm_job_that_nothing_enforces_is_a_problem(tmp_path, asked):
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 7200), **asked}

    facts, (problem,) = found(job, proc=tmp_path)
    _, enforced = found(job, proc=group(tmp_path, 4 * GIB, GIB))
    _, looser = found(job, proc=group(tmp_path / "looser", 64 * GIB, GIB))

    assert facts["Slurm job"].value == "7"
    assert facts["memory of the job"].value == 4 * GIB
    assert facts["time left"].text == "2.0 hours"
    assert "memory_limit='4096MiB'" in problem
    assert enforced == []
    assert looser == [problem]


def test_more_threads_than_cores_of_the_job_are_a_problem(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(limits, "usable_cores", lambda: 128)

    _, problems = found({"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"})

    assert any("OMP_NUM_THREADS=8" in text for text in problems)


def test_variables_of_slurm_that_are_no_numbers_are_left_out():
    facts, problems = found({"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "lots", "SLURM_CPUS_PER_TASK": "²"})

    assert "memory of the job" not in facts
    assert problems == []
