"""The layout of the package and its import order, and that an import changes nothing.

The order between packages, and that none of them has a circle, is held by the contracts in pyproject.toml, which
import-linter checks. Here it is checked that they say something of every package.
"""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import autoaccum
from support.processes.folders import ROOT, TESTS

PACKAGE = Path(autoaccum.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
MOST_FILES_IN_ROOT = 12


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# --- layout -----------------------------------------------------------------------------------------------------------


def test_root_is_a_contents_page():
    files = [path for path in PACKAGE.iterdir() if path.is_file()]

    assert len(files) <= MOST_FILES_IN_ROOT


def test_only_errors_and_adapters_are_importable_by_public_names():
    names = {name_of(path) for path in MODULES} - {"autoaccum.__main__"}
    public = {name for name in names if "._" not in name}

    assert public == {
        "autoaccum",
        "autoaccum.errors",
        "autoaccum.integrations",
        "autoaccum.integrations.accelerate",
        "autoaccum.integrations.lightning",
        "autoaccum.integrations.transformers",
        "autoaccum.records",
    }


def test_every_module_says_what_it_is_for():
    assert [name_of(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_no_function_or_class_shares_its_name_with_a_module():
    modules = {path.stem if path.stem != "__init__" else path.parent.name for path in MODULES}
    functions = {
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }

    assert not modules & functions


def test_test_files_mirror_the_packages():
    """A test file beside none of the package's modules stands in `across`, or is named like one and says what of it."""
    strays = []
    for folder in (path for path in TESTS.iterdir() if (PACKAGE / f"_{path.name}").is_dir()):
        modules = {path.stem.lstrip("_") for path in (PACKAGE / f"_{folder.name}").rglob("*.py")}
        for test in folder.rglob("test_*.py"):
            named = test.stem.removeprefix("test_")
            if not any(named == module or named.startswith(f"{module}_") for module in modules):
                strays.append(test.relative_to(TESTS).as_posix())

    assert strays == []


# --- order ------------------------------------------------------------------------------------------------------------


def test_every_package_and_module_has_its_place_in_the_order_and_no_package_may_have_a_circle():
    layers = {one.strip() for layer in CONTRACTS["packages"]["layers"] for one in layer.split("|")}
    packages = {f"autoaccum.{path.parent.name}" for path in PACKAGE.glob("_*/__init__.py")}
    root = {name_of(path) for path in PACKAGE.glob("*.py")} - {"autoaccum", "autoaccum.__main__"}

    assert packages | root <= layers
    assert packages <= set(CONTRACTS["no-circles"]["ancestors"])


def test_no_import_is_exempt():
    assert not any("ignore_imports" in contract for contract in CONTRACTS.values())


# --- import ----------------------------------------------------------------------------------------------------------


LOOK = """
import json, os, random, resource, signal, sys, threading
import torch

def look():
    return {
        "environment": dict(os.environ),
        "limits": [resource.getrlimit(getattr(resource, n)) for n in sorted(dir(resource)) if n.startswith("RLIMIT_")],
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "python threads": [thread.name for thread in threading.enumerate()],
        "threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1,
        "cuda": torch.cuda.is_initialized(),
        "dtype": str(torch.get_default_dtype()),
        "random": [torch.initial_seed(), random.getstate()],
        "path": list(sys.path),
    }

torch.manual_seed(0)
before = look()
import autoaccum
for name in autoaccum.__all__:  # they are loaded on first use
    getattr(autoaccum, name)
print(json.dumps([before, look(), sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def looks():
    """The process before and after the import, and the modules that it brought."""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", LOOK], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return json.loads(ran.stdout)


def test_import_touches_neither_devices_nor_the_process(looks):
    before, after, _ = looks

    assert after == before
    assert not after["cuda"]


def test_import_brings_nothing_that_only_some_need(looks):
    heavy = {"transformers", "tensorboard", "torchvision", "sklearn", "lightning", "accelerate", "torchmetrics"}

    assert not (heavy | {"click", "autoaccum._cli.app"}) & set(looks[2])
