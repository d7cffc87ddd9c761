"""Each core module imports only from those above it, and an import changes nothing."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import autoaccum

PACKAGE = Path(autoaccum.__file__).parent

# Top to bottom: a name may import what stands above it. A folder is one name.
ORDER = (
    "errors",
    "arguments",
    "records",
    "planner",
    "pace",
    "tempo",
    "batches",
    "weighting",
    "targets",
    "questions",
    "output",
    "own_code",
    "notices",
    "callbacks",
    "environment",
    "safe_files",
    "reason_file",
    "signals",
    "oom",
    "memory",
    "ranks",
    "sharded_model",
    "shard_metadata",
    "shards",
    "buckets",
    "shares",
    "footprint",
    "cards",
    "state",
    "peeking",
    "batchnorm",
    "compiling",
    "fallback",
    "settling",
    "entries",
    "objective",
    "reported",
    "precision",
    "devices",
    "optimizers",
    "transfer",
    "update",
    "inventory",
    "step",
    "scope",
    "trial",
    "search",
    "growth",
    "learning",
    "probe",
    "plan_cache",
    "holdings",
    "evaluation",
    "aside",
    "sizing",
    "accumulation",
    "overlap",
    "joint",
    "sharded_joint",
    "room",
    "attempt",
    "afterwards",
    "runner",
    "finding",
    "undoing",
    "position",
    "process_identity",
    "lease",
    "packing",
    "seal",
    "storage",
    "schedule",
    "schema",
    "rehearsed",
    "checkpoint",
    "saving",
    "sharding",
    "alike",
    "gone_through",
    "company",
    "outside",
    "progress",
    "loggers",
    "places",
    "alive",
    "postmortem",
    "postmortem_view",
    "course",
    "finiteness",
    "validation",
    "runners",
    "keeping",
    "supervision",
    "training",
    "untouched",
    "fit",
    "timeline",
    "caching_allocator",
    "workspace",
    "fakes",
    "unrolled",
    "cudnn_rules",
    "kernel_rules",
    "cuda_rules",
    "quick_fakes",
    "ledger",
    "traced",
    "rehearsal",
    "estimate",
    "report",
    "preflight",
    "jobs",
    "integrations",
    "exit_codes",
    "cli_numbers",
    "cli_report",
    "cli_run",
    "cli_slurm",
    "cli",
    "__main__",
)
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(tree, *, at_runtime):
    """Every name of autoaccum that is imported: at run time, or for type checkers alone."""
    for_types = [
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for child in branch.body
        for node in ast.walk(child)
    ]
    nodes = [node for node in ast.walk(tree) if node not in for_types] if at_runtime else for_types
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from autoaccum import oom` names a module, `from autoaccum._oom import is_oom` is one already.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parts_imported(path, *, at_runtime):
    names = imports_of(ast.parse(path.read_text()), at_runtime=at_runtime)
    return {name.split(".")[1] for name in names if name.startswith("autoaccum.")}


def test_every_module_has_its_place():
    assert {part_of(path) for path in MODULES} <= set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_module_imports_only_from_those_above_it(path):
    above = ORDER[: ORDER.index(part_of(path)) + 1]

    assert parts_imported(path, at_runtime=True) <= set(above)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_types_are_imported_from_modules_that_exist(path):
    assert parts_imported(path, at_runtime=False) <= set(ORDER)


def test_core_knows_no_framework():
    core = [path for path in MODULES if part_of(path) != "integrations"]

    assert not [path for path in core if "integrations" in parts_imported(path, at_runtime=True)]


@pytest.mark.parametrize("name", ["errors", "records", "planner", "search"])
def test_pure_arithmetic_knows_no_torch(name):
    imported = set(imports_of(ast.parse((PACKAGE / f"{name}.py").read_text()), at_runtime=True))

    assert not [module for module in imported if module.split(".")[0] in ("torch", "numpy")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


LOOK = """
import json, os, resource, signal, sys, threading
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
        "random": torch.initial_seed(),
        "path": list(sys.path),
    }

torch.manual_seed(0)
before = look()
import autoaccum
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


@pytest.mark.parametrize(
    "heavy",
    ["transformers", "tensorboard", "torchvision", "sklearn", "lightning", "accelerate", "torchmetrics", "matplotlib"],
)
def test_import_brings_nothing_that_only_some_need(heavy, looks):
    assert heavy not in looks[2]


def test_command_line_is_not_imported_with_the_library(looks):
    assert "autoaccum._cli.app" not in looks[2]
    assert "typer" not in looks[2]
