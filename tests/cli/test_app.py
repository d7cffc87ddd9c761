"""The command line: its help, what errors become, and completion."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

import autoaccum
from autoaccum._cli.app import cli
from autoaccum._cli.exit_codes import MEANINGS, ExitCode, code_for
from support.processes.folders import ROOT


def invoke(*arguments):
    return CliRunner().invoke(cli, list(arguments))


def test_the_version_is_the_packages():
    result = invoke("--version")

    assert (result.exit_code, result.stdout) == (0, f"autoaccum {version('autoaccum')}\n")


def test_help_shows_the_commands_and_each_exit_code_once():
    text = invoke("--help").stdout

    commands = re.findall(r"^  (\w+) ", text[text.index("Commands:") : text.index("Exit codes")], re.MULTILINE)
    assert commands == ["run", "slurm", "verify", "report", "doctor"]
    assert re.findall(r"^  (\d+) ", text, re.MULTILINE) == [str(int(code)) for code in ExitCode]


@pytest.mark.parametrize("name", ["run", "slurm", "verify", "report", "doctor"])
def test_the_help_of_a_command_has_no_exit_codes_and_no_types_of_python(name):
    text = invoke(name, "--help").stdout

    assert text.startswith(f"Usage: autoaccum {name} ")
    assert not re.search(r"Exit codes|<bool>|BOOLEAN|INTEGER|TEXT\b", text)


def test_the_page_has_the_same_exit_codes_as_the_help():
    page = (ROOT / "docs" / "reference.md").read_text()

    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == [str(int(code)) for code in MEANINGS]


@pytest.mark.parametrize("arguments", [[], ["train"], ["run", "--no-such-option"], ["report"], ["doctor", "x"]])
def test_a_command_line_that_cannot_be_parsed_exits_with_2_and_one_line(arguments):
    result = invoke(*arguments)

    assert result.exit_code == ExitCode.USAGE
    assert re.fullmatch(r"autoaccum: error: .*; autoaccum( \w+)? --help shows what there is\n", result.stderr)


@pytest.mark.parametrize(
    ("kind", "code"), [("InvalidInput", 3), ("Checkpoint", 3), ("DoesNotFit", 4), ("DeviceLost", 5), ("StartAgain", 75)]
)
def test_each_error_has_its_exit_code(kind, code):
    assert code_for(getattr(autoaccum, f"{kind}Error")("asked, found, next step")) == code


_ELSEWHERE = """
import os, signal, sys
import psutil, rich.console, rich.table, torch, torch._dynamo
for name in ("fcntl", "pty", "tty", "resource", "termios", "grp", "pwd"):
    sys.modules[name] = None
for name in ("SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGCHLD", "SIGTSTP", "SIGWINCH"):
    delattr(signal, name)
for name in ("pipe2", "register_at_fork", "sysconf", "sched_getaffinity", "killpg", "O_NONBLOCK", "O_DIRECTORY"):
    delattr(os, name)
import autoaccum
import autoaccum._launch.run  # imported alone, in another process
from autoaccum._cli.app import cli
from click.testing import CliRunner
sys.platform = "win32"
for arguments in (["doctor"], ["report", "train.py", "--device=cpu"], ["run", "--", "x"], ["slurm", "--", "x"]):
    done = CliRunner().invoke(cli, arguments)
    print("===", done.exit_code, type(done.exception).__name__, done.output)
"""
_SCRIPT = """
import autoaccum, torch
autoaccum.fit(torch.nn.Linear(3, 1), [(torch.randn(8, 3), torch.randn(8, 1))], 8)
"""


@pytest.mark.slow  # imports torch for four commands
def test_without_what_only_unix_has_commands_work_or_say_that_they_need_linux(tmp_path):
    (tmp_path / "train.py").write_text(_SCRIPT)

    ran = subprocess.run([sys.executable, "-c", _ELSEWHERE], capture_output=True, text=True, check=False, cwd=tmp_path)

    doctor, report, *others = ran.stdout.split("=== ")[1:]
    assert doctor.startswith(f"{ExitCode.DONE} ")
    assert "Installation" in doctor
    assert report.startswith(f"{ExitCode.DONE} ")
    assert "8 samples fit" in report
    for other in others:
        assert other.startswith(f"{ExitCode.BAD_INPUT} SystemExit autoaccum: error: autoaccum run needs Linux")


def test_the_package_can_be_run_as_a_module_and_tells_an_error_in_one_line():
    ran = subprocess.run(
        [sys.executable, "-m", "autoaccum", "report", "none.py"], capture_output=True, text=True, check=False
    )

    assert (ran.returncode, ran.stdout) == (3, "")
    assert re.fullmatch(r"autoaccum: error: the script 'none.py' does not exist; .*\n", ran.stderr)


@pytest.mark.parametrize(
    ("written", "offered"), [("autoaccum r", {"run", "report"}), ("autoaccum slurm --warn", {"--warn-before"})]
)
def test_a_shell_completes_commands_and_options(written, offered):
    words = {"COMP_WORDS": written, "COMP_CWORD": str(written.count(" ")), "_AUTOACCUM_COMPLETE": "bash_complete"}

    done = subprocess.run(
        [Path(sys.executable).with_name("autoaccum")],
        env=os.environ | words,
        capture_output=True,
        text=True,
        check=False,
    )

    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == offered


@pytest.mark.parametrize("closing", ["2>&-", "1>&- 2>&-", "> /dev/full"])
def test_a_stream_that_cannot_be_written_is_no_traceback(closing):
    ran = subprocess.run(
        ["/bin/bash", "-c", f"{sys.executable} -m autoaccum slurm --dry-run -- python train.py {closing}"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == (0 if closing == "2>&-" else 1)
    assert "Traceback" not in ran.stderr
