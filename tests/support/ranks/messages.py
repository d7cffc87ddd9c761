"""What ranks tell each other, beside a training."""

import os
import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import torch
from torch import distributed

import autoaccum
from autoaccum._distributed import process_group  # whose messages are counted
from autoaccum._distributed.process_group import OutOfMemoryElsewhereError, Ranks  # whose messages are counted
from autoaccum._memory.available_devices import backend_for  # whose messages are counted


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
