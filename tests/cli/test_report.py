"""`autoaccum report`: what goes to which stream, into which file, and with which exit code the process ends."""

import functools
import json
import re
import subprocess
from dataclasses import replace
from types import FunctionType

import pytest
import torch
from click.testing import CliRunner

import autoaccum
from autoaccum._cli import app, report
from autoaccum._cli.exit_codes import ExitCode
from autoaccum._cli.report import verdict
from autoaccum.errors import DeviceLostError, InvalidInputError
from support.data.reports import DEVICE, GIB, MEASURED, NOTHING_FITS, PREDICTED_ONLY, REPORT
from support.processes import fork_server
from support.processes.folders import ROOT

REPORT_PAGE = ROOT / "docs" / "report.md"

RECIPE = """
import sys
import torch
import autoaccum

print("the recipe says hello")

def job(**changes):
    torch.manual_seed(0)
    data = [(torch.randn(8, 8), torch.randint(0, 2, (8,))) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 2))
    arguments = dict(model=model, device=autoaccum.Simulated("2MiB"), optimizer=torch.optim.SGD) | changes
    return autoaccum.fit(loader=data, target_batch=64, **arguments)

def small():
    return job(device=autoaccum.Simulated("40KiB"))

def on_host():
    return job(device="cpu", memory_limit="64MiB")

def without_loader():
    return autoaccum.fit(torch.nn.Linear(2, 2), None, 64)

def of_texts():
    texts = autoaccum.ListOfSamples(torch.utils.data.default_collate)
    return autoaccum.fit(torch.nn.Linear(2, 2), [["a", "b"]], 64, split=texts)

def empty():
    return autoaccum.fit(torch.nn.Linear(2, 2), [], 64)


def busy():
    def batches():
        raise RuntimeError("the disk is busy or unavailable")
        yield

    return autoaccum.fit(torch.nn.Linear(8, 2), batches(), 10)

def fixed():
    return job(micro_batch=2)

def other_width():
    return job(model=torch.nn.Linear(5, 2))

def other_loss():
    return job(loss=lambda outputs, targets: outputs.mean() + "text")

def loss_of_outputs():
    return job(loss=lambda outputs: outputs.mean())

def unmade():
    def classifier():
        raise KeyError("no such weights")
    return job(model=classifier)

def saving():
    return job(save_memory="chunked_loss")


globals()[sys.argv[1] if sys.argv[1:] else "job"]()
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def invoke():
    def invoke(script, *options):
        """Run the command of a script, or of "SCRIPT:FUNCTION" in it."""
        script, _, function = str(script).partition(":")
        ending = ["--", function] if function else []
        return CliRunner().invoke(app.cli, ["report", script, *map(str, options), *ending])

    return invoke


@pytest.fixture
def given(monkeypatch):
    """Put a stand-in for `preflight` in place that keeps what it was given."""
    arguments = {}

    @functools.wraps(report.preflight)
    def keep(**named):
        arguments.update(named)
        return REPORT

    monkeypatch.setattr(report, "preflight", keep)
    return arguments


def test_the_table_is_the_result_and_all_else_goes_to_stderr(invoke, recipe):
    result = invoke(recipe)

    assert result.exit_code == 0
    assert result.stdout.startswith("Pre-flight report: Sequential, target batch 64\n")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "the recipe says hello" in result.stderr
    assert "autoaccum: 2 samples fit" in result.stderr


def test_quiet_shows_no_trials_on_the_way(invoke, recipe):
    assert invoke(recipe, "--quiet").stderr == "the recipe says hello\n"


def test_json_is_one_document(invoke, recipe):
    document = json.loads(invoke(recipe, "--json").stdout)

    assert document["version"] == 3
    assert document["subject"]["script"] == recipe
    assert document["measured"]["trials"][0]["fits"] is True


@pytest.mark.gpu_fakes
def test_files_are_written_beside_the_result(invoke, recipe, tmp_path):
    result = invoke(recipe, "--gpu", "l4", "--html", tmp_path / "report.html")

    assert result.exit_code == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


SCRIPT = """
import sys
import torch
import autoaccum
from autoaccum import fit

