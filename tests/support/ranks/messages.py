"""Trainings of ranks that count what the ranks send each other, or in which one of them does not answer."""

import os
import signal
import subprocess
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from autoaccum._distributed import process_group  # whose messages are counted
from autoaccum._distributed.process_group import OutOfMemoryElsewhereError, Ranks  # whose messages are counted
from autoaccum._memory.available_devices import backend_for  # whose messages are counted
from support.ranks import training

KINDS = ("all_gather", "all_reduce", "broadcast")


class Counting(autoaccum.Callback):
    """Notes after each window how often the network was used so far."""

    def __init__(self):
        self.calls, self.after = [], []

    def on_step(self, report, *, epoch):
        self.after.append(len(self.calls))

    def of_window(self, number):
        return sorted(self.calls[self.after[number - 2] : self.after[number - 1]])


def counted(rank, size, window, **arguments):
    counting = Counting()

    def noted(kind):
        real = getattr(distributed, kind)

        def called(*given, **named):
            counting.calls.append(kind)
            return real(*given, **named)

        return mock.patch.object(distributed, kind, called)

    with noted(KINDS[0]), noted(KINDS[1]), noted(KINDS[2]):
        training.train(rank, size, target_batch=8, micro_batch=2, callbacks=[counting], **arguments)
    return counting.of_window(window)


def lengths(rank, size, layers):
    """Train a model of so many layers; return how many bytes this rank has sent in messages, window by window."""
    counting = Counting()
    real = distributed.all_gather

    def all_gather(received, sent, **named):
        counting.calls.append(sent.nbytes)
        return real(received, sent, **named)

    model = training.net()
    model.extend(nn.Linear(training.CLASSES, training.CLASSES).double() for _ in range(layers))
    with mock.patch.object(distributed, "all_gather", all_gather):
        training.train(
            rank, size, model=model, target_batch=8, micro_batch=4, shard_data=True, max_steps=6, callbacks=[counting]
        )
    return [sum(counting.calls[start:stop]) for start, stop in zip([0, *counting.after], counting.after, strict=False)]


def groups(rank, size):
    """Train twice with a group that has no network between hosts; return how many further groups were made."""
    real, made = distributed.new_group, []

    def new_group(*given, **named):
        made.append(named)
        return real(*given, **named)

    with (
        mock.patch.object(distributed, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(distributed, "new_group", new_group),
    ):
        for _ in range(2):
            training.train(rank, size, target_batch=16, micro_batch=4, shard_data=True)
    return len(made)


class NotAnswering(autoaccum.Callback):
    """After the second window this process ends, stops for a second, or sleeps."""

    def __init__(self, how):
        self.how = how

    def on_step(self, report, *, epoch):
        if report.step == 2 and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if report.step == 2 and self.how == "stopped":
            own = os.getpid()
            waits = f"until grep -q '^State:.T' /proc/{own}/status; do sleep 0.1; done"
            subprocess.Popen(["/bin/sh", "-c", f"{waits}; sleep 1; kill -CONT {own}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if report.step == 2 and self.how == "asleep":
            time.sleep(4)


def not_answering(rank, size, who, how, **arguments):
    callbacks = [NotAnswering(how)] if rank == who else []
    return training.train(
        rank, size, target_batch=12, micro_batch=2, shard_data=True, epochs=2, callbacks=callbacks, **arguments
    )


def one_cannot_send(rank, size, **arguments):
    """Train where rank 1 cannot send a gradient, for a reason of its own."""
    real = distributed.all_reduce

    def all_reduce(*given, **named):
        if rank == 1:
            raise RuntimeError("Invalid scalar type")
        return real(*given, **named)

    with mock.patch.object(distributed, "all_reduce", all_reduce):
        return training.train(rank, size, target_batch=16, micro_batch=4, shard_data=True, **arguments)


class Lacking:
    """A loss without memory for its third call on rank 0."""

    def __init__(self, rank):
        self.rank, self.calls = rank, 0

    def __call__(self, outputs, targets):
        self.calls += outputs.requires_grad
        if self.rank == 0 and self.calls == 3:
            self.calls += 1
            raise torch.OutOfMemoryError("CUDA out of memory: for this test")
        return functional.cross_entropy(outputs, targets)


def lacking_once(rank, size, sizes):
    """Train on simulated devices of these sizes; memory runs out once, on rank 0 alone; return the cuts."""
    model = training.net()
    result = autoaccum.fit(
        model,
        DataLoader(training.vectors(96), batch_size=16),
        16,
        loss=Lacking(rank),
        loss_reduction="mean",
        micro_batch=8,
        optimizer=training.sgd,
        shard_data=True,
        device=autoaccum.Simulated(sizes[rank]),
        progress=False,
    )
    return [report.micro_batches for report in result.history]


class _LeftError(Exception):
    """Raised by the handler of a signal."""


def waiting_beside_nccl(rank, size):
    """Wait for a message of rank 0 where tensors go by NCCL, until a signal comes; return the seconds that it took."""
    memory = SimpleNamespace(device=torch.device("cuda"), lifted=nullcontext, elsewhere=nullcontext)
    with mock.patch.object(distributed, "get_backend_config", return_value="cpu:gloo,cuda:nccl"):
        ranks = Ranks(memory)
    began = time.monotonic()
    if rank == 0:
        time.sleep(3)
    else:

        def leave(*_):
            raise _LeftError

        before = signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            ranks.exchange("later")
        except _LeftError:
            pass
        finally:
            signal.signal(signal.SIGALRM, before)
    return time.monotonic() - began


def word_of_another_attempt(rank, size):
    """Leave word; return the errors of the same ranks, of those of a later training, and of those after a restart."""
    memory, error, attempt = autoaccum.Simulated("1GiB"), RuntimeError("closed"), "TORCHELASTIC_RESTART_COUNT"
    first = Ranks(memory)
    first.leave("rank 1 ran out of memory")
    found = [first.lost(error), Ranks(memory).lost(error)]
    with mock.patch.dict(os.environ, {attempt: "1"}), mock.patch.object(process_group, "_ranks_made", {}):
        found.append(Ranks(memory).lost(error))
    distributed.barrier()
    return found


def exchanged(rank, size):
    """Return what messages of unlike length bring, and what lack of memory is told as on each rank."""
    ranks = Ranks(backend_for(torch.device("cpu")))
    texts = ranks.exchange("texts", "x" * (5000 if rank == 1 else rank))
    tensors = ranks.exchange("tensors", torch.full((2,), rank, dtype=torch.uint8))
    order = ranks.from_rank_0("order", list(range(3000)) if rank == 0 else None)
    try:
        size_elsewhere = ranks.exchange("pass") if rank == 0 else ranks.lack(rank, MemoryError("for this test"))
    except OutOfMemoryElsewhereError as error:
        size_elsewhere = error.size
    return [len(text) for text in texts], torch.stack(tensors).tolist(), len(order), size_elsewhere
