"""The Kubernetes example is a Job by its schema, and agrees with the exit codes and options there are."""

import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from autoaccum._cli.exit_codes import ExitCode  # the codes by name
from support.processes.folders import ROOT

EXAMPLE = ROOT / "examples" / "kubernetes-job.yaml"


@pytest.fixture
def job():
    return yaml.safe_load(EXAMPLE.read_text())


def test_it_is_a_job_by_its_schema(job):
    version = kubernetes_validate.latest_version()

    kubernetes_validate.validate(job, version, strict=True)


def test_what_ends_the_job_are_exit_codes_that_no_other_pod_would_better(job):
    codes = job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]

    assert codes == [ExitCode.USAGE, ExitCode.BAD_INPUT, ExitCode.DOES_NOT_FIT, 126, 127]
    assert codes == sorted(codes)  # which the API demands


def test_its_command_line_is_understood_and_its_numbers_reach_the_script(job, tmp_path):
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["command"] == ["autoaccum", "run"]
    options = container["args"][: container["args"].index("--")]
    grace = next(option for option in options if option.startswith("--grace="))
    assert int(grace.partition("=")[2]) < spec["terminationGracePeriodSeconds"]
    (tmp_path / "train.py").write_text("import sys; print(*sys.argv[1:3])")

    words = [sys.executable, "-m", "autoaccum", "run", *container["args"]]
    ran = subprocess.run(
        [sys.executable if word == "python" else word for word in words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout == "--per_device_train_batch_size=256 --gradient_accumulation_steps=1\n"