def main(samples):
    data = [(torch.randn(samples, 8), torch.randint(0, 2, (samples,))) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss()
    CALL
    raise AssertionError("nothing is trained")

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""
CALLS = {
    "fit": "fit(model, data, 64, loss=loss, optimizer=optimizer, max_steps=3)",
    "Runner": "autoaccum.Runner(model, optimizer, autoaccum.plan(64, 8), loss=loss).step(autoaccum.Window(data[:2]))",
    "Accumulator": "autoaccum.Accumulator(model, loss=loss).backward(data[0])",
    # an optimizer that it makes, for a scheduler, and what is read before the first step
    "Runner's own": """runner = autoaccum.Runner(model, "sgd", autoaccum.plan(64, 8), loss=loss)
    torch.optim.lr_scheduler.StepLR(runner.optimizer, 1), runner.savings, runner.evaluate(data)
    runner.step(autoaccum.Window(data[:2]))""",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_training_script_is_run_up_to_its_first_call_that_trains(invoke, tmp_path, name):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("CALL", CALLS[name]))

    result = invoke(path, "--gpu", "l4", "--no-measure", "--json", "--", "16")

    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["subject"]
    assert (found["model"], found["parameters"]) == ("Sequential", 8 * 4096 + 4096 + 2 * 4096 + 2)
    assert found["target_batch"] == (16 if name == "Accumulator" else 64)
    assert found["optimizer"] == ("AdamW" if name == "Accumulator" else "SGD")
    assert autoaccum.fit.__module__ == "autoaccum._training.api"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("return", "ended without a call of autoaccum.fit, Runner.step or Accumulator.backward"),
        ("raise LookupError('no data')", "train.py' raised LookupError: no data"),
        ("sys.exit(0)", "train.py' exited by sys.exit(0) in line"),
        ("fit(model, data)", "there is no target"),
        (
            """from accelerate import Accelerator; from autoaccum.integrations.accelerate import auto_accumulate
    accelerator = Accelerator(cpu=True)
    auto_accumulate(accelerator, accelerator.prepare(model), loss=loss)(data[0])""",
            "trains by an adapter of autoaccum.integrations",
        ),
    ],
)
def test_a_script_that_trains_nothing_is_bad_input(invoke, tmp_path, call, told):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("CALL", call))

    result = invoke(path, "--gpu", "l4", "--no-measure", "--", "16")

    assert (result.exit_code, result.stdout) == (ExitCode.BAD_INPUT, "")
    assert told in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("arguments", [["--wrong"], ["--help"]])
def test_arguments_that_a_script_ends_at_are_told_in_words_without_a_traceback(invoke, tmp_path, arguments):
    path = tmp_path / "train.py"
    path.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\ndef main():\n    parser.parse_args()\nmain()\n"
    )

    result = invoke(path, "--", *arguments)

    assert (result.exit_code, result.stdout) == (ExitCode.BAD_INPUT, "")
    assert "usage: train.py" in result.stderr
    assert "Traceback" not in result.stderr
    said = f"exited by sys.exit({2 if arguments == ['--wrong'] else 0}) in line 4; it must go on"
    assert said in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--target-batch", "32"], {"target_batch": 32}),
        (["--gpu", "l4", "--gpu", "t4"], {"gpus": ("l4", "t4"), "measure": False}),
        (["--device-memory", "24GiB"], {"device_memory": "24GiB", "measure": False}),
        (["--memory-limit", "1GiB"], {"memory_limit": "1GiB"}),
        (["--device", "cuda:1"], {"device": "cuda:1"}),
        (["--precision", "bf16"], {"precision": "bf16"}),
        (["--max-micro-batch", "9"], {"max_micro_batch": 9}),
        (["--no-measure", "--gpu", "t4", "--device", "cpu"], {"measure": False}),
        (["--gpu", "t4", "--device", "cpu"], {"measure": None}),
        ([], {"measure": None, "max_micro_batch": None}),
        ([":fixed"], {"max_micro_batch": 2}),
        (["--require-micro-batch", "16"], {"max_micro_batch": 64}),
        (["--require-micro-batch", "100"], {"max_micro_batch": 100}),
        (["--require-micro-batch", "9", "--max-micro-batch", "8"], {"max_micro_batch": 9}),
        ([":saving"], {"save_memory": "chunked_loss"}),
        (
            [":saving", "--save-memory", "chunked_loss", "--save-memory", "checkpoint"],
            {"save_memory": ["chunked_loss", "checkpoint"]},
        ),
    ],
)
def test_options_and_what_the_job_says_reach_preflight(invoke, recipe, given, options, expected):
    function = options[0] if options[:1] and options[0].startswith(":") else ""

    invoke(recipe + function, *options[bool(function) :])

    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize("options", [[], pytest.param(["--gpu", "t4", "--no-measure"], marks=pytest.mark.gpu_fakes)])
