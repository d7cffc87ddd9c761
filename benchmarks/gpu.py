"""Runs what needs a card in one command: tests, real out-of-memory errors, the probe against the truth, overhead.

    PYTHONPATH=src python benchmarks/gpu.py [--out benchmarks/results/] [--budget 470] [--parts probe,overhead]

It needs no network, no make and no installation. Each part is a program (gpu_*.py) with its own time limit, so that one
that crashes, hangs or breaks the device does not stop the others. After each part two files are written, named after
the card: all results as JSON, and a table. Without a card it says so and runs nothing.

It requires torch and the package's own imports (optree, psutil, platformdirs, others). If torchvision, transformers,
lightning, accelerate, pytest or hypothesis is missing, what uses it is left out. Install extra packages rather than put
them on PYTHONPATH: the tests of host memory replace that variable, and are then left out.

It exits with 0 if every part was completed and found what is promised, otherwise with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_common import ROOT, child_environment, last_json, replace_text

_TAIL_LINES = 40
# With less time left, a part is not started: importing torch and making a context takes much of it.
_LEAST_S = 15.0
# A part is asked to finish shortly before it is killed.
_GRACE_S = 4.0


@dataclass(frozen=True)
class Part:
    """One part of the benchmark.

    Attributes:
        name: As in `--parts`.
        title: Its subject.
        script: The program, in this folder.
        budget_s: Its time limit in seconds.
    """

    name: str
    title: str
    script: str
    budget_s: float


PARTS = (
    Part("contract", "The tests on a card", "gpu_contract.py", 75),
    Part("failures", "Memory runs out, bit for bit", "gpu_failures.py", 75),
    Part("resnet101", "ResNet-101, target batch 100 where about 50 fit", "gpu_resnet101.py", 60),
    Part("neighbour", "A neighbour takes the card's memory and gives it back", "gpu_neighbour.py", 45),
    Part("lost", "A device that can no longer be used", "gpu_lost.py", 45),
    Part("probe", "The probe against the truth and other finders", "gpu_probe.py", 130),
    Part("estimates", "Predicted memory against the card's own count", "gpu_estimates.py", 60),
    Part("overhead", "The runner beside loops written by hand, and the transfer", "gpu_overhead.py", 75),
    Part("gpt2", "GPT-2 in bf16", "gpu_gpt2.py", 60),
)


def run_child(command, timeout_s, log):
    """Run a program in its own process group and end the group with it; return its code, None if it hung."""
    # Results of earlier runs must not help this one.
    environment = child_environment(AUTOACCUM_CACHE_DIR=str(log.with_suffix(".cache")))
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True, cwd=ROOT
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Its children belong to its group, and must not keep memory of the card.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_part(part, options, timeout_s, folder):
    """Run a part; return its record, whatever happened."""
    out, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    command = [sys.executable, str(Path(options.scripts) / part.script), "--out", str(out), "--device", options.device]
    command += ["--budget", str(max(1.0, timeout_s - _GRACE_S)), *(["--tiny"] if options.tiny else [])]
    started = time.monotonic()
    code = run_child(command, timeout_s, log)
    record = {"rows": [], "data": {}, "error": None, "finished": False}
    with contextlib.suppress(OSError, ValueError):
        record |= json.loads(out.read_text())
    record |= {"title": part.title, "seconds": round(time.monotonic() - started, 1), "code": code}
    if code is None:
        record["status"] = f"stopped after {timeout_s:.0f} s"
    elif code < 0:
        record["status"] = f"killed by signal {-code}"
    else:
        record["status"] = "done" if code == 0 and record["finished"] else f"failed with code {code}"
    if record["status"] != "done" or any(row["ok"] is False for row in record["rows"]):
        record["log"] = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return record


def not_run(part, why):
    return {"title": part.title, "status": f"not run: {why}", "rows": [], "data": {}, "error": None, "seconds": 0.0}


def is_good(record):
    return record["status"] == "done" and all(row["ok"] is not False for row in record["rows"])


def table(machine, parts, seconds):
    """Return all findings as one Markdown table."""
    versions = machine.get("versions", {})
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = machine.get("missing_optional") or []
    lines = [
        f"# {machine['name']}",
        "",
        f"Driver {machine.get('driver')}, CUDA {machine.get('cuda')}, cuDNN {machine.get('cudnn')}, "
        f"Python {machine.get('python')}, {machine.get('cores')} cores; {listed}."
        + (f" Missing: {', '.join(missing)}." if missing else ""),
        "",
        f"{seconds:.0f} s in all.",
        "",
        "| part | what | found | as promised |",
        "|---|---|---|---|",
    ]
    for name, record in parts.items():
        whole = "yes" if is_good(record) else "NO"
        if record["status"].startswith("not run"):
            whole = ""
        lines.append(f"| **{name}** | {record['title']} | {record['status']}, {record['seconds']:.0f} s | {whole} |")
        for row in record["rows"]:
            mark = {True: "yes", False: "NO", None: ""}[row["ok"]]
            lines.append("| " + " | ".join(map(_cell, ("", row["what"], row["found"], mark))) + " |")
        if record["error"]:
            lines.append(f"| | error | {_cell(record['error'].strip().splitlines()[-1])} | NO |")
    return "\n".join(lines) + "\n"


def _cell(text):
    return " ".join(str(text).split()).replace("|", "\\|")


def file_name(machine_name):
    return "gpu-" + re.sub(r"[^A-Za-z0-9.]+", "-", machine_name).strip("-")


def ask_what_there_is():
    """Ask a child process, so that this one uses no memory of the card."""
    script = str(Path(__file__).with_name("gpu_common.py"))
    done = subprocess.run(
        [sys.executable, script], env=child_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    machine = last_json(done.stdout)
    if machine is None:
        raise SystemExit(f"what there is could not be found out:\n{done.stderr[-3000:]}")
    return machine


def run(machine, parts, options):
    """Run the parts one after another, writing after each; return the exit code."""
    started = time.monotonic()
    records = {}
    path = options.out / file_name(machine["name"])
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        for part in parts:
            left_s = options.budget - (time.monotonic() - started)
            timeout_s = min(part.budget_s, left_s)
            if timeout_s < min(_LEAST_S, part.budget_s):
                record = not_run(part, "the time is over")
            else:
                print(f"{part.name}: {part.title} (at most {timeout_s:.0f} s) ...", flush=True)
                record = run_part(part, options, timeout_s, Path(folder))
            records[part.name] = record
            print(f"{part.name}: {record['status']}, {record['seconds']:.0f} s", flush=True)
            for row in record["rows"]:
                print(f"  {'!!' if row['ok'] is False else '  '} {row['what']}: {row['found']}", flush=True)
            for line in record.get("log", ())[-12:]:
                print(f"     > {line}", flush=True)
            write(path, machine, records, time.monotonic() - started)
    print(f"written: {path}.json, {path}.md")
    return 0 if all(map(is_good, records.values())) else 1


def write(path, machine, records, seconds):
    record = {"machine": machine, "seconds": round(seconds, 1), "parts": records}
    record["written"] = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    # A dot in a card's name is not a suffix.
    replace_text(path.with_name(path.name + ".json"), json.dumps(record, indent=1) + "\n")
    replace_text(path.with_name(path.name + ".md"), table(machine, records, seconds))


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the two files")
    parser.add_argument("--budget", type=float, default=470.0, help="seconds for all parts together")
    parser.add_argument("--parts", default="", help=f"only these: {','.join(part.name for part in PARTS)}")
    # To try the parts' code without a card.
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--scripts", default=str(Path(__file__).parent), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    wanted = [name for name in options.parts.split(",") if name]
    unknown = set(wanted) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return options, [part for part in PARTS if not wanted or part.name in wanted]


def main(arguments=None):
    options, parts = parse(arguments)
    machine = ask_what_there_is()
    if machine["missing"]:
        print(f"missing here, and needed: {', '.join(machine['missing'])}; nothing was run")
        return 2
    if options.device != "cpu" and not machine["available"]:
        print("there is no CUDA card here: nothing was run")
        return 0
    if machine["missing_optional"]:
        print(f"missing here, what needs them is left out: {', '.join(machine['missing_optional'])}")
    if options.device == "cpu":
        machine["name"] = "cpu"
    # So that the running part's processes end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run(machine, parts, options)


if __name__ == "__main__":
    sys.exit(main())
