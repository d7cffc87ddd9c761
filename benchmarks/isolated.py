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


def prepare(preloaded=PRELOADED):
    """Start the process that children are forked from, with these modules imported."""
    CONTEXT.set_forkserver_preload(list(preloaded))
    call(_nothing, timeout_s=600)


def call(function, *arguments, timeout_s):
    """Run `function(connection, *arguments)` in a child; return what it told over the connection, and its value.

    Returns:
        The list of messages, the value (None if it did not return), and why it did not return (otherwise None).
    """
    log = Path(tempfile.mkstemp(prefix="bench-")[1])
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_main, args=(theirs, str(log), function, arguments), daemon=True)
    process.start()
    theirs.close()
    told, ends_s = [], time.monotonic() + timeout_s
    try:
        while ours.poll(max(0.0, ends_s - time.monotonic())):
            kind, value = ours.recv()
            if kind == "done":
                return told, value, None
            if kind == "raised":
                return told, None, value
            told.append(value)
        return told, None, f"no answer within {timeout_s:.0f} s"
    except (EOFError, OSError):
        return told, None, _how_it_ended(process, log)
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        ours.close()
        log.unlink(missing_ok=True)


def _how_it_ended(process, log):
    process.join(5)
    code = process.exitcode
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    print(*lines[-_TOLD_LINES:], sep="\n", file=sys.stderr)
    how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return f"died: {how}" + (f" ({lines[-1].strip()[:160]})" if lines else "")


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
