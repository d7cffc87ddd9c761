"""`autoaccum verify` with commands as real processes: what it says of those that fail, and that nothing survives."""

import json
import os
import signal
import subprocess
import sys

import pytest

from autoaccum._launch.run import Options  # an argument
from autoaccum._verify.api import verify_command
from autoaccum.errors import InvalidInputError
from support.processes.folders import SUPPORT, TESTS
from support.processes.wrapped import LONG_S, is_running, python, until

SIZES = ("{micro_batch}", "{accum_steps}")
FAULTS = str(SUPPORT / "losses" / "accumulation_faults.py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are watched on Linux alone")


def verify(command, target=4, *, options=None, **settings):
    return verify_command([*map(str, command)], Options(target_batch=target, **(options or {})), **settings)


def command_line(*words):
    done = subprocess.run(
        [sys.executable, "-m", "autoaccum", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    return done.returncode, done.stdout, done.stderr


BREAKS = "import pdb; pdb.set_trace()\npass"
FAILS = "import sys; print('ready'); sys.exit('the file is {missing}')"
NO_TORCH = "print('done')"


@pytest.mark.parametrize(
    ("command", "target", "text"),
    [
        (python(FAILS, *SIZES), 4, r"run as 4 x 1, ended with exit code 1 before .*: the file is \{missing\}$"),
        (python(BREAKS, *SIZES), 4, r"dropped into a debugger; take breakpoint\(\) and set_trace\(\) out"),
        (python(NO_TORCH, *SIZES), 4, "ran no Python that imported torch"),
        (["/nowhere/python", *SIZES], 4, r"exit code 127 .*: /nowhere/python cannot be started \(No such file"),
        (python(NO_TORCH), 4, "the command has no placeholder"),
        (python(NO_TORCH, "{microbatch}"), 4, r"write \{micro_batch\}"),
        (python(NO_TORCH, *SIZES), None, "no target batch is known; pass --target-batch N"),
        (python(NO_TORCH, *SIZES), 1, "target_batch=1 can be split in one way"),
        (["torchrun", "--nproc-per-node", "4", "train.py", *SIZES], 4, "target_batch=4 can be split in one way on 4"),
        (["torchrun", "--nproc-per-node", "3", "train.py", *SIZES], 4, "cannot be divided by 3 ranks"),
        ([], 4, "there is no command"),
    ],
)
def test_command_of_which_nothing_can_be_said_is_told_in_one_sentence(command, target, text):
    with pytest.raises(InvalidInputError, match=text) as raised:
        verify(command, target)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("settings", "text"), [({"steps": 0}, "--steps"), ({"timeout_s": 0.0}, "--timeout")])
def test_option_that_cannot_be_used_is_named(settings, text):
    with pytest.raises(InvalidInputError, match=text):
        verify(python(NO_TORCH, *SIZES), **settings)


# A process that ignores SIGTERM, and one that has left the session and lost its parent.
LEAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1] + ".far", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1] + ".far") or not open(sys.argv[1] + ".far").read():
    time.sleep(0.01)
open(sys.argv[1] + ".near", "w").write(str(os.getpid()))
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize("seconds", [0, 600])
def test_nothing_of_a_command_survives_it(seconds, tmp_path):
    with pytest.raises(InvalidInputError):
        verify(python(LEAVES, tmp_path / "pid", seconds, *SIZES), timeout_s=3.0)

    for name in ("near", "far"):
        assert not is_running(int((tmp_path / f"pid.{name}").read_text()))


def test_time_without_an_optimizer_step_is_told():
    with pytest.raises(InvalidInputError, match=r"made no optimizer step within --timeout 1 s; pass a longer one"):
        verify(python("import time; time.sleep(600)", *SIZES), timeout_s=1.0)


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_of_a_command_survives_an_interrupt_of_verify(number, tmp_path):
    words = ["verify", "--target-batch", "4", "--", *python(LEAVES, tmp_path / "pid", 600, *SIZES)]
    process = subprocess.Popen([sys.executable, "-m", "autoaccum", *map(str, words)], start_new_session=True)
    near = tmp_path / "pid.near"
    until(lambda: near.exists() and near.read_text())

    process.send_signal(number)

    assert process.wait(LONG_S) in (130, 128 + number)
    for name in ("near", "far"):
        assert not is_running(int((tmp_path / f"pid.{name}").read_text()))


def test_own_sitecustomize_is_imported(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 'it is there'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InvalidInputError, match="it is there"):
        verify([sys.executable, "-c", "import builtins, sys; sys.exit(builtins.mine)", *SIZES])


