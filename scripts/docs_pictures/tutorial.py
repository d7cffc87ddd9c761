"""Runs the tutorial's scripts in an empty folder, and keeps what they print and measure for the documentation."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "tutorial"
PAGE = ROOT / "docs" / "tutorial.md"
MEASURED = Path(__file__).resolve().parent / "measured"
IMAGES = ROOT / "docs" / "images"
KILLED = -9
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Runs a script as `python SCRIPT` does, and keeps a value of it afterwards.
KEEPING = """
import json, runpy, sys
names = runpy.run_path(sys.argv[1], run_name="__main__")
with open("kept.json", "w") as file:
    json.dump(eval(sys.argv[2], names), file)
"""
HISTORY = "[{'step': step.step, 'loss': step.loss} for step in result.history]"


def run() -> None:
    """Run all steps, and write the page with what they printed, and what they measured."""
    printed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for script in SCRIPTS.glob("*.py"):
            shutil.copy(script, place)
        undisturbed = _step(place, printed, "trains", keep=HISTORY)
        _step(place, printed, "dies", expected=1)
        _step(place, printed, "resumes", "--power-cut", expected=KILLED)
        _step(place, printed, "resumes")
        report = _step(place, printed, "reports", keep="report.to_dict()")
        attempts = _attempts((place / "run.jsonl").read_text(encoding="utf-8"))
    kept = {"undisturbed": undisturbed, "attempts": attempts, "report": report}
    (MEASURED / "tutorial.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    cores = len(os.sched_getaffinity(0))
    versions = f"Python {platform.python_version()}, PyTorch {version('torch')}"
    where = f"Run on {cores} cores without a GPU ({_processor()}), {versions}."
    PAGE.write_text(re.sub(r"(?m)^Run on .*$", where, _with_outputs(page(), printed)), encoding="utf-8")


def page() -> str:
    """Return the page with the scripts as they are now."""

    def script(found: re.Match[str]) -> str:
        return f'```python title="{found[1]}"\n{(SCRIPTS / found[1]).read_text(encoding="utf-8").strip()}\n```'

    return re.sub(r'```python title="([\w.]+)"\n.*?```', script, PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def _with_outputs(text: str, printed: dict[str, str]) -> str:
    def output(found: re.Match[str]) -> str:
        return f"```text\n{found[1]}\n{printed[found[1]].strip()}\n```"

    return re.sub(r"```text\n(\$ python [^\n]+)\n.*?```", output, text, flags=re.DOTALL)


def _step(place: Path, printed: dict[str, str], script: str, *options: str, expected: int = 0, keep: str = "") -> Any:
    """Run one script, and keep what it prints by what a user types."""
    command = [sys.executable, f"{script}.py", *options]
    if keep:
        command = [sys.executable, "-c", KEEPING, f"{script}.py", keep]
    own = {"AUTOACCUM_CACHE_DIR": str(place / "cache"), "PYTHONUNBUFFERED": "1"}
    environment, both = os.environ | own, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=place, env=environment, text=True, check=False, **both)  # noqa: S603
    if done.returncode != expected:
        raise SystemExit(f"{script}.py ended with {done.returncode} instead of {expected}:\n{done.stdout}")
    said = done.stdout.replace(f"{place}/", "") + ("Killed\n" if done.returncode == KILLED else "")
    if done.returncode == 1:  # the traceback leads through PyTorch
        said = f"Traceback (most recent call last):\n  ...\n{said.strip().splitlines()[-1]}"
    said = "".join(line for line in said.splitlines(keepends=True) if not re.search(r"epoch \d/\d, step", line))
    if "\nMemory of a step" in said:
        said = f"{said.partition(chr(10) + 'Memory of a step')[0].rstrip()}\n..."
    printed[" ".join(["$ python", f"{script}.py", *options])] = said
    return json.loads((place / "kept.json").read_text(encoding="utf-8")) if keep else None


def _attempts(log: str) -> list[list[dict[str, Any]]]:
    """Return the optimizer steps of the log, those of each process by themselves."""
    attempts: list[list[dict[str, Any]]] = []
    for event in map(json.loads, log.splitlines()):
        if event["event"] == "fit_start":
            attempts.append([])
        elif event["event"] == "step":
            attempts[-1].append({"step": event["step"], "loss": event["loss"]})
    return attempts


def browse(page: str, picture: Path, size: str, home: Path) -> None:
    """Take a picture of a page, if there is a browser."""
    if BROWSER is None:
        print(f"no chromium on the PATH: {picture.name} stays as it is", file=sys.stderr)
        return
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--timeout=8000"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={home}"]
    command += ["--blink-settings=preferredColorScheme=1", f"--window-size={size}", "--force-device-scale-factor=1.6"]
    command += [f"--screenshot={picture}", page]
    subprocess.run(  # noqa: S603
        command, capture_output=True, check=True, timeout=120, env=os.environ | {"HOME": str(home)}
    )  # fmt: skip


def _processor() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return "AMD EPYC" if names and "EPYC" in names[0] else (names or [platform.machine()])[0]
