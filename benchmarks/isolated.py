"""Runs functions in child processes, which cannot hang or crash the caller.

Children are forked from a process that has only imported the libraries, so each starts as fresh as after an import,
without its seconds. A child's output goes to a file, whose end is reported if the child dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
_TOLD_LINES = 100
PRELOADED = ["torch", "torchvision.models", "autoaccum", "lightning.pytorch", "accelerate"]


class GoneError(Exception):
    """A child died, raised or did not answer in time; the text says which."""


def prepare(preloaded=PRELOADED):
    """Start the process that children are forked from, with these modules imported."""
    CONTEXT.set_forkserver_preload(list(preloaded))
    call(_nothing, timeout_s=600)


class Child:
    """One process that runs `function(connection, *arguments)` and talks over the connection."""

    def __init__(self, function, *arguments):
        self._log = Path(tempfile.mkstemp(prefix="bench-")[1])
        self._ours, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_main, args=(theirs, str(self._log), function, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message):
        """Send a message to the child."""
        try:
            self._ours.send(message)
        except OSError as error:
            raise GoneError(self._how_it_ended()) from error

    def receive(self, timeout_s):
        """Return the next ("told" or "done", value).

        Raises:
            GoneError: No message will arrive.
        """
        if not self._ours.poll(timeout_s):
            raise GoneError(f"no answer within {timeout_s:.0f} s")
        try:
            kind, value = self._ours.recv()
        except (EOFError, OSError) as error:
            raise GoneError(self._how_it_ended()) from error
        if kind == "raised":
            raise GoneError(value)
        return kind, value

    def end(self):
        """End it, if it is still running."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._ours.close()
        self._log.unlink(missing_ok=True)

    def _how_it_ended(self):
        self._process.join(5)
        code = self._process.exitcode
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        print(*lines[-_TOLD_LINES:], sep="\n", file=sys.stderr)
        last = lines[-1:]
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return f"died: {how}" + (f" ({last[0].strip()[:160]})" if last else "")


def call(function, *arguments, timeout_s):
    """Run a function in a child; return its messages and its value.

    Returns:
        The list of messages, the value (None if it did not return), and why it did not return (otherwise None).
    """
    child = Child(function, *arguments)
    told, ends_s = [], time.monotonic() + timeout_s
    try:
        while True:
            kind, value = child.receive(max(0.0, ends_s - time.monotonic()))
            if kind == "done":
                return told, value, None
            told.append(value)
    except GoneError as error:
        return told, None, str(error)
    finally:
        child.end()


def tell(connection, value):
    connection.send(("told", value))


def _nothing(_connection):
    return None


def _main(connection, log, function, arguments):
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        message = ("done", function(connection, *arguments))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent wants to know
        traceback.print_exc()
        # Its frames hold the memory needed to report the error.
        error.__traceback__ = None
        text = (str(error).strip() or repr(error)).splitlines()[0]
        message = ("raised", f"{type(error).__name__}: {text[:200]}")
    connection.send(message)
