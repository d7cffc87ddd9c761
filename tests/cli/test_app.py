"""The command line: options, what goes to which stream, and exit codes, in this process and in real ones."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import warm
from autoaccum._cli import app
from autoaccum._records import ProbeResult
from autoaccum.errors import (
    CheckpointError,
    DeviceLostError,
    DoesNotFitError,
    InvalidInputError,
    RankFailedError,
    StateDamagedError,
    UpdateCompleteError,
)
from folders import ROOT
from record_examples import OOM, PLAN, PROBE, fit_result

CLI_PAGE = ROOT / "docs" / "cli.md"

RECIPE = """
import sys
import torch
import autoaccum

print("the recipe says hello")

class FirstStep(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        if report.step == 1:
            print("the first step is done", file=sys.stderr, flush=True)

def job(**changes):
    torch.manual_seed(0)
    data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
    arguments = dict(device="cpu", micro_batch=4, callbacks=[FirstStep()]) | changes
    return autoaccum.Job(torch.nn.Linear(3, 1), data, 16, **arguments)

def probed():
    return job(micro_batch="auto")

def endless():
    return job(epochs=1_000_000)

def broken():
    return job(loss=lambda outputs, targets: outputs.sum() / (1 // 0))

def large():
    return autoaccum.Job(torch.nn.Linear(4096, 4096), [(torch.zeros(4, 4096), torch.zeros(4, 4096))], 4, device="cpu")
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def invoke():
    """Run the command line in this process."""

    def invoke(*arguments):
        return CliRunner().invoke(app.app, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def given(monkeypatch):
    """Put a stand-in for `fit` in place that keeps what it was given."""
    arguments = {}

    def keep(**given):
        arguments.update(given)
        return fit_result()

    monkeypatch.setattr(app, "fit", keep)
    return arguments


def command(*arguments):
    """The command line as a process of its own."""
    return [*warm.python(), "-m", "autoaccum._cli.app", *(str(argument) for argument in arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=120)


def test_the_version_is_the_packages(invoke):
    result = invoke("--version")

    assert (result.exit_code, result.stdout) == (0, f"autoaccum {version('autoaccum')}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"]])
def test_help_tells_every_exit_code(invoke, arguments):
    text = invoke(*arguments).stdout

    told = text[text.index("Exit codes") :]
    assert all(f"{code.value} " in told for code in app.ExitCode)


def test_without_options_the_jobs_own_arguments_reach_fit(invoke, recipe, given):
    invoke("fit", f"{recipe}:endless")

    assert (given["target_batch"], given["epochs"], given["micro_batch"]) == (16, 1_000_000, 4)
    assert (given["device"], given["memory_limit"], given["progress"]) == ("cpu", None, "auto")


@pytest.mark.parametrize(
    ("option", "text", "name", "value"),
    [
        ("--target-batch", "32", "target_batch", 32),
        ("--epochs", "3", "epochs", 3),
        ("--max-steps", "5", "max_steps", 5),
        ("--memory-limit", "600MiB", "memory_limit", "600MiB"),
        ("--micro-batch", "auto", "micro_batch", "auto"),
        ("--micro-batch", "7", "micro_batch", 7),
        ("--precision", "bf16", "precision", "bf16"),
        ("--device", "meta", "device", "meta"),
        ("--seed", "0", "seed", 0),
        ("--checkpoint", "runs/a", "checkpoint", Path("runs/a")),
        ("--checkpoint-steps", "50", "checkpoint_steps", 50),
        ("--checkpoint-minutes", "2.5", "checkpoint_minutes", 2.5),
        ("--resume", "auto", "resume", "auto"),
        ("--resume", "yes", "resume", True),
        ("--resume", "no", "resume", False),
        ("--target-tokens", "400", "target_tokens", 400),
        ("--memory", "auto", "memory", ["auto"]),
    ],
)
def test_an_option_replaces_what_the_job_says(invoke, recipe, given, option, text, name, value):
    invoke("fit", recipe, option, text)

    assert given[name] == value
    assert type(given[name]) is type(value)


@pytest.mark.parametrize("name", ["shard", "noise_scale"])
def test_a_switch_replaces_what_the_job_says(invoke, recipe, given, name):
    invoke("fit", recipe)
    without = given[name]
    invoke("fit", recipe, f"--{name.replace('_', '-')}")

    assert (without, given[name]) == (False, True)


def test_quiet_turns_progress_off(invoke, recipe, given):
    invoke("fit", recipe, "--quiet")

    assert given["progress"] is False


def test_the_jobs_callbacks_are_kept_beside_the_log(invoke, recipe, given, tmp_path):
    invoke("fit", recipe, "--log", tmp_path / "log.jsonl")

    assert {"FirstStep", "JSONLinesLog"} <= {type(callback).__name__ for callback in given["callbacks"]}


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit"],
        ["fit", "recipe.py", "--no-such-option"],
        ["fit", "recipe.py", "--micro-batch", "some"],
        ["fit", "recipe.py", "--resume", "maybe"],
        ["train"],
    ],
)
def test_a_command_line_that_cannot_be_understood_exits_with_2(invoke, arguments):
    assert invoke(*arguments).exit_code == app.ExitCode.USAGE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInputError, 3),
        (CheckpointError, 3),
        (DoesNotFitError, 4),
        (DeviceLostError, 5),
        (StateDamagedError, 5),
        (RankFailedError, 5),
    ],
)
def test_each_error_has_its_exit_code_and_is_told_in_one_line(invoke, recipe, monkeypatch, error, code):
    def fail(**_):
        raise error("asked, found, next step") from MemoryError("the device's own words")

    monkeypatch.setattr(app, "fit", fail)

    result = invoke("fit", recipe, "--json")

    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == "the recipe says hello\nautoaccum: error: asked, found, next step\n"


