"""The processes of one training: setup, and the messages that they exchange.

Every rank sends the same messages in the same order. In place of any message, a rank may report that it has failed:
then every other rank raises RankFailedError at that point, and none is left waiting. Likewise, while a window is made
together, it may report that it lacks memory, at which all begin the window again. Messages are small and are
exchanged between hosts (gloo), whatever the device; tensors go through the device's group.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import os
import pickle
import sys
import weakref
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from autoaccum._memory.available_devices import existing
from autoaccum._oom import first_line
from autoaccum._system.launched import is_to_be_set_up, local_rank, timeout_s, world_size
from autoaccum.errors import RankFailedError, StartAgainError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from io import BytesIO

    from torch import Tensor

    from autoaccum._memory.base import MemoryBackend

# The longest message that goes by itself, which those of windows do for models of up to 15,000 tensors.
_MESSAGE_BYTES = 2048
# What messages are about that stand in place of any other.
_FAILURE, _LACK = "failure", "lack of memory"
# Signals are handled so often while this rank waits.
_SIGNALS_EVERY = timedelta(seconds=0.1)
# Errors that have ended a training of several ranks in this process.
_failures: list[str] = []
# One for each group that is set up here. Ranks make the same ones, and no group may find the addresses of another.
_groups_set_up = itertools.count()
# How many `Ranks` each default group has had.
_ranks_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
# The groups for messages between hosts, by the default group beside which each was made.
_groups_of_hosts: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class OutOfMemoryElsewhereError(torch.OutOfMemoryError):
    """Ranks have reported, in place of a message, that they lack memory.

    Attributes:
        size: The size of the largest micro-batch that did not fit; None if none was being processed.
    """

    def __init__(self, text: str, size: int | None) -> None:
        super().__init__(text)
        self.size = size


class Ranks:
    """The processes of one training, including this one.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
        moment: Number of windows done, to be kept up to date; -1 while this rank's state is not consistent.
        are_at_same_moment: Whether all ranks were alive and at the same moment when one failed.
        is_in_pass: Whether the others wait for this rank inside an operation that cannot be interrupted, so that no
            messages can be sent.
    """

    def __init__(self, memory: MemoryBackend) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.moment = -1
        self.are_at_same_moment = False
        self.is_in_pass = False
        self._memory = memory
        self._has_failed = False
        # The store may outlive a restart, as torchrun's static one does.
        number = _ranks_made[_default_group()] = _ranks_made.get(_default_group(), 0) + 1
        self._word = f"autoaccum/word/{_restarts()}/{number}"  # the name in the store of what a rank leaves word of
        kind, backends = memory.device.type, distributed.get_backend_config()
        # No group is held here: its threads end when the script destroys it only if nothing else holds it, and may
        # abort the process that ends before them.
        self._hosts: Callable[[], Any] = _default_group
        if "cpu:gloo" not in backends:
            with memory.lifted():  # starts threads, whose memory is not part of a training
                self._hosts = _group_of_hosts()
        self._tensors = self._hosts if kind == "cpu" else _default_group
        self._buffers, _ = _message_buffers(self.size)
        # Those of the last message: a thread of gloo that gives up a tensor that Python has left takes locks of the
        # interpreter, in which a process that a DataLoader forks at that moment can hang (Python 3.11).
        self._last = self._buffers
        self._is_gloo = kind == "cpu" or f"{kind}:gloo" in backends

    def exchange(self, topic: str, value: Any = None) -> list[Any]:
        """Send a value, and return every rank's value, in rank order.

        Args:
            topic: What the message is about; must be the same on every rank.
            value: Anything that can be pickled, with tensors on the host.

        Raises:
            RankFailedError: Another rank has failed, is gone or sends another topic; or this one has left a pass.
            OutOfMemoryElsewhereError: A rank lacks memory.
        """
        if self.is_in_pass:
            raise RankFailedError(
                f"rank {self.rank} has left a pass of the model by an error, in which others may still wait for it, so "
                "that no further batch can be trained; end all processes, and start them again"
            )
        said = pickle.dumps((topic, self.moment, value), pickle.HIGHEST_PROTOCOL)
        heard = self._gathered(said if len(said) <= _MESSAGE_BYTES else pickle.dumps(len(said)), _MESSAGE_BYTES)
        lengths = [one for one in heard if isinstance(one, int)]
        if lengths:  # what some have to say takes more than one message
            heard = self._gathered(said, max(_MESSAGE_BYTES, *lengths))
        topics, moments, values = zip(*heard, strict=True)
        if _FAILURE in topics:
            self.are_at_same_moment = len(set(moments)) == 1 and -1 not in moments
            who = "; ".join(f"rank {rank}: {values[rank]}" for rank in range(self.size) if topics[rank] == _FAILURE)
            raise RankFailedError(f"this training cannot continue, since another of its processes has failed ({who})")
        if _LACK in topics:
            lacking = {rank: value for rank, value in enumerate(values) if topics[rank] == _LACK}
            sizes = [size for size, _ in lacking.values() if size is not None]
            who = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in lacking.items())
            raise OutOfMemoryElsewhereError(who, max(sizes, default=None))
        if len(set(topics)) > 1:
            who = ", ".join(f"rank {rank} at {name!r}" for rank, name in enumerate(topics))
            raise RankFailedError(
                f"the processes of this training are out of step ({who}); start all of them with the same arguments"
            )
        return list(values)

    def from_rank_0(self, topic: str, value: Any = None) -> Any:
        """Return rank 0's value, which may be large; the value on other ranks is not used."""
        said = pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if self.rank == 0 else b""
        length = self.exchange(topic, len(said))[0]  # a failure of rank 0 reaches those that wait for it here
        with self.on_network(), self._memory.elsewhere():
            (sent,) = self._last = [torch.empty(length, dtype=torch.uint8)]
            if self.rank == 0:
                sent.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
            self._wait(distributed.broadcast(sent, 0, group=self._hosts(), async_op=True))
            return pickle.loads(sent.numpy().data)  # noqa: S301 - of this training's own processes

    def fail(self, error: BaseException) -> None:
        """Report this rank's failure in place of the next message; at most once, and not if the others are gone."""
        if self._has_failed or self.is_in_pass:
            return
        self._has_failed = True
        with suppress(RankFailedError, StartAgainError):
            self.exchange(_FAILURE, f"{type(error).__name__}: {first_line(error)}")

    def lack(self, size: int | None, error: Exception) -> int | None:
        """Report lack of memory in place of the next message.

        Args:
            size: The size of the micro-batch that did not fit; None if none was being processed.
            error: The error for lack of memory.

        Returns:
            The largest such size of all ranks that report it now.
        """
        try:
            self.exchange(_LACK, (size, first_line(error)))
        except OutOfMemoryElsewhereError as said:
            size = said.size
        return size

    def swap(self, stream: BytesIO, lengths: Sequence[int], received: Tensor, expected: Sequence[int]) -> None:
        """Send each rank its part of a stream, one after the other, and fill a tensor with what they send to this one.

        Args:
            stream: The bytes, those for rank 0 first.
            lengths: How many are for each rank.
            received: The bytes from all ranks, one after the other.
            expected: How many each rank sends to this one.

        Raises:
            RankFailedError: Another rank is gone.
        """
        with self.on_network():
            sent = torch.frombuffer(stream.getbuffer(), dtype=torch.uint8) if sum(lengths) else torch.empty(0).byte()
            self._last = [sent, received]
            shared = {"group": self._hosts(), "async_op": True}
            self._wait(distributed.all_to_all_single(received, sent, [*expected], [*lengths], **shared))

    def leave(self, text: str) -> None:
        """Leave word for the others, which wait inside an operation where no message reaches them.

        Where rank 0 serves the store itself (no torchrun), its word ends with it.
        """
        with suppress(Exception):  # they then say that the network failed
            distributed.distributed_c10d._get_default_store().set(self._word, text)

    def lost(self, error: Exception) -> StartAgainError | RankFailedError:
        """Return the error of this rank where the network fails: what another has left word of, if that is why."""
        with suppress(Exception):  # of a store that is gone
            store = distributed.distributed_c10d._get_default_store()
            if store.check([self._word]):
                self._has_failed = True  # nobody listens any more
                return StartAgainError(store.get(self._word).decode())
        return could_not_exchange(self.rank, error)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor on the device by the sum over all ranks, bit-identical on each.

        Raises:
            RankFailedError: Another rank is gone.
        """
        with self.on_network():
            work = distributed.all_reduce(tensor, group=self._tensors(), async_op=True)
            self._wait(work, is_gloo=self._is_gloo)

    def _gathered(self, said: bytes, size: int) -> list[Any]:
        """Return what every rank says, in messages of so many bytes."""
        with self.on_network(), self._memory.elsewhere():
            self._last = self._buffers if size == _MESSAGE_BYTES else _buffers(self.size, size)
            sent, *received = self._last
            sent.copy_(torch.frombuffer(bytearray(said.ljust(size)), dtype=torch.uint8))
            self._wait(distributed.all_gather(received, sent, group=self._hosts(), async_op=True))
            return [pickle.loads(one.numpy().data) for one in received]  # noqa: S301 - of this training's own processes

    def _wait(self, work: Any, *, is_gloo: bool = True) -> None:
        """Wait so that signals are handled; work of NCCL waits in its own stream instead."""
        while is_gloo and not work.is_completed():
            with suppress(RuntimeError):  # of the time, or of the work, which is raised below
                work.wait(_SIGNALS_EVERY)
        work.wait()

    @contextmanager
    def on_network(self) -> Iterator[None]:
        """Run network operations outside of a memory limit that their native threads could not run under.

        Raises:
            RankFailedError: They failed. Others may have received what was sent, so it is never sent again.
            StartAgainError: They failed since a rank ran out of memory where the others cannot go on.
        """
        try:
            with self._memory.lifted():
                yield
        except (RuntimeError, ValueError, MemoryError) as error:  # the second if the group is gone
            raise self.lost(error) from error


@contextmanager
def joined(memory: MemoryBackend) -> Iterator[Ranks | None]:
    """Join the other processes of this training for a block. Yields None if this is the only process.

    If torch.distributed is already set up, its group is used; otherwise it is set up from torchrun's environment
    variables. If an error ends the block, it is reported to the others.

    Raises:
        InvalidInputError: Only some of the variables are set.
        RankFailedError: Another process has not joined.
    """
    makes_group, process = is_to_be_set_up(), os.getpid()
    ranks = all_ranks(memory)
    try:
        yield ranks
    except BaseException as error:
        if ranks is not None and os.getpid() == process:  # else it was forked, and the error is its own
            _failures.append(type(error).__name__)
            if not isinstance(error, RankFailedError):
                ranks.fail(error)
        raise
    finally:
        if makes_group and os.getpid() == process:
            distributed.destroy_process_group()


def all_ranks(memory: MemoryBackend, *, or_alone: bool = False) -> Ranks | None:
    """Join the other processes of this training as `join_ranks` does.

    Returns:
        All of them; None if this is the only one, unless with `or_alone` it is that of a group.
    """
    join_ranks(memory.device)
    is_group = or_alone and distributed.is_available() and distributed.is_initialized()
    return Ranks(memory) if world_size() > 1 or is_group else None


def join_ranks(device: str | torch.device | None = None) -> None:
    """Join the other processes started by torchrun, for scripts that need them before `fit` (such as for fully_shard).

    Like `torch.distributed.init_process_group`, with a backend each for hosts and GPUs, the GPU at this process's local
    rank, and store names that an earlier attempt (torchrun --max-restarts) has not used. Does nothing if a group is
    already set up, or if this process is alone. `AUTOACCUM_RANK_TIMEOUT_S` sets how long ranks wait for each other.
    The group is destroyed when the process exits, unless an error ends it.

    Args:
        device: The device that this process computes on; None for a GPU if there is one.

    Raises:
        InvalidInputError: There is no such device, or only some of torchrun's variables are set.
        RankFailedError: Another process has not joined.
    """
    chosen = existing(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if not is_to_be_set_up():
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(local_rank() if chosen.index is None else chosen.index)
    _set_up(chosen)
    atexit.register(_destroy_at_exit)


def could_not_exchange(rank: int, error: Exception) -> RankFailedError:
    """Return the error of a rank on which the network failed, for a reason of its own or since another is gone."""
    return RankFailedError(
        f"rank {rank} could not exchange data with the others ({first_line(error) or 'out of memory'}); if one of "
        "them is gone, or did not answer in time, its own output says why"
    )


def _restarts() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _buffers(ranks: int, size: int) -> list[Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for _ in range(1 + ranks)]


@functools.cache
def _message_buffers(ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return buffers for messages, and a view of each; kept to the end of the process.

    To give up a tensor that only Python has left, gloo's threads need the interpreter, and abort the process if that
    is ending. Each view is another owner.
    """
    buffers = _buffers(ranks, _MESSAGE_BYTES)
    return buffers, [buffer[:] for buffer in buffers]


