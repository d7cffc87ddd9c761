"""Which ends are lack of memory: by real texts, exit codes and counters."""

import signal

import pytest
from autoaccum._launch.deaths import Ended, diagnose
from autoaccum._launch.last_words import memory_words

from autoaccum._system.reason_file import Reason

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n    ^^^^^^\n'
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"
CPU = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried 5 bytes"
)
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
LAUNCHER = (
    TRACEBACK + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "============================================================\ntrain.py FAILED\n"
    "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : {code} (pid: 77)\n"
)


@pytest.mark.parametrize(
    "text",
    [
        TRACEBACK + CUDA + "\n",
        TRACEBACK + "torch.cuda." + CUDA.removeprefix("torch.") + "\nsome library's farewell\n",
        TRACEBACK + CPU,
        TRACEBACK + "MemoryError\n",
        TRACEBACK + "MemoryError: \n",
        TRACEBACK + "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB for an array\n",
        TRACEBACK + "OSError: [Errno 12] Cannot allocate memory\n",
        TRACEBACK + "torch.AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronous\n",
        TRACEBACK + "torch.distributed.DistBackendError: NCCL error\nLast error:\nCuda failure 2 'out of memory'\n",
        TRACEBACK + CUDA + "\n" + CAUSE + TRACEBACK + "mytrainer.StepError: step 7 failed\n",
        TRACEBACK + "KeyError: 'survived'\n" + CONTEXT + TRACEBACK + CUDA + "\n",
        "".join(f"[rank1]: {line}\n" for line in (TRACEBACK + CUDA).splitlines()) + LAUNCHER.format(code=1),
        TRACEBACK + CUDA + "\n" + TRACEBACK + "RuntimeError: Connection closed by peer\n" + LAUNCHER.format(code=1),
        "╭── Traceback (most recent call last) ──╮\n│ train.py:7  │\n╰───╯\nOutOfMemoryError: CUDA out of memory.\n",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n",
        "srun: error: node1: task 0: Out Of Memory\n",
    ],
)
def test_an_end_by_lack_of_memory_is_recognised(text):
    diagnosis = diagnose(Ended(1, tail=text))

    assert diagnosis.kind == "out_of_memory"
    assert diagnosis.evidence.startswith("on stderr: ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "WARNING: ran out of memory, CUDA out of memory, batch skipped\n" + TRACEBACK + "KeyError: 'x'\n",
        TRACEBACK + CUDA + "\nskipping this batch\n" + TRACEBACK + "KeyError: 'x'\n",
        TRACEBACK + CUDA + "\n" + CONTEXT + TRACEBACK + "KeyError: 'x'\n",
        TRACEBACK + "ValueError: the dataset says CUDA out of memory\n",
        TRACEBACK + "OSError: [Errno 28] No space left on device\n",
        TRACEBACK + "RuntimeError: size mismatch\n",
        TRACEBACK + "autoaccum.errors.DoesNotFitError: CUDA out of memory\n",
        TRACEBACK + "MemoryError\n" + CAUSE + TRACEBACK + "autoaccum.errors.UpdateCompleteError: update 3 is made\n",
        "I read a paper: torch.OutOfMemoryError: CUDA out of memory\n",
        LAUNCHER.format(code=1),
    ],
)
def test_every_other_end_is_not(text):
    assert memory_words(text, 1) is None
    assert diagnose(Ended(1, tail=text)).kind == "other"


def test_an_end_in_order_is_one_whatever_was_said():
    assert diagnose(Ended(0, tail=TRACEBACK + CUDA), reason=Reason("out_of_memory")).kind == "done"


def test_the_reason_file_tells_what_failed_through_a_launcher():
    diagnosis = diagnose(Ended(1), reason=Reason("out_of_memory", 8, 1, "no room\nfor 9 GiB"))

    assert (diagnosis.kind, diagnosis.micro_batch) == ("out_of_memory", 8)
    assert diagnosis.evidence == "its reason file: rank 1: no room"


def test_another_reason_is_not_acted_upon():
    assert diagnose(Ended(1), reason=Reason("device_lost")).kind == "other"


def test_exit_codes_of_our_own_are_final_or_ask_to_be_started_again():
    assert diagnose(Ended(4, tail=TRACEBACK + CUDA)).kind == "other"
    assert diagnose(Ended(75)).kind == "out_of_memory"


KILLED = [
    Ended(None, signal.SIGKILL),
    Ended(137),
    Ended(1, tail=LAUNCHER.format(code=-9)),
    Ended(1, tail=TRACEBACK + "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. \n"),
    Ended(1, tail=TRACEBACK + "subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>.\n"),
    Ended(
        1,
        tail=TRACEBACK
        + "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL\n",
    ),
]


@pytest.mark.parametrize("ended", KILLED)
def test_a_kill_with_a_counter_that_rose_is_lack_of_memory(ended):
    diagnosis = diagnose(ended, kills_before={"memory.events": 2}, kills_after={"memory.events": 3})

    assert diagnosis.kind == "out_of_memory"
    assert "memory.events by 1" in diagnosis.evidence


@pytest.mark.parametrize("ended", KILLED)
@pytest.mark.parametrize("counters", [{}, {"memory.events": 2}])
def test_a_kill_without_one_is_not_and_says_what_was_looked_at(ended, counters):
    diagnosis = diagnose(ended, kills_before=counters, kills_after=counters)

    assert diagnosis.kind == "other"
    assert ("checked: memory.events" if counters else "there is none here") in diagnosis.evidence


def test_a_counter_that_rose_beside_another_failure_says_nothing():
    assert diagnose(Ended(3), kills_before={"memory.events": 2}, kills_after={"memory.events": 3}).kind == "other"