def test_failure_behind_an_update_exits_with_5_and_shows_where(invoke, recipe, monkeypatch):
    def fail(**_):
        raise UpdateCompleteError("update 6 is made", 6) from MemoryError("the scheduler's own words")

    monkeypatch.setattr(app, "fit", fail)

    result = invoke("fit", recipe)

    assert result.exit_code == 5
    assert "MemoryError: the scheduler's own words" in result.stderr
    assert "autoaccum: error: update 6 is made" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["no_such_file.py"], "does not exist"),
        (["{recipe}:no_such_function"], "its functions: job(), probed(), endless(), broken(), large()"),
        (["{recipe}", "--target-batch", "0"], "target_batch"),
        (["{recipe}", "--precision", "fp8"], "fp8"),
        (["{recipe}", "--device", "cuda:99"], "cuda:99"),
        (["{recipe}", "--memory-limit", "lots"], "lots"),
        (["{recipe}", "--log", "{recipe}/log.jsonl"], "cannot be opened for writing"),
    ],
)
def test_bad_input_exits_with_3_and_names_the_value_without_a_traceback(invoke, recipe, arguments, told):
    result = invoke("fit", *(argument.format(recipe=recipe) for argument in arguments))

    assert result.exit_code == app.ExitCode.BAD_INPUT
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def test_a_recipe_that_raises_exits_with_3_and_shows_its_own_traceback(invoke, tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text("def job():\n    return undefined_name\n")

    result = invoke("fit", path)

    assert result.exit_code == app.ExitCode.BAD_INPUT
    assert f'File "{path}", line 2, in job' in result.stderr
    assert "NameError" in result.stderr.splitlines()[-1]


def test_json_is_one_document_with_the_documented_keys(invoke, recipe):
    result = invoke("fit", f"{recipe}:probed", "--json", "--max-steps", "3")

    document = json.loads(result.stdout)
    assert (document["steps"], document["samples"]) == (3, 48)
    assert document["plan"] == {
        "target_batch": 16,
        "micro_batches": [16],
        "micro_batch": 16,
        "accum_steps": 1,
    }
    assert document["plans"] == [{"step": 2, **document["plan"]}]
    assert document["probe"]["micro_batch"] == 16
    assert document["probe"]["trials"][-1]["fits"] is True
    assert list(document) == re.findall(r"^\| `(\w+)` \|", CLI_PAGE.read_text(), re.MULTILINE)


def test_json_tells_the_last_probe_and_each_time_memory_ran_out(invoke, recipe, monkeypatch):
    def run_out(*, callbacks, **_):
        for callback in callbacks:
            callback.on_plan(PLAN, step=1, probe=ProbeResult(micro_batch=100, trials=()))
            callback.on_oom(OOM, step=3)
            callback.on_plan(PLAN, step=3, probe=PROBE)
            callback.on_plan(PLAN, step=4, probe=None)
        return fit_result()

    monkeypatch.setattr(app, "fit", run_out)

    document = json.loads(invoke("fit", recipe, "--json").stdout)

    assert document["oom_events"] == [
        {"step": 3, "phase": "backward", "size": 34, "message": "CUDA out of memory."},
    ]
    assert document["probe"]["micro_batch"] == 37
    assert document["evaluations"][0]["metrics"] == {"accuracy": 0.9375}


def test_without_json_stdout_holds_only_what_the_recipe_prints(invoke, recipe):
    result = invoke("fit", recipe)

    assert (result.exit_code, result.stdout) == (0, "the recipe says hello\n")
    assert "autoaccum: done: 2 steps, 32 samples" in result.stderr


def test_the_log_holds_the_run_from_start_to_end(invoke, recipe, tmp_path):
    path = tmp_path / "log.jsonl"

    invoke("fit", recipe, "--log", path)

    names = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert names == ["fit_start", "plan", "step", "step", "epoch_end", "fit_end"]


def test_quiet_writes_nothing_of_its_own(invoke, recipe):
    result = invoke("fit", recipe, "--quiet")

    assert (result.exit_code, result.stderr) == (0, "the first step is done\n")


def test_without_a_terminal_everything_is_plain_lines_and_stdout_is_the_document(recipe):
    done = run("fit", f"{recipe}:probed", "--json")

    assert (done.returncode, json.loads(done.stdout)["steps"]) == (0, 2)
    assert "\x1b" not in done.stderr
    assert "autoaccum: plan from step 2: target batch 16; cut 16" in done.stderr


def test_on_a_terminal_the_bar_is_drawn_and_stdout_stays_the_document(recipe):
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"}
    arguments = command("fit", f"{recipe}:probed", "--max-steps", "2", "--json")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=theirs, text=True, env=environment) as process:
        os.close(theirs)
        drawn = read_to_the_end(ours)
        document = json.loads(process.communicate(timeout=120)[0])

    assert document["steps"] == 2
    assert "\x1b[?25l" in drawn  # the cursor is hidden while the bar lives
    assert drawn.rfind("\x1b[?25h") > drawn.rfind("\x1b[?25l")
    assert "plan from step 2" in drawn
    assert "2/2" in drawn


