"""`autoaccum doctor`: what it says of this machine, and each of its rules, by stand-ins where this machine is fine."""

import json
import warnings
from types import SimpleNamespace

import psutil
import pytest
import torch
from click.testing import CliRunner

from autoaccum._cli import doctor
from autoaccum._cli.app import cli
from autoaccum._cli.doctor import examine
from autoaccum._memory.nvml import Driver, GPUReading  # the driver's answers, which nobody has here
from autoaccum._records import Neighbour  # the driver's answers, which nobody has here
from support.processes.folders import ROOT

GIB, MIB = 2**30, 2**20
FREE = GPUReading("NVIDIA H200", 140 * GIB, 139 * GIB, (), "a")
FULL = GPUReading("NVIDIA H200", 140 * GIB, GIB, (Neighbour(17, "python", 138 * GIB),), "b")
DRIVER = Driver("580.65", (13, 0))
SLURM = {"SLURM_JOB_ID": "7"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where the kernel tells of a machine on which nothing is wrong."""
    monkeypatch.setattr(psutil, "disk_usage", lambda _: SimpleNamespace(total=8 * GIB, free=8 * GIB))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(doctor.Host, "reading", lambda _: SimpleNamespace(free_bytes=8 * GIB))
    (tmp_path / "self").mkdir()
    return tmp_path


def limit_group(place, limit):
    """Put the process into a control group with a limit."""
    (place / "group").mkdir()
    (place / "self" / "cgroup").write_text("0::/group\n")
    (place / "self" / "mountinfo").write_text(f"32 31 0:29 / {place} rw,relatime - cgroup2 cgroup2 rw\n")
    (place / "group" / "memory.max").write_text(f"{limit}\n")
    (place / "group" / "memory.current").write_text("0\n")


def found(place, environment=None):
    return examine(environment or {}, proc=place, shared=place)


def test_where_nothing_is_wrong_it_says_so(place):
    limit_group(place, 8 * GIB)

    text = found(place).to_text()

    assert text.splitlines()[-1] == "No problems found."
    assert "control group      8.0 GiB" in text


def test_the_command_prints_text_or_json():
    text = CliRunner().invoke(cli, ["doctor"]).stdout
    document = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout)

    assert set(document) == {"installation", "machine", "limits", "devices", "problems"}
    assert document["installation"]["PyTorch"].startswith(torch.__version__)
    assert all(area.capitalize() in text for area in ("installation", "machine", "limits", "devices"))


def test_lines_have_80_columns_and_no_word_is_broken(place, monkeypatch):
    monkeypatch.setattr(psutil, "disk_usage", lambda _: SimpleNamespace(total=64 * MIB, free=60 * MIB))

    examined = found(place, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **SLURM, "SLURM_MEM_PER_NODE": "4096"})

    text = examined.to_text()
    assert len(examined.problems) == 2
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    words = {word for problem in examined.problems for word in problem.split()}
    assert words <= set(text.split())
    problems = text[text.index("Problems") :].splitlines()
    assert all(len(line) <= 80 for line in problems)


def test_an_old_pytorch_is_a_problem(place, monkeypatch):
    monkeypatch.setattr(doctor, "REQUIREMENTS", ["torch>=99.0"])

    assert "autoaccum needs PyTorch 99.0 or newer" in found(place).problems[0]


def test_more_threads_than_cores_are_a_problem(place, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(doctor, "_usable_cores", lambda: 1)

    assert "64 threads on 1 cores" in found(place).problems[0]
    assert "set OMP_NUM_THREADS to 1" in found(place, {"OMP_NUM_THREADS": "64"}).problems[0]


def test_little_shared_memory_is_a_problem(place, monkeypatch):
    monkeypatch.setattr(psutil, "disk_usage", lambda _: SimpleNamespace(total=64 * MIB, free=60 * MIB))

    (problem,) = found(place).problems

    assert "60.0 MiB free of 64.0 MiB" in problem
    assert "--shm-size=8g" in problem


def test_little_memory_left_is_a_problem(place, monkeypatch):
    monkeypatch.setattr(doctor.Host, "reading", lambda _: SimpleNamespace(free_bytes=200 * MIB))

    assert "may take 200.0 MiB of host memory more" in found(place).problems[0]


@pytest.mark.parametrize(
    "asked", [{"SLURM_MEM_PER_NODE": "4096"}, {"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "2"}]
)
@pytest.mark.parametrize(("limit", "is_enforced"), [(4 * GIB, True), (64 * GIB, False)])
def test_memory_of_a_slurm_job_that_nothing_enforces_is_a_problem(place, asked, limit, is_enforced):
    limit_group(place, limit)
    examined = found(place, {**SLURM, **asked})

    assert examined.facts["limits"]["memory of the Slurm job bytes"] == 4 * GIB
    assert examined.problems == [] if is_enforced else "memory_limit='4096MiB'" in examined.problems[0]


def test_variables_of_slurm_that_are_no_numbers_are_left_out(place):
    examined = found(place, {**SLURM, "SLURM_MEM_PER_NODE": "lots", "SLURM_CPUS_PER_TASK": "²"})

    assert examined.facts["limits"]["memory of the Slurm job bytes"] is None
    assert examined.problems == []


def test_the_template_for_bugs_names_all_that_doctor_tells_of_variables():
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()

    assert all(f"{prefix}*" in template for prefix in doctor._VARIABLES)


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(place, monkeypatch):
    def of(gpus=(FREE,), driver=DRIVER, built="13.2", sees=None, warns="", shown=None):
        """Describe a machine with some GPUs, and what PyTorch makes of them."""

        def accelerator():
            if warns:
                warnings.warn(warns, stacklevel=1)
            return None if sees is None else torch.device(sees)

        monkeypatch.setattr(doctor.nvml, "read_driver", lambda: driver)
        monkeypatch.setattr(doctor.nvml, "all_gpus", lambda: tuple(gpus))
        monkeypatch.setattr(doctor.nvml, "visible_uuids", lambda: shown)
        monkeypatch.setattr(doctor, "find_accelerator", accelerator)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(gpus))

    return of


def test_gpus_are_shown_with_what_is_free(place, gpus):
    gpus([FULL, FREE], sees="cuda", shown=("a", "b", "c"))

    examined = found(place)

    devices = examined.facts["devices"]
    assert devices["NVIDIA driver"] == "580.65, for CUDA up to 13.0"
    assert devices["GPU 0"] == "NVIDIA H200, 139.0 GiB free of 140.0 GiB"
    assert devices["GPU 1"].endswith("used by python (pid 17)")
    assert devices["GPU 2"] == "unknown to NVML"
    assert devices["used by PyTorch"] == "2 x cuda"  # by the stand-in
    (problem,) = examined.problems
    assert problem.startswith("GPU 1 has 1.0 GiB free of 140.0 GiB, used by python (pid 17); choose another")


def test_a_gpu_that_cuda_hides_is_left_out_and_one_whose_number_is_unknown_has_none(place, gpus):
    gpus([FULL, FREE], sees="cuda", shown=("a",))
    assert [name for name in found(place).facts["devices"] if name.startswith("GPU")] == ["GPU 0"]

    gpus([FREE], sees="cuda", shown=None)
    assert "GPU a, of unknown number" in found(place).facts["devices"]


@pytest.mark.parametrize(
    ("described", "environment", "said"),
    [
        ({"built": None}, {}, "is built without CUDA"),
        ({"gpus": []}, {}, "sees no GPU"),
        ({"shown": ()}, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides the 1 GPU"),
        ({"driver": Driver("535.1", (12, 2))}, {}, "supports up to CUDA 12.2; update the driver"),
        ({"warns": "CUDA initialization: unknown error\nmore"}, {}, "(CUDA initialization: unknown error)"),
        ({}, {}, "(it gives no reason)"),
    ],
)
def test_why_pytorch_does_not_use_a_gpu(place, gpus, described, environment, said):
    gpus(**described)

    (problem,) = found(place, environment).problems

    assert said in problem