@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("other_width", ["(Linear)", "RuntimeError: ", "0: (8, 8), 1: (8,)"]),
        ("other_loss", ["(Sequential)", "TypeError: ", "0: (8, 8), 1: (8,)"]),
        ("unmade", ["(classifier())", "KeyError: 'no such weights'"]),
    ],
)
def test_a_recipe_whose_step_fails_exits_with_3_and_its_traceback(invoke, recipe, options, function, told):
    result = invoke(f"{recipe}:{function}", *options)

    assert result.exit_code == ExitCode.BAD_INPUT
    assert "Traceback (most recent call last)" in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert all(text in last for text in told)
    assert "meta device" not in last


def test_a_recipe_whose_loss_takes_other_arguments_is_refused_with_what_it_is_called_with(invoke, recipe):
    result = invoke(f"{recipe}:loss_of_outputs")

    assert result.exit_code == ExitCode.BAD_INPUT
    assert "is called with (outputs, targets), but takes (outputs)" in result.stderr


def test_an_error_of_autoaccums_own_is_unexpected(invoke, recipe, monkeypatch):
    broken = FunctionType((lambda *_, **__: len(3)).__code__, {"__name__": "autoaccum.broken"})
    monkeypatch.setattr(report, "preflight", broken)

    assert invoke(recipe).exit_code == ExitCode.UNEXPECTED


@pytest.mark.gpu_fakes
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_gpus_are_predicted_without_one(invoke, recipe):
    result = invoke(recipe, "--gpu", "h100-80gb", "--gpu", "l4", "--json", "--require-micro-batch", "64")

    document = json.loads(result.stdout)
    assert (result.exit_code, document["measured"]) == (0, None)
    assert [one["gpu"]["name"] for one in document["predicted"]] == ["h100-80gb", "l4"]
    assert [one["micro_batch"] for one in document["predicted"]] == [64, 64]


def test_a_file_that_cannot_be_written_after_all_does_not_cost_the_answer(invoke, recipe, tmp_path, monkeypatch):
    def full(*_):
        raise InvalidInputError("no space left")

    monkeypatch.setattr(autoaccum.records.Report, "save_html", full)

    result = invoke(recipe, "--html", tmp_path / "report.html")

    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.stdout.startswith("Pre-flight report")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["{recipe}"], ExitCode.DONE),
        (["{recipe}", "--require-micro-batch", "8", "--require-free", "1MiB"], ExitCode.DONE),
        (["{recipe}", "--require-micro-batch", "64"], ExitCode.SMALLER),
        (["{recipe}:small"], ExitCode.DOES_NOT_FIT),
        (["{recipe}:small", "--require-micro-batch", "64"], ExitCode.DOES_NOT_FIT),
        (["{recipe}", "--require-free", "20GiB"], ExitCode.NO_DEVICE),
        (["{recipe}", "--device", "cuda:99"], ExitCode.NO_DEVICE),
        (["{recipe}", "--device", "nonsense"], ExitCode.BAD_INPUT),
    ],
)
def test_the_exit_code_answers(invoke, recipe, arguments, code):
    result = invoke(*(argument.format(recipe=recipe) for argument in arguments))

    assert result.exit_code == code
    assert "Traceback" not in result.stderr
    assert result.exit_code == 0 or "autoaccum: " in result.stderr


