"""Scripts: the call that a report is made of, and what is said of a script that has none."""

import sys

import pytest

from autoaccum._launch.script import FitCall, first_call
from autoaccum.errors import InvalidInputError

SCRIPT = """
import sys
import torch
import autoaccum
from neighbour import NUMBER

def train():
    import late_neighbour
    autoaccum.fit(torch.nn.Linear(1, 1), [], NUMBER, epochs=2)

def leaves():
    raise SystemExit(0)

def fails():
    raise KeyError("x")

def nothing():
    pass

def wrong():
    autoaccum.fit(torch.nn.Linear(1, 1), [], 4, epoch=3)

globals()[sys.argv[1]]()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "neighbour.py").write_text("NUMBER = 7\n")
    (tmp_path / "late_neighbour.py").write_text("")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    yield path
    for name in ("neighbour", "late_neighbour"):
        sys.modules.pop(name, None)


def test_a_script_runs_up_to_its_call_and_can_import_its_neighbours(script):
    before = list(sys.path), list(sys.argv)

    call = first_call(str(script), ["train"])

    assert (call.get("target_batch"), call.get("epochs"), call.get("precision")) == (7, 2, "auto")
    assert (sys.path, sys.argv) == before


@pytest.mark.parametrize(
    ("name", "function", "said"),
    [
        ("none.py", "", "does not exist"),
        ("", "", "is a folder"),
        ("script.txt", "", "must end in .py"),
        ("script.py", "nothing", "ended without a call of autoaccum.fit, Runner.step or Accumulator.backward"),
        ("script.py", "leaves", "exited by sys.exit(0)"),
        ("script.py", "fails", "raised KeyError: 'x'; correct the script"),
        ("script.py", "wrong", "raised TypeError: got an unexpected keyword argument 'epoch'"),
        ("exits.py", "", "exited by sys.exit('no data')"),
        ("broken.py", "", "raised NameError"),
    ],
)
def test_a_script_that_cannot_be_used_is_told(script, name, function, said):
    (script.parent / "script.txt").write_text("")
    (script.parent / "exits.py").write_text("raise SystemExit('no data')\n")
    (script.parent / "broken.py").write_text("undefined\n")

    with pytest.raises(InvalidInputError) as error:
        first_call(f"{script.parent}/{name}", [function])

    assert said in str(error.value)


def test_a_script_with_a_librarys_name_does_not_replace_it(tmp_path):
    path = tmp_path / "torch.py"
    path.write_text("import torch, autoaccum\nautoaccum.fit(torch.nn.Linear(1, 1), [], 4)\n")

    assert first_call(str(path)).get("target_batch") == 4
    assert hasattr(sys.modules["torch"], "nn")


def test_a_target_in_tokens_replaces_one_in_samples():
    call = FitCall({"target_batch": 4}).with_arguments({"target_tokens": 9})

    assert call.arguments == {"target_tokens": 9}
