"""Examines the installation, the machine, its limits and its GPUs, and tells what is wrong with them.

Facts and problems come out. GPUs are read through NVML, which needs no context on them; PyTorch is only asked whether
it could use them. Nothing is changed.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import textwrap
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from autoaccum._memory import _linux, nvml
from autoaccum._memory.available_devices import find_accelerator
from autoaccum._memory.host import Host, process_limits
from autoaccum._memory.limits import format_bytes
from autoaccum._system.own_distribution import REQUIREMENTS, __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROC = Path("/proc")
_SHARED = Path("/dev/shm")  # noqa: S108 - where workers of a DataLoader pass batches on
# Below this, a few batches of images fill it; containers get 64 MiB unless asked.
_LITTLE_SHARED_BYTES = 2**30
# A training that has less than this to begin with cannot even load a small model and its batches.
_LITTLE_BYTES = 2**29
# Of a GPU's memory; with less free, other processes or a display hold the rest.
_LITTLE_FREE = 0.1
# A control group of a Slurm job may allow a little more than the job asked for (AllowedRAMSpace).
_TOLERATED = 1.1
_LEAST_TORCH = re.compile(r"torch\s*>=\s*(?P<version>[0-9.]+)")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_VARIABLES = ("AUTOACCUM_", "PYTORCH_", "CUDA_")
_COLUMNS = 80
_MEBIBYTE = 2**20


@dataclass(slots=True)
class Examination:
    """What was found.

    Attributes:
        facts: By area and name; sizes in bytes.
        problems: What is wrong, and what to do.
    """

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document: an object for each area, and the list "problems"."""
        return {**self.facts, "problems": self.problems}

    def to_text(self) -> str:
        """Return it for a person, in lines of 80 columns; no word is broken."""
        lines = []
        for area, facts in self.facts.items():
            lines.append(area.capitalize())
            labels = {name: name.removesuffix(" bytes") for name in facts}
            width = max(map(len, labels.values()))
            for name, value in facts.items():
                shown = value if labels[name] == name or value is None else format_bytes(value)
                first = f"  {labels[name]:<{width}}  "
                lines += _wrapped("none" if shown is None else str(shown), first, " " * len(first))
            lines.append("")
        if not self.problems:
            lines.append("No problems found.")
        for number, problem in enumerate(self.problems):
            lines += ["Problems"] * (number == 0) + _wrapped(problem, "  - ", "    ")
        return "\n".join(lines)


def examine(environment: Mapping[str, str] = os.environ, proc: Path = _PROC, shared: Path = _SHARED) -> Examination:
    """Examine where this process runs.

    Args:
        environment: The variables of this process; others in tests.
        proc: Where the kernel tells of itself; another folder in tests.
        shared: The file system of shared memory; another folder in tests.
    """
    found = Examination()
    problems = found.problems
    found.facts["installation"] = _installation(environment, problems)
    found.facts["machine"] = _machine(environment, shared, problems)
    found.facts["limits"] = _limits(environment, proc / "self", problems)
    found.facts["devices"] = _devices(environment, problems)
    return found


