"""Commands under `autoaccum run`, as real processes."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

# For a machine that others use, too; shorter than the time that a test has.
LONG_S = 240
WRAPPER = [sys.executable, "-m", "autoaccum", "run"]


def start(command, *options, **more):
    words = [str(word) for word in (*WRAPPER, *options, "--", *command)]
    environment = os.environ | more.pop("variables", {})
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
    return subprocess.Popen(words, env=environment, **more)


def run(command, *options, **more):
    process = start(command, *options, **more)
    out, err = process.communicate(timeout=LONG_S)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def told(ended):
    return [line for line in ended.stderr.splitlines() if line.startswith("autoaccum: ")]


def python(source, *arguments):
    """A command that runs a program of Python's without anything around it: it starts in no time."""
    return [sys.executable, "-I", "-S", "-c", source, *map(str, arguments)]


def until(condition):
    """Wait for a condition to give something, and return that."""
    deadline = time.monotonic() + LONG_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.005)
    return found


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False
