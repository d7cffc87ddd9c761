"""What the doctor says of cores and memory."""

from types import SimpleNamespace

import psutil
import torch

from autoaccum._doctor import machine
from autoaccum._doctor.findings import Fact, Problem

MIB = 2**20


def found(environment=None, **places):
    findings = list(machine.of_machine(environment or {}, **places))
    facts = {one.name: one for one in findings if isinstance(one, Fact)}
    return facts, [one.text for one in findings if isinstance(one, Problem)]


def test_memory_is_that_of_the_machine():
    facts, _ = found()

    assert facts["memory"].value == psutil.virtual_memory().total
    assert facts["cores"].value == machine.usable_cores()


def test_more_threads_than_cores_are_a_problem(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)

    _, by_itself = found()
    _, by_variable = found({"OMP_NUM_THREADS": "64"})

    assert any("64 threads on 1 cores" in text and "torch.set_num_threads() to 1" in text for text in by_itself)
    assert any("set OMP_NUM_THREADS to 1" in text for text in by_variable)


def test_little_shared_memory_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "disk_usage", lambda _: SimpleNamespace(total=64 * MIB, free=60 * MIB))

    facts, problems = found(shared=tmp_path)

    assert facts["shared memory"].value == 64 * MIB
    assert any("--shm-size=8g" in text and "60.0 MiB free of 64.0 MiB" in text for text in problems)


def test_machine_that_never_overcommits_is_a_problem(tmp_path):
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/overcommit_memory").write_text("2\n")
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : A Processor\n")

    facts, problems = found(proc=tmp_path)

    assert facts["processor"].text == "A Processor"
    assert any("vm.overcommit_memory is 2" in text for text in problems)


def test_system_without_these_files_is_described_nevertheless(tmp_path):
    facts, _ = found(proc=tmp_path / "none", shared=tmp_path / "none")

    assert "shared memory" not in facts
    assert facts["processor"].text