def _installation(environment: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    least = next((match["version"] for text in REQUIREMENTS if (match := _LEAST_TORCH.match(text))), None)
    if least is not None and torch.__version__ < least:
        problems.append(
            f"autoaccum needs PyTorch {least} or newer, and {sys.executable} imports {torch.__version__} from "
            f"{Path(torch.__file__).parent}; upgrade it, or remove that folder from PYTHONPATH"
        )
    gpus = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = next((f"{name} {version}" for name, version in gpus.items() if version), "the CPU alone")
    return {
        "autoaccum": __version__,
        "Python": f"{platform.python_version()}, {sys.executable}",
        "system": platform.platform(),
        "PyTorch": f"{torch.__version__}, for {built}",
        "variables": " ".join(f"{name}={value}" for name, value in environment.items() if name.startswith(_VARIABLES))
        or None,
    }


def _machine(environment: Mapping[str, str], shared: Path, problems: list[str]) -> dict[str, Any]:
    usable, threads = _usable_cores(), torch.get_num_threads()
    if threads > usable:
        named = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in environment else "torch.set_num_threads()"
        problems.append(
            f"PyTorch uses {threads} threads on {usable} cores, which makes operators on the CPU slower; set {named} "
            f"to {usable}"
        )
    memory = psutil.virtual_memory()
    facts = {
        "cores": f"{usable} of {os.cpu_count()} usable by this process, PyTorch uses {threads} threads",
        "memory bytes": memory.total,
        "available bytes": memory.available,
    }
    try:
        use = psutil.disk_usage(str(shared))
    except OSError:
        pass
    else:
        facts |= {"shared memory bytes": use.total, "shared memory free bytes": use.free}
        if min(use.total, use.free) < _LITTLE_SHARED_BYTES:
            problems.append(
                f"{shared} has {format_bytes(use.free)} free of {format_bytes(use.total)}, and a DataLoader's workers "
                "pass batches through it (a bus error is its lack); give the container more, as by docker run "
                "--shm-size=8g, or use num_workers=0"
            )
    return facts


def _limits(environment: Mapping[str, str], proc: Path, problems: list[str]) -> dict[str, Any]:
    groups = [group.limit_bytes for group in _linux.group_limits(proc)]
    free = Host().reading().free_bytes
    if free < _LITTLE_BYTES:
        problems.append(
            f"this process may take {format_bytes(free)} of host memory more, which hardly holds a model and its "
            "batches; raise the limit above (ulimit, the container's memory, --mem of Slurm), or end what uses the "
            "memory"
        )
    facts: dict[str, Any] = {"control group bytes": min(groups, default=None)}
    facts |= {f"{kind} bytes": limit for kind, limit, _ in process_limits()}
    facts["free for training bytes"] = free
    if "SLURM_JOB_ID" in environment:
        memory = _memory_of_slurm(environment)
        facts["memory of the Slurm job bytes"] = memory
        if memory is not None and not any(limit <= memory * _TOLERATED for limit in groups):
            problems.append(
                f"the Slurm job has {format_bytes(memory)} on this node, and no control group enforces that: Slurm may "
                "kill what takes more, without an error that can be caught; pass "
                f"memory_limit='{memory // _MEBIBYTE}MiB' for a training on the CPU"
            )
    return facts


def _devices(environment: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    driver = nvml.read_driver()
    every, visible = {gpu.uuid: gpu for gpu in nvml.all_gpus()}, nvml.visible_uuids()
    facts: dict[str, Any] = {"NVIDIA driver": None if driver is None else driver.text}
    for number, uuid in enumerate(every if visible is None else visible):
        name = f"GPU {number}" if visible is not None else f"GPU {uuid}, of unknown number"
        gpu = every.get(uuid)
        if gpu is None:
            facts[name] = "unknown to NVML"
            continue
        holders = ", ".join(f"{other.name} (pid {other.pid})" for other in gpu.neighbours[:3])
        used = f", used by {holders}" if holders else ""
        room = f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
        facts[name] = f"{gpu.name}, {room}{used}"
        if gpu.free_bytes < _LITTLE_FREE * gpu.total_bytes:
            problems.append(
                f"{name} has {room}{used}; choose another GPU with {_VISIBLE}, or wait until its memory is free"
            )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        there = find_accelerator()
    facts["used by PyTorch"] = (
        "the CPU alone" if there is None else f"{torch.accelerator.device_count()} x {there.type}"
    )
    if driver is not None and there is None:
        warned = "; ".join(str(warning.message).split("\n")[0] for warning in caught)
        hides = environment.get(_VISIBLE) if visible == () else None
        problems.append(_why_unused(driver, len(every), hides, warned))
    return facts


def _why_unused(driver: nvml.Driver, there: int, hides: str | None, warned: str) -> str:
    gpus = f"{there} GPU{'s' if there != 1 else ''}"
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} is built without CUDA, so it does not use the {gpus} that the driver sees; "
            "install a build for CUDA"
        )
    if not there:
        return f"the NVIDIA driver {driver.version} sees no GPU; have its kernel module and the GPUs checked"
    if hides is not None:
        return f"{_VISIBLE}={hides!r} hides the {gpus} of this machine; unset or correct it"
    if driver.cuda is not None and int(torch.version.cuda.split(".")[0]) > driver.cuda[0]:
        return (
            f"PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}, and the driver {driver.version} "
            f"supports up to CUDA {'.'.join(map(str, driver.cuda))}; update the driver, or install a build for that"
        )
    return f"PyTorch does not use the {gpus} that the driver sees ({warned or 'it gives no reason'})"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_of_slurm(environment: Mapping[str, str]) -> int | None:
    """Return the bytes that the job may take on this node; None if Slurm does not say."""
    per_node = _number(environment, "SLURM_MEM_PER_NODE")
    if per_node:
        return per_node * _MEBIBYTE
    per_core, cores = _number(environment, "SLURM_MEM_PER_CPU"), _number(environment, "SLURM_CPUS_ON_NODE")
    return None if not per_core or not cores else per_core * cores * _MEBIBYTE


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else None  # noqa: PLR2004 - 64 bits


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, _COLUMNS, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