def test_ctrl_c_ends_with_130_and_one_line(recipe):
    with subprocess.Popen(
        command("fit", f"{recipe}:endless", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while "the first step is done" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)

    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "autoaccum: interrupted"
    assert "Traceback" not in err


def test_sigterm_ends_the_process_by_the_signal_and_leaves_a_checkpoint_to_go_on_from(recipe, invoke, tmp_path):
    with subprocess.Popen(
        command("fit", f"{recipe}:endless", "--checkpoint", tmp_path / "run"), stderr=subprocess.PIPE, text=True
    ) as process:
        while "the first step is done" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=120)[1]

    assert process.returncode == -signal.SIGTERM
    assert "Traceback" not in err
    (left,) = (tmp_path / "run").iterdir()
    done = json.loads(invoke("fit", recipe, "--epochs", "1", "--checkpoint", tmp_path / "run", "--json").stdout)
    assert f"step-{done['resumed_from']:08d}.pt" == left.name


def test_run_goes_on_from_its_checkpoint_and_the_document_says_so(invoke, recipe, tmp_path):
    arguments = ["fit", recipe, "--checkpoint", tmp_path, "--json"]
    first = json.loads(invoke(*arguments, "--max-steps", "1").stdout)

    second = json.loads(invoke(*arguments, "--max-steps", "2").stdout)

    assert (first["resumed_from"], first["checkpoint"]) == (None, str(tmp_path / "step-00000001.pt"))
    assert (second["resumed_from"], second["checkpoint"]) == (1, str(tmp_path / "step-00000002.pt"))
    assert (second["steps"], second["samples"]) == (2, 32)


def test_an_error_of_the_users_own_exits_with_1_and_keeps_its_traceback(recipe):
    done = run("fit", f"{recipe}:broken")

    assert done.returncode == app.ExitCode.UNEXPECTED
    assert f'File "{recipe}"' in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ZeroDivisionError")


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the host needs Linux")
def test_what_does_not_fit_exits_with_4_and_says_what_to_try(recipe):
    done = run("fit", f"{recipe}:large", "--memory-limit", "40MiB")

    assert done.returncode == app.ExitCode.DOES_NOT_FIT
    assert done.stderr.splitlines()[-1].startswith("autoaccum: error: ")
    assert "Traceback" not in done.stderr


def read_to_the_end(descriptor):
    """Read a terminal until the other side is closed; Linux reports that as an error, other systems as an end."""
    pieces = []
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:
            piece = b""
        if not piece:
            os.close(descriptor)
            return b"".join(pieces).decode()
        pieces.append(piece)


@pytest.mark.parametrize(
    ("written", "offered"),
    [("autoaccum r", {"report", "run"}), ("autoaccum fit --target-", {"--target-batch", "--target-tokens"})],
)
def test_shell_completes_commands_and_options(written, offered):
    words = {"COMP_WORDS": written, "COMP_CWORD": str(written.count(" ")), "_AUTOACCUM_COMPLETE": "complete_bash"}

    done = subprocess.run(
        [Path(sys.executable).with_name("autoaccum")],
        env=os.environ | words,
        capture_output=True,
        text=True,
        check=False,
    )

    assert set(done.stdout.split()) == offered
