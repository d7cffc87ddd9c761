"""Processes under `autoaccum run`: what passes through, and which signals arrive where. All of it for real."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from support.processes.wrapped import LONG_S, is_running, python, run, start, told, until

NOISY = """
import os, sys
for number in range(2000):
    os.write(1, b"%d\\r" % number)
    os.write(2, b"%d\\r\\n\\x00" % number)
sys.exit(3)
"""
# Says in a file that it is ready, then waits to be signalled.
WAITING = """
import os, signal, sys, time
folder = sys.argv[1]
def note(number, _):
    with open(folder + "/signals", "a") as file:
        file.write(signal.Signals(number).name + "\\n")
for name in sys.argv[2:]:
    signal.signal(getattr(signal, name), note)
with open(folder + "/ready.unfinished", "w") as file:
    file.write(str(os.getpid()))
os.rename(folder + "/ready.unfinished", folder + "/ready")
while not os.path.exists(folder + "/go"):
    time.sleep(0.01)
"""
# A daemon as they are made: it leaves its session, keeps stderr, and its parent ends.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1], "w") as file:
            file.write(str(os.getpid()))
        while True:
            os.write(2, b".")
            time.sleep(0.01)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
"""


def pid_when_ready(folder):
    until((folder / "ready").exists)
    return int((folder / "ready").read_text())


def test_output_and_exit_code_are_those_of_the_command_alone():
    alone = subprocess.run(python(NOISY), capture_output=True, check=False)

    wrapped = run(python(NOISY), text=False)

    assert (wrapped.returncode, wrapped.stdout, wrapped.stderr) == (3, alone.stdout, alone.stderr)


def test_arguments_meet_no_shell(tmp_path):
    nasty = ["; touch touched", "$(touch touched)", "`touch touched`", "a b", "", "*", '{"a": {"b": [1]}}', "{epoch}"]

    ended = run(python("import sys; print(sys.argv[1:])", *nasty), cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (0, f"{nasty}\n")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("command", "code"), [(["/no/such/program"], 127), (["no-such-program"], 127), ([os.sep], 126)]
)
def test_what_cannot_be_started_has_a_shells_exit_code_and_a_reason(command, code):
    ended = run(command)

    assert ended.returncode == code
    assert told(ended) == ended.stderr.splitlines()
    assert f"{command[0]!r} cannot be started" in ended.stderr


@pytest.mark.parametrize("is_executable", [False, True])
def test_a_script_in_place_of_a_program_is_told_how_to_start_it(tmp_path, is_executable):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    script.chmod(0o755 if is_executable else 0o644)

    ended = run(["train.py" if not is_executable else "./train.py"], cwd=tmp_path)

    assert ended.returncode == 126
    assert "is not executable; write: autoaccum run ... -- python " in ended.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_reaches_the_command_once_and_its_own_exit_code_is_kept(tmp_path, name):
    with start(python(WAITING, tmp_path, name)) as wrapper:
        pid_when_ready(tmp_path)

        wrapper.send_signal(getattr(signal, name))
        until((tmp_path / "signals").exists)
        (tmp_path / "go").touch()

        assert wrapper.wait() == 0
    assert (tmp_path / "signals").read_text() == f"{name}\n"


@pytest.mark.slow  # the grace must be long enough for the command to hear of the signal, however busy the machine
def test_a_command_that_was_asked_to_end_has_its_grace_and_is_killed_then_with_its_whole_group(tmp_path):
    source = f"import os, sys\nif os.fork(): os.wait(); os.wait()\nelse:\n exec({WAITING!r})"
    with start(python(source, tmp_path, "SIGTERM"), "--grace", 4) as wrapper:
        child = pid_when_ready(tmp_path)

        wrapper.send_signal(signal.SIGTERM)

        assert wrapper.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "signals").read_text() == "SIGTERM\n"
    assert not is_running(child)


def test_a_command_that_was_asked_to_end_is_not_started_again(tmp_path):
    source = WAITING + "\nraise MemoryError('CUDA out of memory')"
    with start(python(source, tmp_path, "SIGTERM"), "--micro-batch", 8) as wrapper:
        pid_when_ready(tmp_path)
        wrapper.send_signal(signal.SIGTERM)
        until((tmp_path / "signals").exists)
        (tmp_path / "go").touch()

        _, err = wrapper.communicate()

    assert wrapper.returncode == 1
    assert "restarting" not in err


def test_a_signal_that_was_ignored_stays_ignored_for_the_command_too():
    source = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"

    ended = run(python(source), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))

    assert ended.stdout == "True\n"


