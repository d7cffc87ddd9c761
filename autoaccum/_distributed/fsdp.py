"""Makes one window with processes that each hold a shard of the model, so that all of them run every pass together.

`fully_shard` gathers parameters and reduces gradients inside forward and backward passes. All ranks therefore run the
same number of passes, in the same order, and agree before each: if one finds beforehand that it lacks memory, it says
so there, and all restart the window in a smaller cut. If one runs out of memory within a pass, the others are in the
middle of theirs and cannot be reached any more: all have to end, and start again from a checkpoint.
"""

from __future__ import annotations

import itertools
import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from autoaccum._distributed.data_parallel import RankPeers
from autoaccum._distributed.pass_memory import PassMemory
from autoaccum._engine.does_not_fit import ONE_SAMPLE, sample_does_not_fit, sample_of
from autoaccum._engine.dtensor import casts, fsdp_modules, least_size, means_in, spread_again
from autoaccum._engine.gradients import PartResult
from autoaccum._engine.out_of_memory import Phase
from autoaccum._engine.peers import BeginAgain
from autoaccum._loss.known_shares import Nothing
from autoaccum._loss.sample_choices import choices
from autoaccum._oom import clear_traceback_frames, first_line, is_oom
from autoaccum._sizing.backoff import wait_for_memory
from autoaccum._sizing.planner import balanced
from autoaccum._system.attributes import replaced
from autoaccum.errors import InvalidInputError, StartAgainError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from autoaccum._data.batches import Window
    from autoaccum._distributed.buckets import Outcome
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import WindowResult
    from autoaccum._engine.savepoint import SavedState

# BatchNorm refuses to train on a single value per channel.
_LEAST = 2
# A failure would end the process, so sizes grow by steps and never near the limit, as a prediction says little about
# rounding and fragmentation: the fraction of memory to fill, and the factor from one window to the next.
_FILLED, _AT_MOST = 0.85, 2
# What a RuntimeError of a collective within a pass says: gloo names its file. NCCL's has a type of its own.
_OF_THE_NETWORK = re.compile(r"/gloo/|ProcessGroup|NCCL")
# Types in which `fully_shard` asks the network for the mean over ranks; others it divides itself.
_TAKE_A_MEAN = {torch.float32, torch.bfloat16}