UNKNOWN = """
import torch
weight = torch.ones(3, requires_grad=True)
for x in torch.ones(8, 3):
    (x @ weight).square().backward()
    weight.data -= 0.1 * weight.grad
"""


@pytest.mark.slow  # a process that imports torch
def test_optimizer_that_torch_does_not_know_is_told_and_not_guessed():
    with pytest.raises(InvalidInputError, match=r"made 8 backward passes and no step of a torch\.optim\.Optimizer"):
        verify([sys.executable, "-c", UNKNOWN, *SIZES])


FAILING = "import sys, torch; sys.exit(f'deterministic: {torch.are_deterministic_algorithms_enabled()}')"


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_deterministic_algorithms_are_those_of_torch(is_deterministic):
    with pytest.raises(InvalidInputError, match=f"deterministic: {is_deterministic}$"):
        verify([sys.executable, "-c", FAILING, *SIZES], deterministic=is_deterministic)


def test_command_line_ends_with_exit_code_3_and_one_sentence_where_nothing_can_be_said():
    code, out, err = command_line("verify", "--target-batch", 4, "--", *python(BREAKS, *SIZES))

    assert (code, out) == (3, "")
    last = err.splitlines()[-1]
    assert last.startswith(
        "autoaccum: error: the command, run as 4 x 1, dropped into a debugger; take breakpoint() and "
    )
    assert "writes its files each time" in err


def test_python_of_a_shell_that_replaces_the_path_is_told(tmp_path):
    (tmp_path / "train.sh").write_text(f"PYTHONPATH={tmp_path} {sys.executable} -c 'import torch'")
    with pytest.raises(InvalidInputError, match="what replaces PYTHONPATH instead of adding to it cannot be"):
        verify(["bash", tmp_path / "train.sh", *SIZES])


# --- slow ones: each run imports torch --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [pytest.param("mended", 0, marks=pytest.mark.sweep), ("faulty", 8)])
def test_command_line_tells_by_its_exit_code_and_json(kind, code, tmp_path):
    command = [sys.executable, FAULTS, "not_divided", kind, *SIZES]

    ended, out, err = command_line("verify", "--target-batch", 2, "--json", "--", *command)

    found = json.loads(out)
    assert ended == code, err
    assert found["is_right"] == (code == 0)
    assert ("not divided" in found["diagnosis"]) == (code == 8)
    assert [found["compared_with"], found["splits"][0]["micro_batch"], found["splits"][0]["accum_steps"]] == [
        [2, 1],
        1,
        2,
    ]
    assert [line for line in err.splitlines() if ": run " in line] == [
        "autoaccum: run 1: 2 x 1",
        "autoaccum: run 2: 2 x 1 again",
        "autoaccum: run 3: 1 x 2",
    ]
    assert "each time to its first optimizer step, and writes its files each time" in err


STARTED = """
import sys
from pathlib import Path
sys.argv[1:], (folder, name, kind) = [*sys.argv[2:]], (sys.argv[1], *sys.argv[2:4])
from support.losses import accumulation_faults
accumulation_faults.FAULTS[name][0](int(sys.argv[3]), int(sys.argv[4]), kind == "mended")
with (Path(folder) / "ends").open("a") as file:
    file.write("to its end\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "option", "code", "starts"),
    [
        ("mended", "--verify", 0, 1),
        ("faulty", "--verify", 8, 0),
        pytest.param("faulty", "--verify=warn", 0, 1, marks=pytest.mark.sweep),
    ],
)
def test_run_verifies_once_before_it_starts(kind, option, code, starts, tmp_path):
    command = [sys.executable, "-c", STARTED, tmp_path, "not_divided", kind, *SIZES]

    ended, _, err = command_line("run", "--no-cache", "--target-batch", 2, option, "--", *command)

    ends = tmp_path / "ends"
    assert ended == code, err
    assert (len(ends.read_text().splitlines()) if ends.exists() else 0) == starts
    assert ("WRONG by 100%: every gradient is 2 times as large" in err) == (kind == "faulty")
    assert ("is not started" in err) == (code == 8)


# Catches whatever could end it, and then would go on.
STUBBORN = """
import sys
from pathlib import Path
from support.losses import accumulation_faults
try:
    accumulation_faults.not_divided(int(sys.argv[2]), int(sys.argv[3]), True)
except BaseException:
    pass