def _default_group() -> Any:
    return distributed.group.WORLD


def _group_of_hosts() -> Callable[[], Any]:
    """Return what returns the group for messages between hosts, beside a default group that has none.

    There is one for each default group, since a second attempt under torchrun may find the addresses that a further
    group had in the first.
    """
    world = _default_group()
    if world not in _groups_of_hosts:
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s()))
        _groups_of_hosts[world] = weakref.ref(group)
    return _groups_of_hosts[world]


def _destroy_at_exit() -> None:
    """Destroy the group while the interpreter is intact: gloo's threads may abort a process that ends with a group.

    See https://github.com/pytorch/pytorch/issues/190489. After an error outside of `joined`, which no message has
    reported, the other ranks may be inside a collective, where destroying the group could wait for them.
    """
    has_failed = hasattr(sys, "last_value") or _failures
    if not has_failed and distributed.is_initialized():
        distributed.destroy_process_group()


def _set_up(device: torch.device) -> None:
    # Its functions hold the group that exists when torch imports it, which is too late for most scripts.
    importlib.import_module("torch.distributed.nn.functional")
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}.get(device.type)
    limit = timedelta(seconds=timeout_s())
    try:
        store, rank, size = next(distributed.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
        # torchrun's own store outlives groups and restarts, and ranks would find addresses of an earlier group.
        name = f"autoaccum/{_restarts()}/{next(_groups_set_up)}"
        store = distributed.PrefixStore(name, store)  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        # A rank that fails at once would end the group while another still connects to it, and the other would report a
        # failed connection instead of a failed rank.
        store.set(f"met/{rank}", "")
        store.wait([f"met/{other}" for other in range(size)], limit)
    except (RuntimeError, ValueError) as error:
        raise RankFailedError(
            f"the other processes of this training could not be reached ({first_line(error)}); they must be started "
            "with the same MASTER_ADDR and MASTER_PORT, each with a RANK of its own"
        ) from error
