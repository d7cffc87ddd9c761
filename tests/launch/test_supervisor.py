"""Processes: what passes through, which signals arrive where, and that nothing stays behind. All of it for real."""

import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import time
from pathlib import Path

import pytest

from autoaccum._launch.supervisor import Supervisor
from wrapped import direct, is_running, python, run, start, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")

NOISY = """
import os, sys
for number in range(2000):
    os.write(1, b"\\xff%d\\r" % number)
    os.write(2, b"%d\\r\\n\\x00\\xfe" % number)
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
# A daemon as they are made: it leaves its session, and its parent ends.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + "/ready.unfinished", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + "/ready.unfinished", sys.argv[1] + "/ready")
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1] + "/ready"):
    time.sleep(0.01)
if "stay" in sys.argv:
    time.sleep(1000)
"""


def pid_when_ready(folder):
    until((folder / "ready").exists)
    return int((folder / "ready").read_text())


def test_output_and_exit_code_are_those_of_the_command_alone(tmp_path):
    command = python(NOISY)
    alone = direct(command)

    wrapper, code = run(tmp_path, command)

    assert code == alone.returncode == 3
    assert wrapper.out.read_bytes() == alone.stdout
    assert wrapper.err.read_bytes() == alone.stderr


def test_arguments_meet_no_shell(tmp_path):
    nasty = ["; touch touched", "$(touch touched)", "`touch touched`", "a b", "", "*", '{"a": {"b": [1]}}', "{unknown}"]

    wrapper, code = run(tmp_path, python("import sys; print(sys.argv[1:])", *nasty))

    assert code == 0
    assert wrapper.out.read_text() == f"{nasty}\n"
    assert not Path("touched").exists()


@pytest.mark.parametrize(("command", "code"), [(["/no/such/program"], 127), ([__file__], 126), ([os.sep], 126)])
def test_what_cannot_be_started_has_a_shells_exit_code_and_a_reason(tmp_path, command, code):
    wrapper, found = run(tmp_path, command)

    assert found == code
    assert f"{command[0]!r} cannot be started" in wrapper.told[0]


def test_a_signal_that_ends_the_command_is_passed_on_as_shells_do(tmp_path):
    _, code = run(tmp_path, python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))

    assert code == 128 + signal.SIGSEGV


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_a_signal_reaches_the_command_once_and_its_own_exit_code_is_kept(tmp_path, name):
    wrapper = start(tmp_path, python(WAITING, tmp_path, name))
    pid_when_ready(tmp_path)

    wrapper.send(getattr(signal, name))
    until((tmp_path / "signals").exists)
    (tmp_path / "go").touch()

    assert wrapper.wait() == 0
    assert (tmp_path / "signals").read_text() == f"{name}\n"


def test_a_signal_reaches_the_whole_group(tmp_path):
    source = f"import os, sys\nif os.fork(): os.wait(); os.wait()\nelse:\n exec({WAITING!r})"
    wrapper = start(tmp_path, python(source, tmp_path, "SIGUSR2"), grace_s=1)
    child = pid_when_ready(tmp_path)

    wrapper.send(signal.SIGTERM)

    assert wrapper.wait() == 128 + signal.SIGTERM
    assert not is_running(child)


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path):
    wrapper = start(tmp_path, python(WAITING, tmp_path, "SIGTERM"), grace_s=0.2)
    child = pid_when_ready(tmp_path)

    wrapper.send(signal.SIGTERM)

    assert wrapper.wait() == 128 + signal.SIGKILL
    assert not is_running(child)
    assert (tmp_path / "signals").read_text() == "SIGTERM\n"


def test_a_command_that_was_asked_to_end_is_not_started_again(tmp_path):
    source = WAITING + "\nopen(folder + '/go').close()\nraise MemoryError('CUDA out of memory')"
    wrapper = start(tmp_path, python(source, tmp_path, "SIGTERM"), target_batch=8)
    pid_when_ready(tmp_path)

    wrapper.send(signal.SIGTERM)
    until((tmp_path / "signals").exists)
    (tmp_path / "go").touch()

    assert wrapper.wait() == 1
    assert not any("; restarting, retry" in line for line in wrapper.told)


def test_a_command_that_ends_in_order_when_asked_to_is_not_taken_for_a_cut_that_works(tmp_path):
    wrapper = start(tmp_path, python(WAITING, tmp_path, "SIGTERM"), target_batch=8)
    pid_when_ready(tmp_path)
    wrapper.send(signal.SIGTERM)
    until((tmp_path / "signals").exists)
    (tmp_path / "go").touch()

    assert wrapper.wait() == 0
    assert not list(Path(os.environ["AUTOACCUM_CACHE_DIR"]).glob("plan-*"))


