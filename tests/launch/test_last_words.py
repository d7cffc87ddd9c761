"""Which logs and exit statuses say that lack of memory ended a command, and which say it of something earlier."""

import textwrap

import pytest
from autoaccum._launch.deaths import Ended, diagnose

from autoaccum._system.reason_file import Reason
from log_examples import (
    ABORT,
    BAD_ALLOC,
    CAUSE,
    CONTEXT,
    CUDA,
    CUDNN,
    FAULT,
    NCCL,
    OPENED,
    STEPS,
    WANDB,
    accelerate,
    failure,
    labelled,
    spawned,
    torchrun,
    traceback,
)

OOM, ERROR, PEER = traceback(CUDA), traceback("KeyError: 'x'"), traceback("RuntimeError: Connection closed by peer")
SURVIVED = OOM + "skipping this batch\n" + STEPS
CAUGHT = OOM.replace("<module>", "train_step")
SRUN = "srun: error: node1: task{}: {}\n"

LACK = {
    "a traceback": (1, OOM),
    "wandb's summary after it": (1, OOM + WANDB),
    "thousands of lines of another thread after it": (1, OOM + NCCL),
    "an earlier one that was survived": (1, ERROR + STEPS + OOM),
    "raised while another was handled": (1, traceback("KeyError: 'x'") + CONTEXT + OOM),
    "what another was raised from": (1, OOM + CAUSE + traceback("lib.StepError: step 7")),
    "errors at exit that end nothing": (
        1,
        OOM
        + "Exception ignored in: <function Loader.__del__ at 0x7f>\n"
        + ERROR
        + "Exception in thread Thread-3 (_upload):\n"
        + traceback("KeyError: 'x'")
        + CONTEXT
        + traceback("RuntimeError: can't start new thread at interpreter shutdown")
        + "Error in atexit._run_exitfuncs:\n"
        + ERROR
        + "--- Logging error ---\n"
        + traceback("ValueError: I/O operation on closed file.")
        + "Task exception was never retrieved\nfuture: <Task finished name='Task-1'>\n"
        + ERROR,
    ),
    "logged by main, which exits with 1": (1, "ERROR:root:training failed\n" + CAUGHT + WANDB + "see the log\n"),
    "Hydra": (
        1,
        "Error executing job with overrides: []\n" + CAUGHT + "\nSet the environment variable HYDRA_FULL_ERROR=1\n",
    ),
    "colours, as Python 3.13 writes them on a terminal": (
        1,
        OPENED + "\x1b[1;35mtorch.OutOfMemoryError\x1b[0m: \x1b[35mCUDA out of memory. Tried\x1b[0m\n",
    ),
    "behind a progress bar that has not ended its line": (1, "\r 45%|████ | 9/20 [00:01<00:01]" + OOM),
    "a rank's behind a progress bar": (1, " 45%|████ | 9/20" + traceback(CUDA, rank=0)),
    "a worker of a loader": (
        1,
        OPENED
        + "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal "
        + traceback("RuntimeError: [enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    ),
    "a worker of a loader, whose system has none left": (
        1,
        OPENED
        + "OSError: Caught OSError in DataLoader worker process 0.\nOriginal "
        + traceback("OSError: [Errno 12] Cannot allocate memory"),
    ),
    "a process of torch.multiprocessing.spawn": (
        1,
        OPENED
        + "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 0 terminated with the following error:\n"
        + OOM,
    ),
    "a group": (
        1,
        '  + Exception Group Traceback (most recent call last):\n  |   File "train.py", line 7, in <module>\n'
        "  | ExceptionGroup: two losses (2 sub-exceptions)\n  +-+---------------- 1 ----------------\n"
        + textwrap.indent(OOM, "    | ")
        + "    +---------------- 2 ----------------\n"
        + textwrap.indent(traceback("MemoryError"), "    | ")
        + "    +------------------------------------\n",
    ),
    "an exception of C++ that nobody caught": (-6, BAD_ALLOC),
    "the same below a shell": (
        134,
        BAD_ALLOC + "train.sh: line 3:    77 Aborted                 (core dumped) python x.py\n",
    ),
    "faulthandler's words after it": (-6, BAD_ALLOC + FAULT.format(what="Aborted")),
    "torch's own error in C++": (
        -6,
        ABORT.format(kind="c10::Error", text="CUDA error: out of memory\nException raised"),
    ),
    "a device's error by torch's type": (134, ABORT.format(kind="c10::AcceleratorError", text="CUDA out of memory.")),
    "threads that are left when the interpreter ends": (-6, OOM + "terminate called without an active exception\n"),
    "a rank that aborts on its way out": (134, traceback(CUDA, rank=0) + BAD_ALLOC.replace("std::bad_alloc", "c10::X")),
    "torchrun": (1, traceback(CUDA, rank=1) + NCCL + torchrun(failure(1, 1))),
    "torchrun, other ranks' errors after it": (
        1,
        traceback(CUDA, rank=1)
        + traceback("torch.distributed.DistBackendError: NCCL", rank=0)
        + torchrun(failure(0, 1)),
    ),
    "torchrun of an older torch, whose lines have no rank": (1, OOM + PEER + torchrun(failure(1, 1))),
    "torchrun, two ranks' lines mixed": (
        1,
        "".join(a + b for a, b in zip(OOM.splitlines(True), ERROR.splitlines(True), strict=True))
        + torchrun(failure(0, 1), failure(1, 1)),
    ),
    "torchrun that tells the rank's traceback": (1, torchrun(failure(0, 1, OOM.rstrip()))),
    "torchrun of a rank that aborted": (
        1,
        BAD_ALLOC + torchrun(failure(0, -6, "Signal 6 (SIGABRT) received by PID 70")),
    ),
    "torchrun --tee": (
        1,
        labelled(OOM, "[default1]:") + labelled(STEPS, "[default0]:") + torchrun(failure(1, 1), failure(0, -15)),
    ),
    "torchrun on two nodes": (
        1,
        traceback(CUDA, rank=0)
        + torchrun(failure(0, 1))
        + traceback("torch.distributed.DistBackendError: NCCL", rank=8)
        + torchrun(failure(8, 1))
        + SRUN.format("s 0-1", "Exited with exit code 1"),
    ),
    "accelerate launch": (1, OOM + WANDB + accelerate("returned non-zero exit status 1.")),
    "accelerate launch of what aborted": (1, BAD_ALLOC + accelerate("died with <Signals.SIGABRT: 6>.")),
    "a process of spawn that aborted": (1, BAD_ALLOC + spawned("signal SIGABRT")),
    "srun": (1, OOM + SRUN.format(" 0", "Exited with exit code 1")),
    "srun --label, the others killed": (
        137,
        labelled(OOM, "1: ")
        + labelled(STEPS, "0: ")
        + SRUN.format(" 1", "Exited with exit code 1")
        + SRUN.format("s 0,2-3", "Killed"),
    ),
    "srun's word": (1, STEPS + SRUN.format(" 0", "Out Of Memory")),
    "slurmstepd's word": (137, STEPS + "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some\n"),
}

OTHER = {
    "logged by a function, and 2,000 lines later sys.exit('no such data')": (1, CAUGHT + STEPS + "no such data\n"),
    "logged, and 2,000 lines later sys.exit(3)": (3, SURVIVED),
    "logged, and later a segmentation fault": (-11, SURVIVED + FAULT.format(what="Segmentation fault")),
    "the same below a shell": (139, SURVIVED),
    "logged, and later Ctrl-C": (130, SURVIVED + OPENED + "KeyboardInterrupt\n"),
    "logged, and later SIGTERM": (-15, SURVIVED),
    "logged, and later a command line that is not understood": (2, SURVIVED),
    "logged, and later abort() for another reason": (-6, SURVIVED + ABORT.format(kind="c10::Error", text="no such op")),
    "logged, and later threads that are left": (-6, SURVIVED + "terminate called without an active exception\n"),
    "logged, and later another error": (1, SURVIVED + ERROR),
    "logged by logging, and then another error": (1, "WARNING:root:too large\n" + OOM + ERROR),
    "another error while it was handled": (1, OOM + CONTEXT + ERROR),
    "what another was raised from, survived": (1, OOM + CAUSE + traceback("lib.StepError: 7") + STEPS + ERROR),
    "a scheduler's, after an update that is made": (
        1,
        traceback("MemoryError") + CAUSE + traceback("autoaccum.errors.UpdateCompleteError: update 7 is made"),
    ),
    "in a thread, which ends nothing": (1, ERROR + "Exception in thread Thread-3 (_upload):\n" + OOM),
    "in a finalizer": (1, ERROR + "Exception ignored in: <function Cache.__del__ at 0x7f>\n" + OOM),
    "an exception of C++ that was caught": (1, BAD_ALLOC),
    "an exception of C++ of a child, and then exit 3": (3, BAD_ALLOC),
    "an exception of C++ of a child, and then a segmentation fault": (-11, BAD_ALLOC),
    "an exception of C++ of a child, and then another abort": (
        134,
        BAD_ALLOC + STEPS + ABORT.format(kind="A", text="no"),
    ),
    "an exception of C++ of a child, and then a traceback": (1, BAD_ALLOC + ERROR),
    "words of a log": (1, "RuntimeError: CUDA out of memory\n" + STEPS),
    "cuDNN refuses a layout": (1, traceback(CUDNN)),
    "a group of which one part is another error": (
        1,
        "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two losses (2 sub-exceptions)\n"
        "  +-+---------------- 1 ----------------\n"
        + textwrap.indent(OOM, "    | ")
        + "    +---------------- 2 ----------------\n"
        + textwrap.indent(ERROR, "    | ")
        + "    +------------------------------------\n",
    ),
    "a rank's last word, and then a shell's next command": (3, traceback(CUDA, rank=0) + STEPS),
    "torchrun of a rank that exits with 3": (1, SURVIVED + torchrun(failure(0, 3))),
    "torchrun of a rank with a segmentation fault": (1, SURVIVED + torchrun(failure(0, -11))),
    "torchrun of a rank that aborted, memory survived": (1, SURVIVED + torchrun(failure(0, -6))),
    "torchrun, memory survived by a rank that is no failure": (
        1,
        labelled(SURVIVED, "[default0]:") + labelled(ERROR, "[default1]:") + torchrun(failure(1, 1)),
    ),
    "torchrun, memory survived and logged without a rank": (
        1,
        SURVIVED + traceback("KeyError: 'x'", rank=1) + torchrun(failure(1, 1)),
    ),
    "torchrun that survived it by a restart": (
        1,
        traceback(CUDA, rank=1)
        + "E0101 api.py:874] failed (exitcode: 1) local_rank: 1 (pid: 51) of binary: /usr/bin/python\n"
        + STEPS
        + traceback("KeyError: 'x'", rank=0)
        + torchrun(failure(0, 1)),
    ),
    "a torchrun that the script survived, and then another": (
        1,
        traceback(CUDA, rank=1)
        + torchrun(failure(1, 1))
        + traceback("KeyError: 'x'", rank=0)
        + torchrun(failure(0, 1)),
    ),
    "a torchrun that the script survived, and then exit 3": (
        3,
        traceback(CUDA, rank=1) + torchrun(failure(1, 1)) + STEPS,
    ),
    "torchrun that tells another traceback": (1, SURVIVED + torchrun(failure(0, 1, ERROR.rstrip()))),
    "accelerate launch of what exits with 3": (1, SURVIVED + accelerate("returned non-zero exit status 3.")),
    "another command of the script fails": (
        1,
        SURVIVED
        + traceback("subprocess.CalledProcessError: Command '['git', 'push']' returned non-zero exit status 1."),
    ),
    "a process of spawn that exits with 3": (1, SURVIVED + spawned("exit code 3")),
    "srun of a task that exits with 3": (3, SURVIVED + SRUN.format(" 0", "Exited with exit code 3")),
    "srun --label, memory survived by another task": (
        1,
        labelled(SURVIVED, "0: ") + labelled(ERROR, "1: ") + SRUN.format(" 1", "Exited with exit code 1"),
    ),
    "Slurm's word of an earlier step": (3, "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n" + STEPS),
    "Slurm's word of a loader's worker, survived": (
        1,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\n" + ERROR,
    ),
    "a sentence like Slurm's": (1, "srun: error: how to read node1: Out Of Memory in a log\n"),
}


def ended(status, text):
    return Ended(status, tail=text) if status >= 0 else Ended(None, -status, text)


@pytest.mark.parametrize(("status", "text"), LACK.values(), ids=LACK)
def test_lack_of_memory_that_ended_the_command_is_recognised(status, text):
    diagnosis = diagnose(ended(status, text))

    assert (diagnosis.kind, diagnosis.evidence[:11]) == ("out_of_memory", "on stderr: ")


@pytest.mark.parametrize(("status", "text"), OTHER.values(), ids=OTHER)
def test_lack_of_memory_that_did_not_end_it_is_not(status, text):
    assert diagnose(ended(status, text)).kind == "other"


@pytest.mark.parametrize("status", [2, 3, 5, 99, 126, 127, 130, 139, 143, -2, -11, -15])
def test_no_traceback_explains_a_status_that_python_does_not_end_with(status):
    assert diagnose(ended(status, OOM)).kind == "other"


@pytest.mark.parametrize("text", ["(" + "x" * (1 << 22), "  + " + "-" * (1 << 22), "srun: error: " + " " * (1 << 22)])
def test_a_line_of_megabytes_is_read_to_its_end(text):
    assert diagnose(ended(1, f"  + Exception Group {OPENED}{text}\n{text}\n{OOM}")).kind == "out_of_memory"


def test_every_other_end_of_a_log_of_lack_of_memory_names_its_status():
    assert diagnose(ended(3, SURVIVED)).evidence == "exit code 3"


@pytest.mark.parametrize("status", [1, 3, 139, -6, -11])
def test_a_reason_file_that_names_the_cause_wins_over_the_log(status):
    assert diagnose(ended(status, ERROR), reason=Reason("out_of_memory")).kind == "out_of_memory"
    other = diagnose(ended(status, OOM), reason=Reason("device_lost", message="ECC error"))
    assert (other.kind, other.evidence) == ("other", "its reason file: device_lost: ECC error")


KILLED_EARLIER = traceback("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ") + STEPS


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (3, KILLED_EARLIER),
        (1, KILLED_EARLIER + ERROR),
        (1, KILLED_EARLIER + torchrun(failure(0, 3))),
        (1, "exitcode  : -9 (pid: 7)\n" + STEPS + torchrun(failure(0, 1))),
    ],
)
def test_a_worker_that_the_kernel_killed_and_the_command_survived_says_nothing(status, text):
    counted = {"kills_before": {"memory.events": 2}, "kills_after": {"memory.events": 3}}

    assert diagnose(ended(status, text), **counted).kind == "other"
