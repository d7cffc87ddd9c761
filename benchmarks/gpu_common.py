"""Shared by the parts of gpu.py: recording findings, describing the machine, time and memory.

Run directly, it prints as JSON the card, the driver, versions and missing packages.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
MIB = 2**20
# Import names; those of the first line are required.
NEEDED = ("torch", "numpy", "psutil", "optree", "rich", "typer")
USED = ("pynvml", "torchvision", "transformers", "lightning", "accelerate", "pytest", "hypothesis")
_DISTRIBUTIONS = {"pynvml": "nvidia-ml-py"}


# --- what is found ----------------------------------------------------------------------------------------------------


class Findings:
    """The findings of a part, written to its file after each entry, so that a killed part keeps them.

    Args:
        path: The file.
        budget_s: The part's time limit in seconds.
    """

    def __init__(self, path, budget_s):
        self._path = Path(path)
        self._ends = time.monotonic() + budget_s
        self.rows = []
        self.data = {}
        self.error = None
        self.finished = False
        self.write()

    def left_s(self):
        """Return the seconds left."""
        return self._ends - time.monotonic()

    def add(self, what, found, *, ok=None, **data):
        """Record one finding.

        Args:
            what: Its subject.
            found: The result, as text.
            ok: Whether it is as promised; None if nothing was promised.
            data: The result, as data.
        """
        self.rows.append({"what": what, "found": str(found), "ok": ok})
        if data:
            self.data[what] = data
        mark = {True: "ok", False: "NOT AS PROMISED", None: "-"}[ok]
        print(f"{what}: {found} [{mark}]", flush=True)
        self.write()

    def write(self):
        """Write the file under a temporary name, then rename it."""
        record = {"finished": self.finished, "rows": self.rows, "data": self.data, "error": self.error}
        replace_text(self._path, json.dumps(record, indent=1, default=str))


def replace_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)


def run_part(part, description):
    """Run a part as a program: `part(findings, options)`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the code without a card")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    findings = Findings(options.out, options.budget)
    try:
        part(findings, options)
        findings.finished = True
    except BaseException:  # noqa: BLE001 - however it ends, what was found is kept
        findings.error = traceback.format_exc()
        traceback.print_exc()
    findings.write()
    sys.stdout.flush()
    sys.stderr.flush()
    # A broken device may disturb the interpreter's exit, which no longer matters.
    os._exit(0 if findings.finished else 1)


def child_environment(**further):
    """Return the environment in which parts and their children can import the package without an installation."""
    paths = [ROOT / "src", ROOT / "benchmarks", ROOT / "tests"]
    already = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = os.pathsep.join([*map(str, paths), *already])
    settings = {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_MODULE_LOADING": "LAZY",  # torch sets this itself, and the tests would see the change
    }
    return os.environ | settings | further


def start_child(script, *arguments, **pipes):
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    return subprocess.Popen(command, env=child_environment(), text=True, **pipes)


def last_json(text):
    """Return the last line of an output that is JSON; None if there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return None


# --- the machine ------------------------------------------------------------------------------------------------------


def missing(names):
    return [name for name in names if importlib.util.find_spec(name) is None]


def describe():
    """Describe the machine; if torch is missing, say that."""
    names = {name: _DISTRIBUTIONS.get(name, name) for name in NEEDED + USED}
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "missing": missing(NEEDED),
        "missing_optional": missing(USED),
        "versions": {name: _version(name) for name in names.values()},
        "available": False,
        "name": "cpu",
    }
    if found["missing"]:
        return found
    try:
        import autoaccum  # noqa: F401, PLC0415 - something that it needs may be missing
    except ModuleNotFoundError as error:
        found["missing"] = [error.name]
        return found
    import torch  # noqa: PLC0415 - it may be what is missing

    found["available"] = torch.cuda.is_available()
    if found["available"]:
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        found |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "total_bytes": total,
            "free_bytes": free,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def _version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver():
    try:
        import pynvml  # noqa: PLC0415 - it may be missing

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version
    except Exception:  # noqa: BLE001 - whatever is wrong with it, there is another way
        smi = shutil.which("nvidia-smi")
        if smi is None:
            return None
        asked = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


# --- memory and time --------------------------------------------------------------------------------------------------


def settle(device):
    """Free everything unreferenced, to come close to the memory of a fresh process."""
    import torch  # noqa: PLC0415

    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait_for(device):
    import torch  # noqa: PLC0415

    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(device, function):
    """Return the seconds of a function, synchronizing the device before and after."""
    wait_for(device)
    started = time.perf_counter()
    function()
    wait_for(device)
    return time.perf_counter() - started


def in_turn(device, functions, rounds, *, warm_up=2, left_s=lambda: 1e9):
    """Time functions in turn, in an order that is reversed each round.

    Returns:
        The seconds of each round, by name; rounds end early if the time is up.
    """
    times = {name: [] for name in functions}
    for number in range(rounds + warm_up):
        if number > warm_up and left_s() < 0:
            break
        names = list(functions) if number % 2 else list(functions)[::-1]
        took = {name: timed(device, functions[name]) for name in names}
        if number >= warm_up:
            for name, seconds in took.items():
                times[name].append(seconds)
    return times


def quartiles(values):
    """Return lower quartile, median and upper quartile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], statistics.median(ordered), ordered[(3 * len(ordered)) // 4]


def spread(values, unit="", digits=3):
    low, median, high = quartiles(values)
    return f"{median:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def size(n_bytes):
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"


if __name__ == "__main__":
    print(json.dumps(describe()))