FREE = replace(REPORT, measured=replace(MEASURED, device=replace(DEVICE, free_bytes=30 * GIB)))


@pytest.mark.parametrize(
    ("report", "micro_batch", "free_bytes", "code"),
    [
        (REPORT, None, None, ExitCode.DONE),
        (REPORT, 145, None, ExitCode.DONE),
        (REPORT, 146, None, ExitCode.SMALLER),
        (PREDICTED_ONLY, 180, None, ExitCode.DONE),
        (PREDICTED_ONLY, 181, None, ExitCode.SMALLER),
        (NOTHING_FITS, None, None, ExitCode.DOES_NOT_FIT),
        (REPORT, 999, 20 * GIB, ExitCode.NO_DEVICE),
        (NOTHING_FITS, None, 20 * GIB, ExitCode.NO_DEVICE),
        (PREDICTED_ONLY, None, 1, ExitCode.NO_DEVICE),
        (FREE, None, 20 * GIB, ExitCode.DONE),
    ],
)
def test_what_is_required_decides_in_this_order_device_fit_size(report, micro_batch, free_bytes, code):
    found, why = verdict(replace(report, required_micro_batch=micro_batch), require_free_bytes=free_bytes)

    assert found is code
    assert bool(why) is (code is not ExitCode.DONE)


def tightened(safe):
    """A report on one GPU that 256 samples are predicted to fit, and of which `safe` safely do."""
    one = PREDICTED_ONLY.predicted[0]
    return replace(PREDICTED_ONLY, predicted=(replace(one, safe_micro_batch=safe, uncertainty=0.1),))


@pytest.mark.parametrize(
    ("safe", "required", "optimistic", "code"),
    [
        (0, None, False, ExitCode.DOES_NOT_FIT),
        (0, None, True, ExitCode.DONE),
        (200, 256, False, ExitCode.SMALLER),
        (200, 256, True, ExitCode.DONE),
        (200, 257, True, ExitCode.SMALLER),
        (200, 200, False, ExitCode.DONE),
    ],
)
def test_the_safe_size_decides_unless_told_otherwise(safe, required, optimistic, code):
    asked = replace(tightened(safe), required_micro_batch=required, is_optimistic=optimistic)

    found, why = verdict(asked, require_free_bytes=None)

    assert found is code
    assert ("l4" in why) is (code is not ExitCode.DONE)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore"), ExitCode.NO_DEVICE),
        (torch.OutOfMemoryError("CUDA error: out of memory\nmore"), ExitCode.NO_DEVICE),
        (DeviceLostError("gone"), ExitCode.DAMAGED),
        (ZeroDivisionError("the recipe's"), ExitCode.BAD_INPUT),
    ],
    ids=["busy", "full", "lost", "the recipe's"],
)
def test_an_error_on_the_way_has_its_exit_code_and_of_a_device_that_others_have_one_line(
    invoke, recipe, monkeypatch, error, code
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(report, "preflight", fail)

    result = invoke(recipe)

    assert result.exit_code == code
    if code == ExitCode.NO_DEVICE:
        assert result.stderr.endswith(f"error: {str(error).splitlines()[0]}\n")


def test_error_of_the_loader_is_the_loaders_whatever_it_says(recipe, invoke):
    done = invoke(f"{recipe}:busy")

    assert done.exit_code == ExitCode.BAD_INPUT
    assert "the script's loader raised RuntimeError: the disk is busy or unavailable" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{recipe}:without_loader"], "has no loader"),
        (["{recipe}:empty"], "has no batch"),
        (["{recipe}", "--gpu", "h100-80tb"], "--gpu: the GPU 'h100-80tb' is unknown (nearest: h100-80gb"),
        (["{recipe}", "--gpu", "h100-80tb"], "for other GPUs pass --device-memory '24GiB'"),
        (["{recipe}", "--device", "rtx-3060"], "--device 'rtx-3060' is not a device of this machine, but a GPU"),
        (["{recipe}", "--device", "rtx-3060"], "pass --gpu 'rtx-3060'"),
        (["{recipe}", "--fsdp"], "--fsdp: nothing is sharded over one rank; pass --ranks, such as --ranks 8"),
        (["{recipe}:on_host", "--memory-limit", "1KiB"], "--memory-limit: a limit of 1.0 KiB"),
        (["{recipe}", "--require-free", "lots"], "--require-free 'lots' cannot be read"),
        (["{recipe}:of_texts", "--target-tokens", "9"], "--target-tokens 9 finds no token"),
        (["{recipe}", "--device-memory", "lots"], "--device-memory 'lots' cannot be read"),
        (["{recipe}", "--device-memory", "1MiB"], "--device-memory '1MiB' is too small"),
        (["{recipe}", "--no-measure"], "nothing to report; name GPUs (--gpu h100-80gb)"),
    ],
)
def test_bad_input_exits_with_3_and_names_the_value_without_a_traceback(invoke, recipe, arguments, told):
    result = invoke(*(argument.format(recipe=recipe) for argument in arguments))

    assert (result.exit_code, result.stdout) == (ExitCode.BAD_INPUT, "")
    assert told in result.stderr
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if "the recipe says hello" not in line]) <= 3
    if arguments[1:2] in (["--gpu"], ["--device-memory"], ["--no-measure"]):
        assert "the recipe says hello" not in result.stderr  # GPUs are looked up before the recipe is loaded


