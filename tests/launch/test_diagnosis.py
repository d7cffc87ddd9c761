"""Which ends are lack of memory: by reason files, counters, exit codes and what is on stderr.

The texts have the shape in which Python, C++, torch, launchers and loggers write them.
"""

import textwrap

import pytest

from autoaccum._launch.diagnosis import diagnose
from autoaccum._launch.supervisor import Ended
from autoaccum._system.reason_file import Reason  # an argument

OPENED = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n    step()\n'
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
STEPS = "".join(f"step {number}: loss 0.{number}\n" for number in range(2000))
WANDB = "wandb: \nwandb: Run history:\nwandb: loss █▅▃▂▁\nwandb: Find logs at: ./wandb/run-20240101_000000-x/logs\n"
SRUN = "srun: error: node1: task{}: {}\n"


def traceback(said, label=""):
    return textwrap.indent(f"{OPENED}{said}\n", label, lambda _: True)


def abort(kind, text):
    return f"terminate called after throwing an instance of '{kind}'\n  what():  {text}\n"


def torchrun(rank, code):
    """What torchrun writes of a rank that failed."""
    return (
        'Traceback (most recent call last):\n  File "/usr/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"{'=' * 60}\ntrain.py FAILED\n{'-' * 60}\nFailures:\n  <NO_OTHER_FAILURES>\n{'-' * 60}\n"
        f"Root Cause (first observed failure):\n[{rank}]:\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: 77)\n  error_file: <N/A>\n{'=' * 60}\n"
    )


OOM, ERROR, PEER = traceback(CUDA), traceback("KeyError: 'x'"), traceback("RuntimeError: Connection closed by peer")
SURVIVED = OOM + "skipping this batch\n" + STEPS

LACK = {
    "a traceback": (1, OOM),
    "NumPy": (1, traceback("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB for an array")),
    "a driver": (1, traceback("torch.AcceleratorError: CUDA error: out of memory") + "errors might be asynchronous\n"),
    "wandb's summary after it": (1, OOM + WANDB),
    "thousands of lines of another thread after it": (1, OOM + STEPS),
    "an earlier one that was survived": (1, ERROR + STEPS + OOM),
    "raised while another was handled": (1, ERROR + CONTEXT + OOM),
    "what another was raised from": (1, OOM + CAUSE + traceback("lib.StepError: step 7")),
    "colours of Python 3.13": (
        1,
        OPENED + "\x1b[1;35mtorch.OutOfMemoryError\x1b[0m: \x1b[35mCUDA out of memory\x1b[0m",
    ),
    "behind a progress bar": (1, "\r 45%|████ | 9/20 [00:01<00:01]" + OOM),
    "a worker of a loader": (
        1,
        OPENED
        + "OSError: Caught OSError in DataLoader worker process 0.\nOriginal "
        + traceback("OSError: [Errno 12] Cannot allocate memory"),
    ),
    "an exception of C++": (134, abort("std::bad_alloc", "std::bad_alloc")),
    "torchrun": (1, traceback(CUDA, "[rank1]: ") + STEPS + torchrun(1, 1)),
    "torchrun, other ranks' errors after it": (1, traceback(CUDA, "[rank1]: ") + PEER + torchrun(0, 1)),
    "torchrun --tee": (1, traceback(CUDA, "[default1]:") + torchrun(1, 1)),
    "accelerate launch": (
        1,
        OOM + traceback("subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1."),
    ),
    "srun --label, the others killed": (
        137,
        traceback(CUDA, "1: ") + SRUN.format(" 1", "Exited with exit code 1") + SRUN.format("s 0,2-3", "Killed"),
    ),
    "srun's word": (1, STEPS + SRUN.format(" 0", "Out Of Memory")),
    "slurmstepd's word": (137, STEPS + "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some\n"),
}
OTHER = {
    "nothing": (1, ""),
    "logged, and later sys.exit(3)": (3, SURVIVED),
    "logged, and later a segmentation fault": (139, SURVIVED),
    "logged, and later another error": (1, SURVIVED + ERROR),
    "another error while it was handled": (1, OOM + CONTEXT + ERROR),
    "what another was raised from, survived": (1, OOM + CAUSE + traceback("lib.StepError: 7") + STEPS + ERROR),
    "another abort": (134, SURVIVED + abort("c10::Error", "no such op")),
    "a disk that is full": (1, traceback("OSError: [Errno 28] No space left on device")),
    "torchrun of a rank that exits with 3": (1, SURVIVED + torchrun(0, 3)),
    "torchrun of a rank with a segmentation fault": (1, SURVIVED + torchrun(0, -11)),
    "torchrun of another rank's error": (1, SURVIVED + traceback("KeyError: 'x'", "[rank1]: ") + torchrun(1, 1)),
    "srun of a task that exits with 3": (1, SURVIVED + SRUN.format(" 0", "Exited with exit code 3")),
    "Slurm's word of a loader's worker, survived": (
        1,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n" + ERROR,
    ),
    "a sentence like Slurm's": (1, "srun: error: how to read node1: Out Of Memory in a log\n"),
}


@pytest.mark.parametrize(("code", "text"), LACK.values(), ids=LACK)
def test_an_end_by_lack_of_memory_is_recognised(code, text):
    found = diagnose(Ended(code, text), None, {})

    assert found.is_oom
    assert found.evidence.startswith("on stderr: ")


@pytest.mark.parametrize(("code", "text"), OTHER.values(), ids=OTHER)
def test_every_other_end_is_not_and_names_its_status(code, text):
    found = diagnose(Ended(code, text), None, {})

    assert not found.is_oom
    assert f"exit code {code}" in found.evidence


@pytest.mark.parametrize("code", [1, 3, 134, 139])
def test_a_reason_file_wins_over_the_log(code):
    lack = diagnose(Ended(code, ERROR), Reason("out_of_memory", 8, 1, "no room\nfor 9 GiB"), {})
    other = diagnose(Ended(code, OOM), Reason("device_lost", message="ECC error"), {})

    assert (lack.is_oom, lack.micro_batch, lack.evidence) == (True, 8, "its reason file: rank 1: no room")
    assert (other.is_oom, other.evidence) == (False, "its reason file: device_lost: ECC error")


def test_a_size_that_was_running_is_no_reason_but_is_known_when_the_log_has_one():
    running = Reason("running", 16)

    assert not diagnose(Ended(1, ERROR), running, {}).is_oom
    assert diagnose(Ended(1, OOM), running, {}).micro_batch == 16


def test_exit_codes_of_our_own_are_final_or_ask_to_be_started_again():
    assert not diagnose(Ended(0, OOM), Reason("out_of_memory"), {}).is_oom
    assert not diagnose(Ended(4, OOM), None, {}).is_oom
    assert diagnose(Ended(75), None, {}).is_oom


KILLED = {
    "by itself": (137, ""),
    "a rank": (1, torchrun(0, -9)),
    "a loader's worker": (1, traceback("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ")),
    "a task": (137, SRUN.format(" 0", "Killed")),
    "a process": (1, traceback("torch.multiprocessing.spawn.ProcessExitedException: terminated with signal SIGKILL")),
}


@pytest.mark.parametrize(("code", "text"), KILLED.values(), ids=KILLED)
def test_a_kill_is_lack_of_memory_only_if_the_kernel_counted_one(code, text):
    counted = diagnose(Ended(code, text), None, {"memory.events": 1})

    assert counted.is_oom
    assert "memory.events by 1" in counted.evidence
    assert not diagnose(Ended(code, text), None, {}).is_oom