def test_a_signal_that_comes_before_there_is_a_command_reaches_it_once(tmp_path):
    with Supervisor(grace_s=30) as supervisor:
        signal.raise_signal(signal.SIGTERM)
        ended = supervisor.run(python("import time; time.sleep(1000)"), os.environ)

    assert ended.signal == supervisor.ended_by == signal.SIGTERM


def test_a_signal_that_was_ignored_stays_ignored_for_the_command_too(tmp_path):
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        source = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
        wrapper, _ = run(tmp_path, python(source))
    finally:
        signal.signal(signal.SIGHUP, former)

    assert wrapper.out.read_text() == "True\n"


def test_stopping_the_wrapper_stops_the_command_and_both_go_on(tmp_path):
    wrapper = start(tmp_path, python(WAITING, tmp_path))
    child = pid_when_ready(tmp_path)

    wrapper.send(signal.SIGTSTP)
    until(lambda: state_of(child) == "T" and state_of(wrapper.pid) == "T")
    wrapper.send(signal.SIGCONT)
    until(lambda: state_of(child) != "T")
    (tmp_path / "go").touch()

    assert wrapper.wait() == 0


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def test_a_daemon_that_the_command_leaves_is_ended_before_anything_else_is_done(tmp_path):
    with Supervisor() as supervisor:
        ended = supervisor.run(python(DAEMON, tmp_path), os.environ)

        assert ended.code == 0
        assert not is_running(pid_when_ready(tmp_path))


def test_nothing_is_left_where_the_wrapper_itself_is_killed(tmp_path):
    wrapper = start(tmp_path, python(DAEMON, tmp_path, "stay"), grace_s=1)
    daemon = pid_when_ready(tmp_path)
    command = os.getpgid(int(Path(f"/proc/{wrapper.pid}/task/{wrapper.pid}/children").read_text().split()[-1]))

    wrapper.send(signal.SIGKILL)

    assert wrapper.wait() == -signal.SIGKILL
    until(lambda: not is_running(daemon) and not is_running(command))


def test_children_from_before_are_left_alone(tmp_path):
    before = os.posix_spawn(sys.executable, python("import time; time.sleep(1000)"), os.environ)
    try:
        with Supervisor(grace_s=0) as supervisor:
            ended = supervisor.run(python("pass"), os.environ)

        assert ended.code == 0
        assert is_running(before)
    finally:
        os.kill(before, signal.SIGKILL)
        os.waitpid(before, 0)


def open_files():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def test_the_process_is_afterwards_what_it_was(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGTSTP, signal.SIGWINCH)
    before = [signal.getsignal(number) for number in numbers], open_files()

    with Supervisor() as supervisor:
        supervisor.run(python("pass"), os.environ)

    assert ([signal.getsignal(number) for number in numbers], open_files()) == before


def test_a_command_that_closes_stderr_goes_on(tmp_path):
    _, code = run(tmp_path, python("import os, time; os.close(2); time.sleep(0.2); os._exit(5)"))

    assert code == 5


def test_a_hundred_megabytes_on_stderr_pass_through_and_only_the_end_is_kept(tmp_path):
    source = "import os\nfor _ in range(1600): os.write(2, b'x' * 65535 + b'\\n')\nos.write(2, b'the end')"

    with (tmp_path / "err").open("wb") as file, Supervisor(stderr=file.fileno()) as supervisor:
        ended = supervisor.run(python(source), os.environ)

    assert (tmp_path / "err").stat().st_size == 1600 * 65536 + 7
    assert ended.tail.endswith("the end")
    assert len(ended.tail) < 1 << 24


def test_a_reader_that_goes_away_ends_the_command_as_it_would_without_us():
    reading, writing = os.pipe()
    os.close(reading)
    source = "import os, signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\nwhile True: os.write(2, b'x' * 4096)"

    with Supervisor(stderr=writing) as supervisor:
        ended = supervisor.run(python(source), os.environ)
    os.close(writing)

    assert ended.signal == signal.SIGPIPE


def test_on_a_terminal_stderr_is_one_of_the_same_size_whose_bytes_are_unchanged():
    ours, theirs = pty.openpty()
    source = "import os; os.write(2, (b'%d %d %d\\n\\r' % (os.isatty(2), *os.get_terminal_size(2))))"
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 81, 0, 0))

    with Supervisor(stderr=theirs) as supervisor:
        supervisor.run(python(source), os.environ)
    seen = os.read(ours, 4096)
    os.close(ours)
    os.close(theirs)

    assert seen == b"1 81 24\r\n\r"  # the outer terminal makes line ends, once


def test_waiting_takes_no_processor_time():
    before = time.process_time()

    with Supervisor() as supervisor:
        supervisor.run(python("import time; time.sleep(1)"), os.environ)

    assert time.process_time() - before < 0.5
