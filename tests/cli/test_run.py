"""`autoaccum run` as a command line: options, what belongs to the command, and exit codes."""

import subprocess

import pytest

import warm
from autoaccum._cli import app
from autoaccum._launch.run import Options
from run_invoked import given, invoke  # noqa: F401 - a fixture
from wrapped import LONG_S, direct, python


def test_the_commands_exit_code_is_ours(given):
    assert invoke("--", "python").exit_code == 17


@pytest.mark.parametrize("begin", [(), ("--",)])
def test_what_follows_the_command_is_the_commands(given, begin):
    command = ["python", "train.py", "--target-batch", "9", "--", "--help", "-x", "{micro_batch}"]

    invoke("--target-batch", "8", *begin, *command)

    assert given == [command, Options(target_batch=8)]


@pytest.mark.parametrize(
    ("option", "value", "name", "expected"),
    [
        ("--micro-batch", "4", "micro_batch", 4),
        ("--world-size", "2", "world_size", 2),
        ("--retries", "0", "retries", 0),
        ("--grace", "1.5", "grace_s", 1.5),
        ("--no-cache", None, "cache", False),
    ],
)
def test_an_option_reaches_the_run(given, option, value, name, expected):
    invoke(*([option] if value is None else [option, value]), "python")

    assert getattr(given[1], name) == expected


def test_without_a_command_it_is_not_understood():
    assert invoke("--target-batch", "8").exit_code == app.ExitCode.USAGE


def test_bad_input_exits_with_3_and_starts_nothing(tmp_path):
    result = invoke("--target-batch", "0", "--", "touch", tmp_path / "touched")

    assert result.exit_code == app.ExitCode.BAD_INPUT
    assert "target_batch" in result.stderr
    assert not (tmp_path / "touched").exists()


def test_as_a_process_it_is_the_command_and_nothing_else():
    command = python("import os; os.write(1, b'out\\xff'); os.write(2, b'err\\r'); os._exit(9)")

    done = subprocess.run(
        [*warm.python(), "-m", "autoaccum", "run", "--", *command], capture_output=True, check=False, timeout=LONG_S
    )

    assert (done.returncode, done.stdout, done.stderr) == (9, b"out\xff", b"err\r")
    assert (done.stdout, done.stderr) == (direct(command).stdout, direct(command).stderr)
