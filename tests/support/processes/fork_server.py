"""Python processes that have torch already: forked from one that imported it, which alone takes seconds.

`python()` begins a command as `sys.executable` would: what follows is "-c" and a program, "-m" and a module, or a file,
after "-W error" or without it. What is started is a small process that hands its streams, arguments, folder and
environment to the one that has torch, passes signals on, and ends as the process that was forked ends, which has a
heap, limits, threads and streams of its own: only what was imported comes from before. Variables that Python, glibc or
a library reads when it is loaded come too late, and /proc tells of another environment and parent: tests of those, and
of what an import does, take `sys.executable`.
"""

import atexit
import contextlib
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_MOST_BYTES = 1 << 20
_address = None


def python():
    """The first words of a command; the process to fork from is started when this is first asked for."""
    global _address  # noqa: PLW0603
    if not hasattr(os, "fork"):  # Windows
        return [sys.executable]
    if _address is None:
        _address = _start()
    return [sys.executable, "-I", "-S", __file__, _address]


def _start():
    # Not TemporaryDirectory: from Python 3.13 a loader's forked worker clears what is registered at exit, and with it
    # the last reference to the folder, which would then be removed for all processes.
    folder = tempfile.mkdtemp(prefix="warm-")
    address = f"{folder}/socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    with listener:
        origin = subprocess.Popen(
            [sys.executable, __file__, "--origin", str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # an interrupt at the keyboard is the tests'
        )

    def end():
        origin.stdin.close()  # by which it ends, however this process does
        origin.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    return address


# --- what a test starts -----------------------------------------------------------------------------------------------


def _stand_in(address, arguments):
    """Be the process that is forked for these arguments, as far as whoever started this one can tell."""
    came = []
    for name in _PASSED_ON:
        signal.signal(getattr(signal, name), lambda number, _: came.append(number))
    with socket.socket(socket.AF_UNIX) as origin:
        origin.connect(address)
        job = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109 - no import
        job["streams"] = [number for number in (0, 1, 2) if _is_open(number)]
        text = json.dumps(job, ensure_ascii=True).encode()
        socket.send_fds(origin, [len(text).to_bytes(8, "big")], job["streams"])
        origin.sendall(text)
        answers = origin.makefile("r")
        pid = int(answers.readline())
        for stream in job["streams"]:
            os.close(stream)  # else whoever reads them would wait for this process too
        wakes, waking = socket.socketpair()
        waking.setblocking(False)
        signal.set_wakeup_fd(waking.fileno())
        with selectors.DefaultSelector() as ready:
            ready.register(origin, selectors.EVENT_READ)
            ready.register(wakes, selectors.EVENT_READ)
            while True:
                while came:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, came.pop(0))
                readable = {key.fileobj for key, _ in ready.select()}
                if wakes in readable:
                    wakes.recv(64)
                if origin in readable:
                    break
        code = int(answers.readline() or 1)
    if code < 0:
        _die_by(-code)
    os._exit(code)


def _is_open(descriptor):
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def _die_by(number):
    import resource  # noqa: PLC0415 - rarely needed

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(1)


# --- what has torch ---------------------------------------------------------------------------------------------------


def _import_much():
    import gc  # noqa: PLC0415

    # What training, its optimizer and the command line bring; nothing is computed, so no thread is started.
    for name in ("torch._dynamo", "torch.distributed", "autoaccum", "rich.progress"):
        importlib.import_module(name)
    import autoaccum  # noqa: PLC0415

    for name in autoaccum.__all__:
        getattr(autoaccum, name)
    gc.collect()
    gc.freeze()  # else it is gone through whenever memory is given back, by every process for itself


class _Origin:
    """Forks a process for each connection, and tells each how that process ended."""

    def __init__(self, listener):
        self._listener = listener
        self._children = {}
        self._wakes, waking = socket.socketpair()
        self._wakes.setblocking(False)
        waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno())
        self._waking = waking
        self._ready = selectors.DefaultSelector()
        for waited in (listener, self._wakes, sys.stdin):
            self._ready.register(waited, selectors.EVENT_READ)

    def fork_on_demand(self):
        """Return in each process that was forked, with what it is to do; elsewhere never."""
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is self._listener:
                    if job := self._fork():
                        return job
                elif key.fileobj is self._wakes:
                    with contextlib.suppress(BlockingIOError):
                        self._wakes.recv(4096)
                elif key.fileobj is sys.stdin:
                    self._end()
                else:  # whoever waited for it was killed
                    os.kill(key.data, signal.SIGKILL)
                    self._ready.unregister(key.fileobj)
            self._tell_of_the_ended()

    def _fork(self):
        connection, _ = self._listener.accept()
        job, streams = _received(connection)
        for name in job["environment"].get("WARM_IMPORTS", "").split():
            importlib.import_module(name)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self._ready.close()
            for one in (self._wakes, self._waking, self._listener, connection, *self._children.values()):
                one.close()
            return job, streams
        for stream in streams:
            os.close(stream)
        self._children[pid] = connection
        self._ready.register(connection, selectors.EVENT_READ, pid)
        connection.sendall(f"{pid}\n".encode())
        return None

    def _end(self):
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _tell_of_the_ended(self):
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            connection = self._children.pop(pid)
            with contextlib.suppress(KeyError):
                self._ready.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()


def _received(connection):
    header, streams, *_ = socket.recv_fds(connection, 8, 3)
    n_bytes, text = int.from_bytes(header, "big"), b""
    while len(text) < n_bytes:
        text += connection.recv(min(_MOST_BYTES, n_bytes - len(text)))
    return json.loads(text), streams


def _become(job, streams):
    """Make this process what `job` asks for, and end as that ends."""
    for descriptor in (0, 1, 2):
        if descriptor not in job["streams"]:
            os.close(descriptor)
    for descriptor, stream in zip(job["streams"], streams, strict=True):
        os.dup2(stream, descriptor)
        os.close(stream)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    import numpy as np  # noqa: PLC0415

    np.random.seed()  # noqa: NPY002 - fork would let all processes draw the same
    code = _code_of(lambda: _run(job["arguments"]))
    # As Python ends, but without taking libraries down: they have much to say, and take their time.
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if code < 0:
        _die_by(-code)
    os._exit(code)


def _code_of(function):
    """The exit code of a process that runs a function; negative for a signal."""
    try:
        function()
    except SystemExit as asked:
        if asked.code is None or isinstance(asked.code, int):
            return (asked.code or 0) & 0xFF
        print(asked.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException as error:  # noqa: BLE001 - as Python itself does
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(arguments):
    import runpy  # noqa: PLC0415
    import types  # noqa: PLC0415
    import warnings  # noqa: PLC0415

    first, *rest = arguments
    if first == "-W":
        warnings.simplefilter(rest[0])
        first, *rest = rest[1:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first == "-m":
        sys.argv, sys.path[:1] = rest, ["", *paths]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-c":
        sys.argv, sys.path[:1] = ["-c", *rest[1:]], ["", *paths]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv, sys.path[:1] = [first, *rest], [str(Path(first).resolve().parent), *paths]
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, main.__dict__)  # noqa: S102 - it is what was asked for


if __name__ == "__main__":
    if sys.argv[1] == "--origin":
        _import_much()
        _become(*_Origin(socket.socket(fileno=int(sys.argv[2]))).fork_on_demand())
    else:
        _stand_in(sys.argv[1], sys.argv[2:])
