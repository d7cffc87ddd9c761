"""What goes to a GPU machine starts there: wheels, an environment of them, and benchmarks/gpu.py in it, without a GPU.

`make -f benchmarks/Makefile gpu-rehearsal` does the same with the packages of a GPU machine, of which it downloads
what is not here.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from folders import ROOT

pytestmark = pytest.mark.slow  # of measurements, by real processes


def run(*command, root=ROOT, check=True, **variables):
    """Run a script of the tree, with autoaccum's own wheel alone in the bundle: nothing else is downloaded."""
    environment = os.environ | {"GPU_BUNDLE_PACKAGES": ""} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=check, cwd=root)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tree, as far as its wheel takes it: the bundle that a person has made stays as it is."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("autoaccum", "scripts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)
    return root


def test_command_imports_autoaccum_from_its_wheel_and_ends_well(tmp_path):
    run("scripts/gpu_rehearsal.sh", sys.prefix, "--parts", "machine", OUT=str(tmp_path))

    found = json.loads((tmp_path / "gpu.json").read_text())
    imported = Path(found["machine"]["autoaccum_from"])
    assert imported.match("lib/python3*/site-packages/autoaccum/__init__.py")
    assert not imported.is_relative_to(ROOT)
    # Packages of the machine's own are there, too.
    assert found["machine"]["packages"]["torch"]
    assert found["parts"]["machine"]["status"] == "done"


def test_one_line_is_printed_with_the_options_and_a_gpu_machine_takes_it(copy):
    printed = run("scripts/gpu_bundle.sh", "--device", "cpu", "--parts", "a b", root=copy).stdout

    assert printed.count("\n") == 1
    assert len(printed) < 2000
    assert shlex.split(printed)[-6:] == ["--budget", "440", "--device", "cpu", "--parts", "a b"]
    assert [path.name.split("-")[0] for path in (copy / "build" / "gpu-bundle").glob("*.whl")] == ["autoaccum"]