Path(sys.argv[1]).write_text("it went on")
"""


@pytest.mark.slow
def test_script_in_a_shell_that_catches_everything_ends_at_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    shell = f"cd {tmp_path}; {sys.executable} -m stubborn {tmp_path}/script $1 $2; echo it went on > {tmp_path}/shell"
    (tmp_path / "train.sh").write_text(shell)

    assert verify(["bash", tmp_path / "train.sh", *SIZES], 2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["stubborn.py", "train.sh"]


NO_LOSS = "lambda outputs, y: (outputs * float('nan')).sum()"
COUNTS = "int(sys.argv[1]), int(sys.argv[2])"
IGNORES = "import sys; from support.losses import accumulation_faults as faults; faults.loop(4, 1, 1)"
LOSES = (
    f"import sys; from support.losses import accumulation_faults as faults; faults.loop({COUNTS}, 1, loss_of={NO_LOSS})"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (IGNORES, "2 x 2 passes as many samples at once as 4 x 1: micro_batch is ignored"),
        (LOSES, r"gradients are NaN or infinite \(4 x 1, step 1, 0, 3\); mend that first"),
    ],
)
def test_command_that_ignores_its_placeholders_or_makes_nan_is_told(source, text, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with pytest.raises(InvalidInputError, match=text):
        verify([sys.executable, "-c", source, *SIZES])


# Looks for torch before it imports torch, as transformers does, trains in a forked process, and leaves a daemon.
FORKS = """
import importlib.util, os, sys, time
assert importlib.util.find_spec("torch")
import torch
from support.losses import accumulation_faults as faults
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
        time.sleep(600)
    os._exit(0)
os.wait()
if os.fork() == 0:
    faults.not_divided(int(sys.argv[2]), int(sys.argv[3]), True)
os.wait()
"""


@pytest.mark.slow
def test_training_in_a_forked_process_is_seen_and_nothing_of_it_survives(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))

    assert verify([sys.executable, "-c", FORKS, tmp_path / "daemons", *SIZES], 2)

    daemons = (tmp_path / "daemons").read_text().split()
    assert len(daemons) == 3
    assert not any(is_running(int(one)) for one in daemons)


UNSEEDED = f"""
import random, sys
import numpy, torch
from support.losses import accumulation_faults as faults
x = torch.randn(8, 6) + torch.from_numpy(numpy.random.rand(8, 6)).float() + random.random()
model = torch.nn.Linear(6, 5)
faults.loop({COUNTS}, int(sys.argv[2]), model=model, data=[x, torch.arange(8) % 5])
"""


@pytest.mark.slow
def test_command_without_a_seed_is_compared(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))

    found = verify([sys.executable, "-c", UNSEEDED, *SIZES], 2)

    assert found, str(found)
    assert found.noise == 0


TELLS = f"""
import sys, torch
from support.losses import accumulation_faults as faults
print("run", file=open(sys.argv[3], "a"), flush=True)
model = torch.nn.Linear(6, 5)
torch.nn.init.constant_(model.bias[:2], 9.0 * (-1) ** len(open(sys.argv[3]).readlines()))
faults.loop({COUNTS}, 1, model=model)
"""


@pytest.mark.slow
def test_runs_that_cannot_be_compared_are_told_before_the_splits_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with pytest.raises(InvalidInputError, match=r"two equal runs \(4 x 1\) differ by .* fix the seed"):
        verify([sys.executable, "-c", TELLS, *SIZES, tmp_path / "runs"])

    assert len((tmp_path / "runs").read_text().splitlines()) == 2


COMPILES = f"""
import sys, torch
from support.losses import accumulation_faults as faults
def made(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    return type("", (), {{"step": staticmethod(step), "zero_grad": staticmethod(optimizer.zero_grad)}})()
faults.loop({COUNTS}, 1, model=torch.compile(faults.network(), backend="eager"), optimizer=made)
"""


@pytest.mark.slow
def test_compiled_step_of_a_command_is_seen(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))

    assert "the loss is not divided" in verify([sys.executable, "-c", COMPILES, *SIZES], 2).diagnosis


HUNGRY = """
import sys
import torch
from support.losses import accumulation_faults
if int(sys.argv[1]) > 2:
    torch.empty(1 << 50)
accumulation_faults.not_divided(int(sys.argv[1]), int(sys.argv[2]), False)
"""


@pytest.mark.slow
def test_without_memory_for_the_whole_batch_smaller_splits_are_compared(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))

    found = verify([sys.executable, "-c", HUNGRY, *SIZES], 4)

    assert found.compared_with == (2, 2)
    assert "every gradient is 2 times as large: the loss is not divided" in found.diagnosis
