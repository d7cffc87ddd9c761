"""Part of gpu.py: the contract tests of the memory backends and the tests marked gpu, run with pytest."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

from gpu_common import NEEDED, ROOT, child_environment, missing, run_part

_TEXT_CHARS = 1500


def tests(findings, options):
    """Run pytest and read its report."""
    lacking = missing(["pytest", "hypothesis"])
    if lacking:
        findings.add("tests", f"not run: {', '.join(lacking)} missing")
        return
    # The project's settings name a plugin's option, for which pytest warns if the plugin is missing.
    settings = ["-W", "ignore::pytest.PytestConfigWarning"] if missing(["pytest_timeout"]) else []
    strays = [name for name in (*NEEDED, "platformdirs") if not _is_installed(name)]
    if strays:
        findings.add("tests of the host's memory", f"left out: their processes would not find {', '.join(strays)}")
        settings += ["-k", "not host"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        where = ["tests/memory/test_base.py"] if options.tiny else ["tests/memory", "tests/gpu"]
        # Without the project's options, which need plugins that may be missing.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *settings, f"--junitxml={report}"]
        command += ["-o", "addopts=", "--import-mode=importlib", "-ra", *where]
        timeout_s = max(5.0, findings.left_s() - 3)
        environment = child_environment(CUBLAS_WORKSPACE_CONFIG=":4096:8")
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            findings.add("tests", f"not done after {timeout_s:.0f} s", ok=False)
            return
        if not report.exists():
            findings.add("tests", f"pytest ended with {done.returncode} and no report", ok=False)
            return
        read(findings, ET.parse(report).getroot())  # noqa: S314 - our own report


def read(findings, root):
    """Record the results of a JUnit report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    on_card = 0
    failures, skips = {}, {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        failed = [*case.findall("failure"), *case.findall("error")]
        skipped = case.find("skipped")
        if failed:
            counts["failed"] += 1
            failures[name] = (failed[0].text or failed[0].get("message") or "")[-_TEXT_CHARS:]
        elif skipped is not None:
            counts["skipped"] += 1
            skips[name] = skipped.get("message")
        else:
            counts["passed"] += 1
        on_card += skipped is None and ("[cuda" in name or ".gpu." in name)
    found = ", ".join(f"{number} {what}" for what, number in counts.items())
    findings.add("tests", f"{found}; {on_card} of them on the card", ok=not counts["failed"], **counts, skips=skips)
    for name, text in failures.items():
        last = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-1:]
        findings.add(name, last[0] if last else "failed", ok=False, text=text)


def _is_installed(name):
    """Whether a package is found without PYTHONPATH, which the tests of host memory replace."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return True  # then nothing needs it
    places = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return not any(place in Path(spec.origin).resolve().parents for place in places)


if __name__ == "__main__":
    run_part(tests, __doc__)
