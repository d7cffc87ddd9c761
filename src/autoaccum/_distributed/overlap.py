"""Sends gradients to the other ranks while the last backward pass of a window still makes others.

A window goes as without (`_distributed/data_parallel.py`), but what is added up is on its way earlier. Before its first
micro-batch each rank tells what its part weighs, and goes on without waiting for what the others say. In its last
backward pass it puts each bucket whose gradients are there into memory of its own and begins to add it up: always in
the same order, and not before all have spoken. The gradients themselves stay what they are until all have said that
what they sent holds. So a rank that fails after it has begun to send costs the others nothing but the time: it sends
what is left all the same, does its part again, and the gradients are added up as without.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from autoaccum._arguments import check_bool
from autoaccum._distributed.buckets import BUCKET_BYTES, Buckets
from autoaccum._loss.objective import SUM
from autoaccum._memory.limits import format_bytes
from autoaccum._oom import is_oom
from autoaccum._system import signals
from autoaccum.errors import RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from autoaccum._distributed.buckets import Bucket
    from autoaccum._distributed.process_group import Asked, Ranks
    from autoaccum._engine.step import TrainingStep
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices

# As large as DistributedDataParallel's first bucket (dist._DEFAULT_FIRST_BUCKET_BYTES).
LEAST_BYTES = 2**20
# Into so many buckets gradients go at least, where those are not too small: what is hidden is all but the last one.
_BUCKETS = 8
# Windows in a row after which something that lasts is taken to be in the way, and what is sent twice is not worth it.
_IN_VAIN = 4

# By what parts of a window add up, and what this one weighs (`Objective.common_weight`, `Part.weight`).
Weight = tuple[str, float | None]
# Of a part whose gradients are those of the whole window already.
SHARED: Weight = (" share", None)


def check_overlap(overlap: object) -> None:
    """Check the argument of `fit`.

    Raises:
        InvalidInputError: It is neither True nor False.
    """
    check_bool("overlap", overlap)


def hindrance(memory: MemoryBackend, limit_bytes: int | None) -> str:
    """Return why gradients cannot be sent while a backward pass runs; "" where nothing is in the way."""
    if limit_bytes is None or memory.fails_cleanly:
        return ""
    # The network's own threads take memory while the pass runs, and a limit on the process would be theirs too.
    return f"a memory_limit on {memory.name} holds for the network's threads too"


def room_for_all(
    ranks: Ranks, parameters: Sequence[nn.Parameter], memory: MemoryBackend, hindered: str, notices: Notices
) -> Buckets | None:
    """Make room in which all gradients can be on their way at once; None where any rank cannot, which is said.

    Args:
        ranks: All ranks.
        parameters: Those that are trained.
        memory: Of this rank's device.
        hindered: What else is in this one's way.
        notices: Where it is said.
    """
    buckets = None
    if not hindered:
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        try:
            buckets = Buckets(parameters, _bucket_bytes(size), are_apart=True)
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
    """Sends the gradients of one window after the other while the last of them are made.

    Args:
        ranks: All ranks.
        step: This one's training step.
        trained: The parameters with gradients.
        buckets: Through which those go; each bucket with memory of its own.
        weigh: Returns what this rank's part of the window weighs; None where that is not known beforehand.
        say: Tells the user what has become of it.
    """

    def __init__(
        self,
        ranks: Ranks,
        step: TrainingStep,
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

    # --- a window, from its beginning to when all have worked ---------------------------------------------------------

    def begin(self, wanted: Sequence[bool] | None) -> None:
        """Begin a window.

        Args:
            wanted: Which of the parameters had a gradient in the last window, alike on all ranks, and are expected to;
                None where this window is to go as without.
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
        """Tell the others what this rank's part weighs, once a window; what they say is heard later."""
        if not self._is_open or self._has_offered:
            return
        weight = self._weigh()
        with signals.held():
            self._asked = self._ranks.ask("weight", weight)
            self._ranks.pending = self.flush
            self._offered, self._has_offered = weight, True

    @contextmanager
    def last(self) -> Iterator[None]:
        """Send gradients as they come, in a block that makes the last ones."""
        if self._begun or (self._asked is None and self._factor is None):
            yield
            return
        self._missing = [len(indices) for indices in self._awaited]
        self._arrived: set[int] = set()
        self._queue = self._present_queue()
        try:
            # A hook that an interrupt leaves behind unnoted would be called from then on.
            with signals.held():
                for parameter, is_wanted in zip(self._trained, self._wanted, strict=True):
                    if is_wanted and parameter.requires_grad:
                        hook = parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
                        self._hooks.append(hook)
            yield
        finally:
            self._remove_hooks()

    def spoil(self) -> None:
        """Note that gradients are given up: what was sent of them is no good any more."""
        self._remove_hooks()  # where an interrupt came as the block ended
        if self._begun:
            self._is_spoiled = True

    def flush(self) -> None:
        """Send what is left, whatever has become of it: others wait for it before they hear anything else.

        Raises:
            RankFailedError: Another rank has failed, or is gone.
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
        """Whether all that this rank has sent is what it would send now.

        Args:
            weight: What its part weighs, as is known now.
        """
        if self._is_spoiled or not self._begun or weight != self._offered:
            return False
        return all(self._sent[index] == self._state_of(index) for index, one in enumerate(self._wanted) if one)

    def end(self, *, held: bool) -> None:
        """End what was agreed on for this window, which may go on as without.

        Args:
            held: Whether what each rank has sent was what it would have sent then; alike on all.
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
        """Replace the gradients by the sums; return what failed on this rank.

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
                except Exception as error:  # noqa: BLE001 - it is told to the others first
                    failure = error
        return failure

    def drop(self) -> None:
        """Wait for what is on its way, and make nothing of it.

        Raises:
            RankFailedError: Another rank is gone.
        """
        begun, self._begun = self._begun, []
        for one in begun:
            self._ranks.end_adding_up(one)

    # --- one bucket after the other -----------------------------------------------------------------------------------

    @property
    def _to_send(self) -> int:
        """How many buckets go in this window, as far as is known."""
        return 0 if self._factor is None else len(self._chosen)

    def _arrive(self, parameter: Tensor) -> None:
        """Note that a gradient is whole, and send what can go."""
        if self._step.sources_left or self._present_queue() != self._queue:
            return  # another backward pass adds to it; or what is queued here would not wait for other gradients
        index = self._number[parameter]
        if index in self._arrived:  # by a backward pass within a backward pass
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
            self._lost = error  # raised where others would be waited for

    def _hear(self) -> None:
        """Hear what all parts weigh, and so whether gradients go this way in this window."""
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
                if self._sent.setdefault(index, state) != state:  # of which another part was sent before
                    self._is_spoiled = True
            bucket.fill(self._gradient, self._factor)
        except Exception:  # noqa: BLE001 - the others wait for this bucket, whatever is in it
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
        """Return what changes with a gradient; it is compared only while the gradient stays alive."""
        gradient = self._trained[index].grad
        return None if gradient is None else (id(gradient), gradient._version)

    def _present_queue(self) -> Any:
        """Return the queue of a card in which work waits for what was queued before; None where nothing is queued."""
        return None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)