def test_stopping_the_wrapper_stops_the_command_and_both_go_on(tmp_path):
    def state(pid):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]

    with start(python(WAITING, tmp_path)) as wrapper:
        child = pid_when_ready(tmp_path)

        wrapper.send_signal(signal.SIGTSTP)
        until(lambda: state(child) == "T" and state(wrapper.pid) == "T")
        wrapper.send_signal(signal.SIGCONT)
        until(lambda: state(child) != "T")
        (tmp_path / "go").touch()

        assert wrapper.wait() == 0


def test_a_signal_that_comes_while_the_command_starts_reaches_it():
    command = ["sh", "-c", 'trap "exit 7" USR1; kill -USR1 $PPID; for _ in 1 2 3 4 5; do sleep 0.2; done']

    ended = [wrapper.wait() for wrapper in [start(command, stdout=None, stderr=None) for _ in range(12)]]

    assert ended == [7] * 12


def test_a_daemon_that_the_command_leaves_and_that_writes_does_not_hang_the_wrapper(tmp_path):
    began = time.monotonic()

    ended = run(python(DAEMON, tmp_path / "pid"))

    with contextlib.suppress(ProcessLookupError):  # it may have written to a pipe that nobody reads
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert ended.returncode == 0
    assert time.monotonic() - began < 20


def test_what_a_command_leaves_in_its_group_is_ended_before_it_is_started_again(tmp_path):
    # A rank, say, that holds memory and does not hear SIGTERM.
    source = (
        "import os, signal, sys, time\n"
        "if os.environ['AUTOACCUM_ATTEMPT'] == '1': sys.exit(0)\n"
        "if os.fork() == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "    time.sleep(1000)\n"
        "while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read(): time.sleep(0.01)\n"
        "raise MemoryError\n"
    )

    ended = run(python(source, tmp_path / "pid"), "--micro-batch", 8, "--grace", 0.3)

    assert ended.returncode == 0
    assert not is_running(int((tmp_path / "pid").read_text()))


# As torchrun does with its ranks: each has a session of its own, and outlives a torchrun that ends.
IN_A_SESSION = """
import os, signal, sys, time
handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    with open(sys.argv[1] + "/ready.unfinished", "w") as file:
        file.write(str(os.getpid()))
    while not os.path.exists(sys.argv[1] + "/parent"):
        time.sleep(0.01)
    os.rename(sys.argv[1] + "/ready.unfinished", sys.argv[1] + "/ready")
else:
    if sys.argv[2] == "hears":
        signal.signal(signal.SIGTERM, handler)
    open(sys.argv[1] + "/parent", "w").close()
time.sleep(1000)
"""


@pytest.mark.parametrize(("parent", "ended"), [("hears", signal.SIGTERM), ("does not hear", signal.SIGKILL)])
def test_what_has_a_session_of_its_own_ends_with_a_command_that_was_asked_to_end(tmp_path, parent, ended):
    with start(python(IN_A_SESSION, tmp_path, parent), "--grace", 0.5) as wrapper:
        rank = pid_when_ready(tmp_path)

        wrapper.send_signal(signal.SIGTERM)

        assert wrapper.wait() == 128 + ended
    assert not is_running(rank)


def test_ranks_of_torchrun_have_the_grace_of_the_command():
    source = "import os; print(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])"

    assert run(python(source), "--grace", 120).stdout == "118\n"
    assert run(python(source), variables={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}).stdout == "7\n"


def test_the_command_ends_where_the_wrapper_itself_is_killed(tmp_path):
    with start(python(WAITING, tmp_path)) as wrapper:
        command = pid_when_ready(tmp_path)

        wrapper.kill()

        until(lambda: not is_running(command))


def test_a_reader_that_has_stopped_does_not_keep_the_wrapper_from_ending():
    with start(["sh", "-c", "echo; exec yes >&2"], "--grace", 1) as wrapper:
        wrapper.stdout.readline()
        until(lambda: select.select([wrapper.stderr], [], [], 0)[0])
        time.sleep(0.5)  # the pipe is full

        wrapper.send_signal(signal.SIGTERM)

        assert wrapper.wait(LONG_S) == 128 + signal.SIGTERM


def test_on_a_terminal_stderr_is_one_of_the_same_size_whose_bytes_are_unchanged():
    ours, theirs = pty.openpty()
    source = "import os; os.write(2, (b'%d %d %d\\n\\r' % (os.isatty(2), *os.get_terminal_size(2))))"
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 81, 0, 0))

    run(python(source), stderr=theirs)
    seen = os.read(ours, 4096)
    os.close(ours)
    os.close(theirs)

    assert seen == b"1 81 24\r\n\r"  # the outer terminal makes line ends, once


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["run", "--", "true"]])
def test_help_and_run_start_without_torch(arguments):
    source = (
        "import sys\nfrom autoaccum._cli.app import main\nsys.argv[1:] = " + repr(arguments) + "\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy'} & sys.modules.keys()), file=sys.stderr)"
    )

    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)

    assert ended.stderr == "[]\n"
