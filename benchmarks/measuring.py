"""What the benchmarks share: functions timed in turn, quartiles, the machine, results that are kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import time
from pathlib import Path

import psutil
import torch

DISTRIBUTIONS = ("autoaccum", "torch", "torchvision", "lightning", "accelerate")


def quartiles(values):
    """Return the lower quartile, the median and the upper quartile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], statistics.median(ordered), ordered[(3 * len(ordered)) // 4]


def spread(values, unit="", digits=2):
    return told(quartiles(values), unit, digits)


def told(three, unit="", digits=2):
    """Return quartiles as text: the median, and the others in brackets."""
    low, median, high = three
    return f"{median:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def wait_for(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def in_turn(functions, rounds, *, device="cpu", warm_up=2, has_time=lambda: True):
    """Time functions in turn, in an order that is reversed each round; return the seconds of each round by name."""
    times = {name: [] for name in functions}
    for number in range(rounds + warm_up):
        if number > warm_up and not has_time():
            break
        for name in list(functions)[:: 1 if number % 2 else -1]:
            wait_for(device)
            began = time.perf_counter()
            functions[name]()
            wait_for(device)
            if number >= warm_up:
                times[name].append(time.perf_counter() - began)
    return times


def processor():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine(also=()):
    """Describe the machine, with the versions of packages."""
    versions = {"Python": platform.python_version(), "glibc": platform.libc_ver()[1]}
    for name in (*DISTRIBUTIONS, *also):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "os": f"{platform.system()} {platform.release()}",
        "load": os.getloadavg()[0],
        "versions": versions,
    }


def keep(path, results):
    """Write results beside their place, and rename them."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(results, indent=1) + "\n")
        temporary.replace(path)


def write_into(page, text, name):
    """Replace the text between the markers of a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    old = page.read_text()
    page.write_text(f"{old.split(begin)[0]}{begin}\n\n{text}\n\n{end}{old.split(end)[1]}")
