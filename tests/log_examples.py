"""What commands leave on stderr, in the shape in which Python, C++, torch, launchers and loggers write it."""

import textwrap

OPENED = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n    step()\n'
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"
CUDNN = (
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous "
    "input."
)
ABORT = "terminate called after throwing an instance of '{kind}'\n  what():  {text}\n"
BAD_ALLOC = ABORT.format(kind="std::bad_alloc", text="std::bad_alloc")
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
FAULT = (
    "Fatal Python error: {what}\n\nThread 0x00007f11 (most recent call first):\n"
    '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n\n'
    'Current thread 0x00007f12 (most recent call first):\n  File "/home/me/train.py", line 7 in <module>\n\n'
    "Extension modules: numpy, torch._C (total: 2)\n"
)
WANDB = (
    "wandb: \nwandb: Run history:\nwandb: loss █▅▃▂▁\nwandb: \nwandb: Run summary:\nwandb: loss 0.25\nwandb: \n"
    "wandb: 🚀 View run rural-frog-7 at: https://wandb.ai/me/p/runs/x\nwandb: Synced 5 W&B file(s)\n"
    "wandb: Find logs at: ./wandb/run-20240101_000000-x/logs\n"
)
STEPS = "".join(f"step {number}: loss 0.{number}\n" for number in range(2000))
NCCL = "".join(
    f"node1:77:{number} [1] NCCL WARN socketProgress: Connection closed by remote\n" for number in range(3000)
)


def traceback(said, *, rank=None):
    """A traceback of an exception that `said`, as torch writes that of a rank where there is one."""
    text = f"{OPENED}{said}\n"
    return text if rank is None else textwrap.indent(text, f"[rank{rank}]: ", lambda _: True)


def labelled(text, label):
    """Lines as `torchrun --tee` and `srun --label` write them."""
    return textwrap.indent(text, label, lambda _: True)


def failure(rank, code, text="To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html", pid=None):
    """One failure in torchrun's report."""
    name = {-6: " (SIGABRT)", -9: " (SIGKILL)", -11: " (SIGSEGV)", -15: " (SIGTERM)"}.get(code, "")
    return (
        f"[{rank}]:\n  time      : 2024-01-01_00:00:00\n  host      : node1\n"
        f"  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {pid or 70 + rank}){name}\n  error_file: <N/A>\n"
        "  traceback : " + text.replace("\n", "\n  ") + "\n"
    )


def torchrun(*failures):
    """What torchrun writes of ranks that failed, the first of which is the root cause."""
    root, *others = failures
    code = root.split("exitcode  : ")[1].split(" ")[0]
    pid = root.split("(pid: ")[1].split(")")[0]
    return (
        f"E0101 00:00:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: {code}) "
        f"local_rank: 0 (pid: {pid}) of binary: /usr/bin/python\n"
        'Traceback (most recent call last):\n  File "/usr/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        + "=" * 60
        + "\ntrain.py FAILED\n"
        + "-" * 60
        + "\nFailures:\n"
        + ("".join(others) or "  <NO_OTHER_FAILURES>\n")
        + "-" * 60
        + f"\nRoot Cause (first observed failure):\n{root}"
        + "=" * 60
        + "\n"
    )


def accelerate(end):
    """What `accelerate launch` writes of a script on one device."""
    return (
        'Traceback (most recent call last):\n  File "/usr/bin/accelerate", line 8, in <module>\n    sys.exit(main())\n'
        '  File "/lib/accelerate/commands/launch.py", line 763, in simple_launcher\n'
        "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)\n"
        f"subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' {end}\n"
    )


def spawned(end):
    """What torch.multiprocessing.spawn raises of a process that left nothing."""
    return traceback(f"torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with {end}")
