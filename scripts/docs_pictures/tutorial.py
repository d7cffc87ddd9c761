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
OUTPUT = ROOT / "docs" / "output"
IMAGES = ROOT / "docs" / "images"
KILLED = -9
# The page that its scripts write, with the size of its picture.
SCREENSHOTS = {"report": "1000,640"}
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
    """Run all steps, and write docs/output/ and the pictures of pages."""
    OUTPUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for script in SCRIPTS.glob("*.py"):
            shutil.copy(script, place)
        _step(place, "dies", expected=1)
        undisturbed = _step(place, "trains", keep=HISTORY)
        _step(place, "resumes", "--power-cut", expected=KILLED, name="killed")
        _step(place, "resumes")
        report = _step(place, "reports", keep="report.to_dict()")
        attempts = _attempts((place / "run.jsonl").read_text(encoding="utf-8"))
        for page, size in SCREENSHOTS.items():
            browse((place / f"{page}.html").as_uri(), IMAGES / f"tutorial-{page}.png", size, place / f"home-{page}")
    kept = {"undisturbed": undisturbed, "attempts": attempts, "report": report}
    (OUTPUT / "tutorial.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    cores = len(os.sched_getaffinity(0))
    versions = f"Python {platform.python_version()}, PyTorch {version('torch')}"
    where = f"Run on {cores} cores without a card ({_processor()}), {versions}.\n"
    (OUTPUT / "machine.txt").write_text(where, encoding="utf-8")


def _step(place: Path, script: str, *options: str, expected: int = 0, keep: str = "", name: str = "") -> Any:
    """Run one script, and write what it prints to docs/output/."""
    command = [sys.executable, f"{script}.py", *options]
    if keep:
        command = [sys.executable, "-c", KEEPING, f"{script}.py", keep]
    own = {"AUTOACCUM_CACHE_DIR": str(place / "cache"), "PYTHONUNBUFFERED": "1"}
    environment, both = os.environ | own, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=place, env=environment, text=True, check=False, **both)  # noqa: S603
    if done.returncode != expected:
        raise SystemExit(f"{script}.py ended with {done.returncode} instead of {expected}:\n{done.stdout}")
    said = re.sub(r'"/[^"]*/(site-packages/)', r'".../\1', done.stdout).replace(f"{place}/", "")
    said += "Killed\n" if done.returncode == KILLED else ""
    typed = " ".join(["$ python", f"{script}.py", *options])
    (OUTPUT / f"tutorial-{name or script}.txt").write_text(f"{typed}\n{said}", encoding="utf-8")
    return json.loads((place / "kept.json").read_text(encoding="utf-8")) if keep else None


def _attempts(log: str) -> list[list[dict[str, Any]]]:
    """Return the updates of the log, those of each process by themselves."""
    attempts: list[list[dict[str, Any]]] = []
    for event in map(json.loads, log.splitlines()):
        if event["event"] == "fit_start":
            attempts.append([])
        elif event["event"] == "step":
            attempts[-1].append({"step": event["step"], "loss": event["loss"]})
    return attempts


def browse(page: str, picture: Path, size: str, home: Path, *, is_dark: bool = False) -> None:
    """Take a picture of a page, if there is a browser."""
    if BROWSER is None:
        print(f"no chromium on the PATH: {picture.name} stays as it is", file=sys.stderr)
        return
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--timeout=8000"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={home}"]
    command += [f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", f"--window-size={size}"]
    command += [f"--screenshot={picture}", page]
    subprocess.run(  # noqa: S603
        command, capture_output=True, check=True, timeout=120, env=os.environ | {"HOME": str(home)}
    )  # fmt: skip


def _processor() -> str:
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return "AMD EPYC" if names and "EPYC" in names[0] else (names or [platform.machine()])[0]