def test_the_prologue_on_the_page_is_a_script_that_a_shell_can_read(tmp_path):
    scripts = re.findall(r"```bash\n(.*?)```", REPORT_PAGE.read_text(), re.DOTALL)

    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)

    assert len(scripts) == 1


def test_in_a_process_of_its_own_stdout_is_the_document(recipe):
    command = [*fork_server.python(), "-m", "autoaccum", "report", recipe, "--json", "--", "on_host"]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0
    assert json.loads(done.stdout)["measured"]["micro_batch"] == 64
    assert "\x1b" not in done.stderr


_COUNTED = """
import runpy, sys
started = []
begins = ("subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system")
sys.addaudithook(lambda event, _: started.append(event) if event in begins else None)
try:
    runpy.run_module("autoaccum", run_name="__main__")
except SystemExit as ended:
    print("torch" in sys.modules, ended.code, started)
"""


@pytest.mark.parametrize(
    "options", [["--quiet"], pytest.param(["--gpu", "l4", "--no-measure"], marks=pytest.mark.gpu_fakes)]
)
def test_torch_is_imported_once(recipe, options):
    """No process is started that would import it again."""
    command = [*fork_server.python(), "-c", _COUNTED, "report", recipe, *options, "--", "on_host"]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.stdout.splitlines()[-1] == "True 0 []"


@pytest.mark.gpu_fakes
def test_a_requirement_that_is_not_met_names_the_gpu_and_shows_it_as_failed(invoke, recipe):
    required = ["--no-measure", "--memory-limit", "30MiB", "--require-micro-batch", "2000"]

    result = invoke(recipe, "--gpu", "l4", "--gpu", "t4", *required)

    assert result.exit_code == ExitCode.SMALLER
    assert "--require-micro-batch 2000: the largest that safely fits is" in result.stderr
    assert "on l4" in result.stderr
    assert result.stdout.count("  fails ") == 2
    assert "2000 at once are required" in " ".join(result.stdout.split())


@pytest.mark.gpu_fakes
def test_ranks_and_shards_can_be_asked_for(invoke, recipe):
    result = invoke(recipe, "--gpu", "l4", "--no-measure", "--ranks", "4", "--fsdp", "--display", "1GiB", "--json")

    found = json.loads(result.stdout)
    assert (found["subject"]["ranks"], found["subject"]["is_sharded"]) == (4, True)
    assert found["predicted"][0]["plan"]["target_batch"] == -(-found["subject"]["target_batch"] // 4)
    assert found["predicted"][0]["gpu"]["display_bytes"] == 1 << 30
