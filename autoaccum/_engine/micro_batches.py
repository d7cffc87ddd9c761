"""Runs the micro-batches of a window, forward and backward: the one loop that every window takes.

What only some windows need is a hook before or after each micro-batch: sizes that are measured, BatchNorm's momentum,
the noise of gradients. How losses are weighed is chosen before the first micro-batch.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.nesting import copied
from autoaccum._engine.due_checks import is_check_window
from autoaccum._engine.gradients import PartResult
from autoaccum._engine.noise_scale import spread_of, squared_norm
from autoaccum._engine.out_of_memory import Phase
from autoaccum._engine.window_loss import WholeWindow
from autoaccum._loss.explaining import OF_SPLIT
from autoaccum._loss.known_shares import BySamples, SingleMicroBatch, go_by_samples
from autoaccum._loss.sample_choices import MOST_SAMPLES
from autoaccum._loss.summands import is_same
from autoaccum._loss.window_weights import WindowWeights
from autoaccum._oom import clear_traceback_frames, is_oom
from autoaccum._system.launched import max_micro_batch
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._engine.batchnorm import BatchNorms
    from autoaccum._engine.forward_backward import GradientStep, LossPass
    from autoaccum._engine.gradients import Progress
    from autoaccum._engine.noise_scale import NoiseScale, Spread
    from autoaccum._engine.peers import Peers
    from autoaccum._engine.savepoint import SavedState
    from autoaccum._loss.loss_sources import Source
    from autoaccum._loss.settling import Totals
    from autoaccum._loss.summands import SummandKey
    from autoaccum._sizing.sizing import Sizing

    Hook = Callable[[int, int], object]  # called with a micro-batch's first sample and its size
    Weigh = Callable[[Any, Any, int], Tensor | None]  # as of a `LossPass`

# The relative difference of sums of split.weight that rounding may cause.
_ADDS_UP = 1e-6
# Samples of a check of a model: two odd parts, since a model may take pairs.
_OF_A_MODEL = 6
# The fewest samples of a check: one in each of two parts.
_OF_PARTS = 2


class MicroBatches:
    """Runs the micro-batches of windows, and leaves their gradient in `.grad`.

    Catches only lack of memory for a check that the training does not need.
    """

    def __init__(
        self,
        step: GradientStep,
        sizing: Sizing,
        *,
        norms: BatchNorms,
        peers: Peers,
        noise: NoiseScale | None,
    ) -> None:
        self._step = step
        self._sizing = sizing
        self._norms = norms
        self.peers = peers
        self._noise = noise
        self._windows_due = 0  # with a loss of torch
        self._adds_up = False  # whether the split's weight was seen to
        self._is_number = True  # whether the loss of a pair was a number in all windows
        self._whole = WholeWindow(step) if step.options.loss_scope == "window" else None

    def run(
        self,
        window: Window,
        at: Progress,
        at_start: SavedState,
        totals: Totals | None,
        *,
        checks_all: bool,
        measures_noise: bool,
    ) -> PartResult:
        """Run a window, or this process's part, from its start.

        Args:
            window: The samples.
            at: Follows the micro-batches.
            at_start: The state before the window.
            totals: Predict, or are, the weights of all parts; None if nothing is known of other parts.
            checks_all: Whether the window is due for all checks.
            measures_noise: Whether to measure the noise of its gradient.
        """
        if self._whole is not None:
            return self._run_whole(self._whole, window, at, at_start, checks_all=checks_all)
        step, sizing, stage, given = self._step, self._sizing, self._step.stage, PartResult(window.samples)
        noise = self._noise if measures_noise else None
        weights: SingleMicroBatch | WindowWeights | None = None
        loss_passes: list[LossPass] = []
        first_norm: list[Tensor] = []
        before, after = self._hooks(window, None if noise is None else first_norm)
        while at.done < window.samples:  # once, but where each micro-batch decides the size of the next
            stage.phase, at.size, earlier = Phase.WEIGH, None, len(at.sizes)
            sizes = sizing.cut(at.done)
            if noise is not None:
                sizes = self._cut_to_measure(noise, sizes)
            at.sizes = (*at.sizes[:earlier], *sizes)
            if weights is None:
                self._check_losses(window, at, sizes, checks_all=checks_all)
                weights = self._weights_of(window, at, totals, checks_all=checks_all, is_noisy=noise is not None)
                loss_passes = self._loss_passes(window, weights, given, at, checks_all=checks_all)
            if sizing.measures and sizing.is_learning and noise is None:
                sizes = sizes[:1]  # its measurement decides the next size
            with step.transfer.feed(window, sizes, at.done) as feed:
                for size in sizes:
                    at.size, stage.start, stage.phase = size, at.done, Phase.TRANSFER
                    for hook in before:
                        hook(at.done, size)
                    step.run(next(feed), size, loss_passes)
                    for hook in after:
                        hook(at.done, size)
                    at.done += size
            at.sizes = at.sizes[: earlier + len(sizes)]
        at.size, given.micro_batches = None, len(at.sizes)
        if given.deferred_error is None and isinstance(weights, WindowWeights):
            weights.finish()
            given.weights = weights
            given.spread = self._spread(first_norm[0], weights, window.samples) if first_norm else None
        return given

    def _hooks(self, window: Window, first_norm: list[Tensor] | None) -> tuple[list[Hook], list[Hook]]:
        """Return what this window needs before and after each micro-batch.

        `first_norm` gets the squared norm of the first micro-batch's gradient; None if nobody asks for it.
        """
        before: list[Hook] = []
        after: list[Hook] = []
        if self._norms.rescales:
            before.append(lambda _, size: self._norms.rescale(size / window.samples))
        if self._sizing.measures:
            before.append(self._sizing.enter)
            after.append(self._sizing.leave)
        if first_norm is not None:
            after.append(lambda *_: first_norm.extend([] if first_norm else [self._squared_norm()]))
        return before, after

    def _loss_passes(
        self,
        window: Window,
        weights: SingleMicroBatch | WindowWeights,
        given: PartResult,
        at: Progress,
        *,
        checks_all: bool,
    ) -> list[LossPass]:
        """Return how micro-batches run: plainly where the loss of a pair was a number, and is weighed at once."""
        step, calls = self._step, self._step.objective.calls
        is_plain = calls.takes_pairs and self._is_number and window.is_known_pair
        if is_plain and weights.is_quick and not (checks_all or step.keeps_outputs or step.passes is not None):
            return [(calls.of_pair, self._plainly(weights, given, at))]
        return step.loss_passes(weights, given, at)

    def _plainly(self, weights: SingleMicroBatch | WindowWeights, given: PartResult, at: Progress) -> Weigh:
        """Return what weighs the only loss of a pair at once; as any other where that cannot be."""
        name = next(iter(self._step.objective.knowledge.summands))
        losses, weigh_at_once = given.loss(name), weights.weigh_at_once

        def weigh(value: Any, batch: Any, samples: int) -> Tensor | None:
            loss = None
            if isinstance(value, Tensor) and not value.dim() and value.requires_grad:
                loss = weigh_at_once(name, value, samples)
            else:
                self._is_number = False
            if loss is None:
                ((_, otherwise),) = self._step.loss_passes(weights, given, at)
                return otherwise((self._step.objective.read(value, samples), None), batch, samples)
            # Without a factor, it may be a buffer that the next micro-batch overwrites.
            losses.append(loss.detach() if loss is not value or samples == given.samples else loss.detach().clone())
            return loss

        return weigh

    def _run_whole(
        self, whole: WholeWindow, window: Window, at: Progress, at_start: SavedState, *, checks_all: bool
    ) -> PartResult:
        """Run a window whose loss is computed over all of it."""
        at.sizes = self._sizing.cut(0)
        before, _ = self._hooks(window, None)

        def enter(start: int, size: int | None) -> None:
            at.size, at.done = size, max(at.done, start)
            if size is not None:
                self._step.stage.start = start
                for hook in before:
                    hook(start, size)

        given = whole.run(window, at.sizes, at_start, entering=enter, is_first=checks_all)
        at.size = None
        return given

    # --- weights ------------------------------------------------------------------------------------------------------

    def _check_losses(self, window: Window, at: Progress, sizes: Sequence[int], *, checks_all: bool) -> None:
        """Try the losses on a few samples, where it is not known yet how they weigh them, or it is time again."""
        step, is_part, on_all = self._step, self.peers.is_part, self.peers.samples_to_try
        # Parts of windows are tried in the same windows on all ranks.
        is_due = on_all is not None if is_part else checks_all
        if is_due and step.objective.knowledge.is_torch_loss:  # whatever the structure of windows
            self._windows_due += 1
            is_due = is_check_window(self._windows_due)
        if step.passes is not None or not step.objective.needs_check(window, sizes, is_part=is_part, is_due=is_due):
            return  # or determined together with the others
        knowledge = step.objective.knowledge
        if knowledge.is_checked and (knowledge.is_checked_now or (is_part and not is_due)):
            return
        at.size = None if step.objective.tries_several else 1  # if that does not fit, nothing does
        self._try_losses(on_all or window)
        at.size = None

    def _try_losses(self, window: Window) -> None:
        step, knowledge = self._step, self._step.objective.knowledge
        # With a loss of torch, the training does not need the check, which takes no memory that is not there.
        at_most = _OF_A_MODEL if knowledge.is_torch_loss else MOST_SAMPLES
        # `autoaccum run` sets a cap after a process was killed for its memory, which no check survives either.
        at_most = max(_OF_PARTS, min(at_most, max_micro_batch() or at_most))
        try:
            step.check_losses(window, at_most=at_most)
        except Exception as error:
            if not (knowledge.is_torch_loss and is_oom(error)):
                raise
            clear_traceback_frames(error)
            knowledge.do_without_check()
            step.memory.release()
            if step.savepoint.unrestored is not None:  # that failed, too; once more, or else the window fails
                step.savepoint.unrestored.restore()
        step.memory.trim()  # the window needs it

    def _weights_of(
        self, window: Window, at: Progress, totals: Totals | None, *, checks_all: bool, is_noisy: bool
    ) -> SingleMicroBatch | WindowWeights:
        """Return what weighs the losses of a window, or of this process's part of it."""
        knowledge, is_part = self._step.objective.knowledge, self.peers.is_part
        if window.kinds is None:
            knowledge.refuse_number(window, is_part=is_part)
        if not is_noisy and not is_part and go_by_samples(knowledge, self._step.objective.calls.loss, window):
            return BySamples(knowledge, window.samples)
        if len(at.sizes) == 1 and not is_part:
            return SingleMicroBatch(knowledge)
        if knowledge.default is not None and OF_SPLIT in knowledge.default.hints and not self._adds_up:
            self._check_split(window, at.sizes)
        if self.peers.runs_forward_first() and not (totals is not None and totals.is_exact):
            totals = self.peers.totals_of(self._run_forward(window, at), window.samples)
        return WindowWeights(
            knowledge, window, totals, passes_together=self._step.passes is not None, compares=checks_all
        )

    def _check_split(self, window: Window, sizes: Sequence[int]) -> None:
        """Reject a split whose weight does not add up, in the first window that is cut."""
        whole, stops = window.weight(0, window.samples), accumulate(sizes)
        added = sum(window.weight(stop - size, stop) for size, stop in zip(sizes, stops, strict=True))
        if not is_same(whole, added, _ADDS_UP):
            raise InvalidInputError(
                f"split={self._step.objective.split!r}: weight does not add up: {whole:g} for a window, and {added:g} "
                f"for its {len(sizes)} micro-batches together, as a mean or a maximum would; return a sum, such as the "
                "tokens"
            )
        self._adds_up = len(sizes) > 1

    def _run_forward(self, window: Window, at: Progress) -> dict[SummandKey, float]:
        """Return the weights of a window's summands, by forward passes alone, with graphs."""
        step, starts = self._step, accumulate(at.sizes[:-1], initial=0)
        weights = WindowWeights(step.objective.knowledge, window)
        before = step.savepoint.save(with_attributes=True)
        step.stage.phase = Phase.FORWARD
        with step.transfer.feed(window, at.sizes) as feed:
            for size, start in zip(at.sizes, starts, strict=True):
                at.size, step.stage.start = size, start
                batch = copied(next(feed))
                weights.enter(start, size, batch)
                for source in step.objective.calls.sources:
                    self._note_weights(source, batch, size, weights)
        at.size = None
        before.restore()
        weights.finish()
        return weights.totals()

    def _note_weights(self, source: Source, batch: Any, samples: int, weights: WindowWeights) -> None:
        """Run one forward pass, and note what its losses are divided by; nothing of it is left."""
        with self._step.precision.autocast():
            losses, _ = self._step.objective.values(source, batch, samples)
        for loss in losses:
            if not loss.is_reported:
                weights.note(loss)

    # --- windows in which the noise of gradients is measured ----------------------------------------------------------

    def _cut_to_measure(self, noise: NoiseScale, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of a window's micro-batches; where the window fits at once, two."""
        if self._norms.is_there:
            noise.say(
                "BatchNorm computes its statistics from each micro-batch, so the noise scale that is measured depends "
                "on the micro-batch's size too"
            )
        size, is_whole = sizes[0], len(sizes) == 1
        if is_whole and size > 1 and not self._norms.is_there:
            noise.say(f"windows fit at once, so one in {noise.every} is split in two to measure the noise")
            return size - size // 2, size // 2
        if is_whole:
            noise.say(
                "a window of one sample cannot be split in two, so it tells nothing about noise"
                if size == 1
                else "windows fit at once, and are not split in two to measure the noise, since BatchNorm would then "
                "compute its statistics from halves; smaller micro-batches make it measurable",
                hinders=True,
            )
        return sizes

    def _squared_norm(self) -> Tensor:
        return squared_norm((parameter.grad for parameter in self._step.parameters), self._step.memory.device)

    def _spread(self, first: Tensor, weights: WindowWeights, samples: int) -> Spread | None:
        """Return how far the first micro-batch's gradient is from the window's; waits for the device."""
        of_each, total = weights.of_gradient()
        if not total or not sum(of_each):
            return None
        unit = total * self._step.loss_scale()
        part, whole = (number / unit**2 for number in torch.stack([first, self._squared_norm()]).tolist())
        return spread_of(part, whole, of_each[0] / sum(of_each), samples)
