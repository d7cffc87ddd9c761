"""The Kubernetes example is a Job by its schema, and agrees with the exit codes and options there are."""

import kubernetes_validate
import pytest
import yaml
from autoaccum._launch.command import placeholders

from autoaccum._cli.exit_codes import ExitCode
from folders import ROOT
from run_invoked import given, invoke  # noqa: F401 - a fixture

EXAMPLE = ROOT / "examples" / "kubernetes-job.yaml"


@pytest.fixture
def job():
    return yaml.safe_load(EXAMPLE.read_text())


def test_it_is_a_job_by_its_schema(job):
    version = kubernetes_validate.latest_version()

    kubernetes_validate.validate(job, version, strict=True)


def test_the_schema_would_notice(job):
    del job["spec"]["podFailurePolicy"]["rules"][0]["action"]

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_what_ends_the_job_are_exit_codes_that_no_other_pod_would_better(job):
    codes = job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]

    assert codes == [ExitCode.USAGE, ExitCode.BAD_INPUT, ExitCode.DOES_NOT_FIT, 126, 127]
    assert codes == sorted(codes)  # which the API demands


def test_its_command_line_is_understood(job, given):
    (container,) = job["spec"]["template"]["spec"]["containers"]

    assert container["command"] == ["autoaccum", "run"]
    invoke(*container["args"])
    command, options = given
    assert placeholders(command) == {"micro_batch", "accum_steps"}
    assert options.grace_s < job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