class ShardedRankPeers(RankPeers):
    """Makes windows together with ranks that hold the other shards of the model.

    Args:
        ranks: All ranks.
        step: This rank's training step; without an optimizer, as for `RankPeers`.
        largest_size: The largest size to grow to, based on observed memory; None if sizes are fixed.
        said: As for `RankPeers`.
    """

    adds_up_gradients = False

    def __init__(self, ranks: Ranks, step: GradientStep, largest_size: int | None, **said: Any) -> None:
        super().__init__(ranks, step, **said)
        if ranks.size > 1 and means_in(step.objective.modules) & _TAKE_A_MEAN:
            _check_mean(step.memory.device, ranks.size)
        self._spread_parts = fsdp_modules(step.objective.modules)
        self._before: SavedState | None = None  # the state before the last pass with nothing
        self._largest_size = largest_size
        self._larger: int | None = None
        self._least = least_size(step.objective.modules)
        self._passes = 0  # of the current attempt, on the rank with the most
        self._sample: Window | None = None
        self._remedy = "fit has a checkpoint=" if step.optimizer is not None else "`autoaccum run` starts it"
        self._held_bytes: int | None = None
        self._at_first: tuple[list[int], list[float]] | None = None  # versions and sums of the parameters
        self._is_written = False
        self._room = PassMemory(step.memory, step.objective.modules)
        step.objective.casts_itself |= casts(step.objective.modules)
        step.run_in_passes(self, ranks.size)  # the reduction of gradients takes their mean over the ranks

    def begin_attempt(self) -> None:
        """Agree on the number of passes in this attempt."""
        super().begin_attempt()
        self.is_awaited = True
        for part in self._spread_parts:
            part.reshard()  # which a check of losses has left out, as any forward pass by itself
            # A loop may have switched it off for batches before the last of a step.
            part.set_requires_gradient_sync(True, recurse=False)
            part.set_is_last_backward(True)
        sizing = self._sizing
        if self._larger is not None and self._larger > sizing.plan.micro_batch:
            sizing.grow_to(self._larger)
        self._larger = None
        self._passes = max(self.ranks.exchange("passes", len(sizing.cut(0)) if self._window.samples else 0))
        self._room.begin()
        if self._largest_size is not None and self._has_stepped():
            self._held_bytes = self._room.reset()

    def _has_stepped(self) -> bool:
        """Whether parameters were written since the first attempt: then the optimizer, also a loop's, has its state.

        Waits for the device until they were.
        """
        if not self._is_written:
            # Fused kernels move no versions, and a rate that begins with 0 no values.
            shards = [getattr(one, "_local_tensor", one).detach() for one in self._trained]
            sums = torch.stack([shard.sum(dtype=torch.float64) for shard in shards]).tolist() if shards else []
            now = [one._version for one in self._trained], sums
            self._at_first = self._at_first or now
            self._is_written = now != self._at_first
        return self._is_written

    def before_reset(self, note: Callable[[], object]) -> None:
        """As for `Peers`."""
        self._room.before_reset = note

    def agree(self, given: PartResult) -> None:
        """Make the passes that others still have to make, and confirm that all have finished, as `RankPeers` does."""
        for _ in range(self._passes - given.micro_batches):
            self._pass_with_nothing()
        if given.deferred_error is not None:
            raise given.deferred_error
        try:
            super().agree(given)
        except BeginAgain:
            self._take_larger()
            raise
        self._take_larger()

    def _take_larger(self) -> None:
        self._larger = min((part.larger for part in self.parts if part.larger is not None), default=None)

    def add_up(self, given: PartResult, outcome: Outcome, result: WindowResult) -> None:
        """Sum losses and buffers; gradients have already been reduced, pass by pass."""
        correction = self._factors[self.ranks.rank]
        self._exchange_sums(given, outcome, result, [], correction)
        if correction != 1.0:
            gradients = [parameter.grad for parameter in self._step.parameters if parameter.grad is not None]
            outcome.run(lambda: torch._foreach_mul_(gradients, correction))

    def decide(self, reduced: WindowResult) -> WindowResult:
        """As for `Peers`; the norm is then computed over all shards, by all ranks together."""
        super().decide(reduced)
        steps = self._optimizer_steps
        if steps is not None and steps.clip_grad_norm is not None:
            with self._in_pass(self._sizing.plan.micro_batch):
                norm = steps.norm()
                steps.clip(norm)
                reduced.grad_norm = norm.full_tensor()  # type: ignore[attr-defined]
        return reduced

    # --- passes -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _in_pass(self, size: int, window: Window | None = None, *, is_spare: bool = False) -> Iterator[None]:
        """Run what all ranks run together; one that fails there can reach the others no more, and all have to end.

        Args:
            size: The samples of this rank.
            window: The window that they are from, if any.
            is_spare: Whether the pass contributes nothing; its own few samples say nothing of the size that fits.

        Raises:
            StartAgainError: Memory ran out, here or on another rank.
            DoesNotFitError: Memory ran out with the smallest micro-batch.
            RankFailedError: Another rank is gone.
        """
        self.ranks.is_in_pass = self.ranks.size > 1
        try:
            yield
        except Exception as error:
            if not is_oom(error):
                if _is_of_network(error):
                    raise self.ranks.lost(error) from error
                raise
            said, phase = first_line(error), self._step.stage.phase
            if size <= self._least and not is_spare:
                sample = ONE_SAMPLE if window is None else sample_of(window, self._step.stage.start)
                if size > 1:
                    sample = f"a micro-batch of {size} samples, the least for BatchNorm,"
                raise sample_does_not_fit(self._step, said, sample=sample, phase=phase) from error
            of_size = f"in a pass for the others, which has {size}" if is_spare else f"with {size}"
            text = (
                f"rank {self.ranks.rank} ran out of memory {of_size} samples ({phase}: {said}) while the others wait "
                "for it; every process has to be started again, as torchrun does with --max-restarts, and goes on with "
                f"smaller micro-batches if {self._remedy}"
            )
            self.ranks.leave(text)
            own = self._sizing.plan.micro_batch if self._windows else None
            raise StartAgainError(text, own if is_spare else size) from error
        self.ranks.is_in_pass = False

    @contextmanager
    def training_pass(self, size: int) -> Iterator[None]:
        """As for `Passes`."""
        elements, has_gradients = self._elements(size), self._step.holds_gradients()
        self._enter(elements, has_gradients=has_gradients, is_least=size <= self._least)
        self.ranks.exchange("pass")
        with self._in_pass(size, self._window, is_spare=self._step.is_spare):
            yield
        self._room.leave(elements, had_gradients=has_gradients)

    def _elements(self, size: int) -> int:
        """Return the elements of the samples of the pass to come."""
        if self._step.is_spare:
            assert self._sample is not None
            return sum(number * sum(widths) for group in self._sample.widths() for number, widths in group)
        return size * sum(self._sizing.cutter.widths_of(self._step.stage.start, size))

    def _enter(self, elements: int, **of_pass: bool) -> None:
        """Ask for the memory of a pass; some times, where it is made for the others alone."""
        for tries in itertools.count():
            try:
                self._room.enter(elements, **of_pass)
            except Exception as error:
                if not (self._step.is_spare and is_oom(error) and wait_for_memory(tries, may_wait=True)):
                    raise
                clear_traceback_frames(error)
            else:
                return
            self._step.memory.release()

    @contextmanager
    def evaluation_pass(self, size: int) -> Iterator[None]:
        """As for `Passes`; outside of a pass no rank waits for this one, which can try a smaller cut."""
        self.ranks.exchange("evaluation pass", value=True)
        with self._in_pass(size):
            yield

    def evaluate_with_others(self, make_passes: Callable[[Any, int], object]) -> None:
        """As for `Passes`; `make_passes` gets samples on the device, and their number."""
        while any(self.ranks.exchange("evaluation pass", value=False)):
            with self._in_pass(_LEAST, is_spare=True):
                make_passes(*self._nothing())
        spread_again(self._step.objective.modules)

    def _pass_with_nothing(self) -> None:
        """Make a pass that contributes nothing, since others have samples left."""
        self._before = self._step.savepoint.save(self._before)
        batch, samples = self._nothing()
        with replaced((self._step, "is_spare", True), (self._step, "keeps_outputs", False)):
            self._step.accumulate(batch, samples, Nothing(self._step.objective.knowledge), PartResult(samples))
        self._before.restore()

    def _nothing(self) -> tuple[Any, int]:
        """Return samples that will count for nothing, on the device, and their number."""
        assert self._sample is not None
        return self._step.transfer.place(self._sample.cut(0, self._sample.samples)), self._sample.samples

    # --- what parts weigh ---------------------------------------------------------------------------------------------

    def _prepare(self, window: Window) -> None:
        """Try the losses in the first window."""
        self._windows += 1
        self.prepare(window, self._sizing.plan.micro_batch)

    def prepare(self, window: Window | None, size: int) -> None:
        """As for `Passes`: on the same samples on all ranks, since a pass that fails ends them all."""
        knowledge = self._step.objective.knowledge
        if self._sample is not None and (knowledge.is_checked or knowledge.is_stated):
            return
        has_samples = window is not None and bool(window.samples)
        asked = self._samples_to_try(window, sends=True)
        if asked is None:
            if has_samples:
                raise InvalidInputError(
                    "ranks that hold shards of a model send each other samples, and those of this loader cannot be "
                    "pickled"
                )
            return
        self._sample = self._sample or asked.part(0, min(asked.samples, _LEAST))
        # No more than a pass of the training, and the same on all ranks, whose parts may differ in size.
        passes = self.ranks.exchange("size", size if has_samples else None)
        most = max(_LEAST, min(size for size in passes if size is not None))
        asked, _ = next(choices(asked, most), (asked.part(0, most), 0))
        step, objective = self._step, self._step.objective
        sizes = balanced(asked.samples, math.ceil(asked.samples / 2))
        if objective.needs_check(asked, sizes, is_part=True, is_due=False):
            self.ranks.exchange("pass")
            with self._in_pass(size):
                step.stage.phase = Phase.WEIGH
                # Backward passes of shards would reduce gradients: the values and weights of the samples have to do.
                objective.check(asked, step.transfer.place, step.savepoint, step.precision.autocast)

    def runs_forward_first(self) -> bool:
        """As for `Peers`: windows whose weights cannot be predicted are made again."""
        return False

    def _larger_size(self) -> int:
        """Return the size that this rank requests for the next window, by the memory of this one."""
        memory, size = self._step.memory, self._sizing.plan.micro_batch
        peaks = memory.peak_in_use_bytes(), self._room.peak_bytes
        peak = max((one for one in peaks if one is not None), default=None)
        if self._largest_size is None or self._held_bytes is None or peak is None:
            return size
        reading = memory.reading()
        free = _FILLED * (reading.used_bytes + reading.free_bytes) - self._held_bytes
        most = self._largest_size if self._optimizer_steps is not None else self._window.samples
        # In proportion to the samples: the fixed cost of a window counts as theirs, which errs on the safe side.
        larger = int(size * free / max(peak - self._held_bytes, 1))
        return max(size, min(larger, _AT_MOST * size, self._largest_size, most))


def _is_of_network(error: BaseException | None) -> bool:
    """Whether a collective has failed: its error, or what one was made of, as by a check of losses."""
    if error is None:
        return False
    is_plain = type(error) is RuntimeError and _OF_THE_NETWORK.search(str(error)) is not None
    return is_plain or isinstance(error, distributed.DistError) or _is_of_network(error.__cause__)


def _check_mean(device: torch.device, ranks: int) -> None:
    """Raise where the network adds up gradients of which `fully_shard` asks for the mean, as gloo does in PyTorch 2.8.

    Raises:
        InvalidInputError: It does; all ranks find the same.
    """
    mean = torch.empty(1, device=device)
    distributed.reduce_scatter_tensor(mean, torch.ones(ranks, device=device), op=distributed.ReduceOp.AVG)
    if mean.item() != 1.0:
        raise InvalidInputError(
            f"PyTorch {torch.__version__} with {distributed.get_backend()} adds up the gradients that fully_shard "
            "averages, so they would be those of as many batches as there are ranks; use a newer PyTorch"
        )
