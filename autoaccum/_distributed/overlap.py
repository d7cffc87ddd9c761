"""Sends gradients to the other ranks while the last backward pass of a window still computes more.

A window proceeds as in `_distributed/data_parallel.py`, but the reduction starts earlier. Before its first micro-batch,
each rank sends the weight of its part, and continues without waiting for the others' weights. In its last backward
pass, it copies each bucket whose gradients are complete into separate memory and starts to reduce it: always in the
same order, and only once all weights are known. The gradients themselves stay unchanged until all ranks have confirmed
that what they sent is valid. A rank that fails after it has begun to send therefore costs the others only time: it
sends the rest nevertheless, repeats its part, and the gradients are then reduced without overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autoaccum._arguments import check_bool
from autoaccum._distributed.buckets import BUCKET_BYTES, Buckets
from autoaccum._loss.objective import SUM
from autoaccum._memory.limits import format_bytes
from autoaccum._oom import is_oom
from autoaccum._system import signals
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from autoaccum._distributed.buckets import Bucket
    from autoaccum._distributed.process_group import Asked, Ranks
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices

# Size of DistributedDataParallel's first bucket (dist._DEFAULT_FIRST_BUCKET_BYTES).
LEAST_BYTES = 2**20
# Minimum number of buckets, unless they would be too small: all but the last can be overlapped.
_BUCKETS = 8
# After this many failed windows in a row the cause is taken to be permanent, and sending twice is not worth it.
_IN_VAIN = 4

# The kind of weight by which parts add up, and this part's weight (`Objective.common_weight`, `Part.weight`).
Weight = tuple[str, float | None]
# For a part whose gradients already carry their weight in the whole window.
SHARED: Weight = (" share", None)


def check_overlap(overlap: object) -> None:
    """Check the argument `overlap`.

    Raises:
        InvalidInputError: It is neither True nor False.
    """
    check_bool("overlap", overlap)


def hindrance(memory: MemoryBackend, limit_bytes: int | None) -> str:
    """Return why gradients cannot be sent during a backward pass; "" if they can."""
    if limit_bytes is None or memory.fails_cleanly:
        return ""
    # The network's own threads allocate memory during the pass, and a limit on the process would apply to them too.
    return f"a memory_limit on {memory.name} holds for the network's threads too"


def room_for_all(
    ranks: Ranks, parameters: Sequence[nn.Parameter], memory: MemoryBackend, hindered: str, notices: Notices
) -> Buckets | None:
    """Allocate memory for all gradients to be in flight at once; None, with a notice, if any rank cannot.

    Args:
        ranks: All ranks.
        parameters: The trained parameters.
        memory: Memory of this rank's device.
        hindered: Any other reason why this rank cannot; "" for none.
        notices: Reports the reason.
    """
    buckets = None
    if not hindered:
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        try:
            buckets = Buckets(parameters, _bucket_bytes(size), are_apart=True, of_gradients=True)
        except Exception as error:
            if not is_oom(error):
                raise
            hindered = f"{memory.name} has no room for a second set of gradients ({format_bytes(size)})"
    for rank, reason in enumerate(ranks.exchange("overlap", hindered)):
        if reason:
            notices.say(f"overlap=True has no effect, since on rank {rank} {reason}")
            buckets = None
            break
    if buckets is None:
        memory.release()
    return buckets


def _bucket_bytes(total: int) -> int:
    return min(BUCKET_BYTES, max(LEAST_BYTES, total // _BUCKETS))


class Overlap:
    """Sends each window's gradients while the last of them are computed.

    Args:
        ranks: All ranks.
        step: This rank's training step.
        trained: The parameters with gradients.
        buckets: The buckets to send them in, each with its own memory.
        weigh: Returns the weight of this rank's part of the window; None if it is not known beforehand.
        say: Reports to the user if overlap is turned off.
    """

    def __init__(
        self,
        ranks: Ranks,
        step: GradientStep,
        trained: Sequence[nn.Parameter],
        buckets: Buckets,
        weigh: Callable[[], Weight | None],
        say: Callable[[str], None],
    ) -> None:
        self._ranks = ranks
        self._step = step
        self._trained = trained
        self._buckets = buckets
        self._weigh = weigh
        self._say = say
        self._is_off = False
        self._in_vain = 0
        self._device = step.memory.device
        self._number: dict[Tensor, int] = {parameter: number for number, parameter in enumerate(trained)}
        self._wanted: list[bool] = []
        self._chosen: list[Bucket] = []
        self._begun: list[Any] = []
        self._hooks: list[RemovableHandle] = []
        self._clear()

    def _clear(self) -> None:
        self._is_open = False
        self._has_offered = False
        self._asked: Asked | None = None
        self._offered: Weight | None = None
        self._factor: float | None = None
        self._is_spoiled = False
        self._lost: RankFailedError | None = None
        self._sent: dict[int, tuple[int, int] | None] = {}

    # --- a window, from its start until all ranks have worked ---------------------------------------------------------

    def begin(self, wanted: Sequence[bool] | None) -> None:
        """Begin a window.

        Args:
            wanted: Which parameters are expected to have a gradient, since they had one in the last window; the same on
                all ranks. None to make this window without overlap.
        """
        self.drop()
        self._clear()
        if wanted is None or self._is_off or not any(wanted):
            return
        self._is_open = True
        if list(wanted) != self._wanted:
            self._wanted = list(wanted)
            self._chosen = list(self._buckets.chosen(wanted))
            self._awaited = [bucket.indices for bucket in self._chosen]
            self._buckets_of: dict[int, list[int]] = {}
            for number, indices in enumerate(self._awaited):
                for index in indices:
                    self._buckets_of.setdefault(index, []).append(number)

    def offer(self) -> None:
        """Send the weight of this rank's part to the others, once per window; their weights are received later."""
        if not self._is_open or self._has_offered:
            return
        weight = self._weigh()
        with signals.held():
            self._asked = self._ranks.ask("weight", weight)
            self._ranks.pending = self.flush
            self._offered, self._has_offered = weight, True

    @contextmanager
    def last(self) -> Iterator[None]:
        """Send gradients as they become ready, in a block that computes the last ones."""
        if self._begun or (self._asked is None and self._factor is None):
            yield
            return
        self._missing = [len(indices) for indices in self._awaited]
        self._arrived: set[int] = set()
        self._queue = self._present_queue()
        try:
            # If an interrupt left a hook behind unrecorded, it would be called from then on.
            with signals.held():
                for parameter, is_wanted in zip(self._trained, self._wanted, strict=True):
                    if is_wanted and parameter.requires_grad:
                        hook = parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
                        self._hooks.append(hook)
            yield
        finally:
            self._remove_hooks()

    def spoil(self) -> None:
        """Record that gradients are discarded: those already sent are no longer valid."""
        self._remove_hooks()  # in case an interrupt came as the block ended
        if self._begun:
            self._is_spoiled = True

    def flush(self) -> None:
        """Send the remaining buckets, valid or not: the others wait for them before any other message.

        Raises:
            RankFailedError: Another rank has failed or is gone.
        """
        try:
            if self._lost is not None:
                raise self._lost
            self.offer()
            self._hear()
            while len(self._begun) < self._to_send:
                self._send_next()
        except RankFailedError:
            self._ranks.pending = None
            raise
        self._ranks.pending = None

    def holds(self, weight: Weight | None) -> bool:
        """Whether everything that this rank has sent is what it would send now.

        Args:
            weight: The weight of its part, as now known.
        """
        if self._is_spoiled or not self._begun or weight != self._offered:
            return False
        return all(self._sent[index] == self._state_of(index) for index, one in enumerate(self._wanted) if one)

    def end(self, *, held: bool) -> None:
        """End the overlap for this window, which may continue without it.

        Args:
            held: Whether what every rank sent was still valid; the same on all ranks.
        """
        went, self._is_open, self._factor = self._to_send, False, None
        if not went:
            return
        self._in_vain = 0 if held else self._in_vain + 1
        if self._in_vain == _IN_VAIN:
            self._is_off = True
            self._say(
                f"overlap=True has no effect from now on: in {_IN_VAIN} windows in a row gradients changed after they "
                "were sent (by hooks of your own, checkpointing with use_reentrant=True, or lack of memory), or were "
                "not those of the window before"
            )

    # --- when all have sent -------------------------------------------------------------------------------------------

    def take(self) -> Exception | None:
        """Replace the gradients by the sums; return this rank's failure, if any.

        Raises:
            RankFailedError: Another rank is gone.
        """
        failure: Exception | None = None
        begun, self._begun = self._begun, []
        for bucket, one in zip(self._chosen, begun, strict=True):
            self._ranks.end_adding_up(one)
            if failure is None:
                try:
                    bucket.take(self._gradient)
                except Exception as error:  # noqa: BLE001 - the others are informed first
                    failure = error
        return failure

    def drop(self) -> None:
        """Wait for everything in flight, and discard it.

        Raises:
            RankFailedError: Another rank is gone.
        """
        begun, self._begun = self._begun, []
        for one in begun:
            self._ranks.end_adding_up(one)

    # --- one bucket after the other -----------------------------------------------------------------------------------

    @property
    def _to_send(self) -> int:
        """Number of buckets to send in this window, as far as is known."""
        return 0 if self._factor is None else len(self._chosen)

    def _arrive(self, parameter: Tensor) -> None:
        """Record that a gradient is complete, and send the buckets that are ready."""
        if self._step.sources_left or self._present_queue() != self._queue:
            return  # another backward pass adds to it; or work queued here would not wait for other gradients
        index = self._number[parameter]
        if index in self._arrived:  # from a backward pass within a backward pass
            self._is_spoiled = self._is_spoiled or index in self._sent
            return
        self._arrived.add(index)
        for number in self._buckets_of[index]:
            self._missing[number] -= 1
        try:
            if self._asked is not None and self._asked.is_answered():
                self._hear()
            while len(self._begun) < self._to_send and not self._missing[len(self._begun)]:
                self._send_next()
        except RankFailedError as error:
            self._lost = error  # raised where this rank would wait for others

    def _hear(self) -> None:
        """Receive the weights of all parts, and determine from them whether this window can overlap."""
        if self._asked is None:
            return
        said: list[Weight | None] = self._asked.answers()
        self._asked = None
        known = [one for one in said if one is not None]
        if len(known) < len(said) or len({common for common, _ in known}) > 1:
            return
        if known[0][0] == SUM or known[0] == SHARED:
            self._factor = 1.0
            return
        total = sum(weight or 0.0 for _, weight in known)
        if total:
            self._factor = (known[self._ranks.rank][1] or 0.0) / total

    def _send_next(self) -> None:
        bucket = self._chosen[len(self._begun)]
        assert self._factor is not None
        try:
            for index in bucket.indices:
                parameter = self._trained[index]
                parameter.grad = self._buckets.make_sendable(parameter.grad)
                state = self._state_of(index)
                if self._sent.setdefault(index, state) != state:  # another part of it was sent before, in another state
                    self._is_spoiled = True
            bucket.fill(self._gradient, self._factor)
        except Exception:  # noqa: BLE001 - the others wait for this bucket, whatever its contents
            self._is_spoiled = True
        with signals.held():
            self._begun.append(self._ranks.begin_adding_up(bucket.tensor))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _gradient(self, index: int) -> Tensor | None:
        return self._trained[index].grad

    def _state_of(self, index: int) -> tuple[int, int] | None:
        """Return an identity that changes whenever the gradient does, comparable only while the gradient is alive."""
        gradient = self._trained[index].grad
        return None if gradient is None else (id(gradient), gradient._version)

    def _present_queue(self) -> Any:
        """Return the GPU stream, in which work waits for what was queued before; None on the CPU."""
        return None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)
