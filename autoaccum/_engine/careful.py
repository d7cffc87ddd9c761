"""The careful path through a window: every check, every form of loss, every size that is still to be found.

The first windows of each structure take it, and later ones now and then; so do windows that the steady path does not
know: losses that are pairs, vectors or several, sizes that are searched for, models that communicate in their passes.
"""

from __future__ import annotations

from contextlib import closing
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.nesting import copied
from autoaccum._engine.gradients import PartResult
from autoaccum._engine.noise_scale import spread_of, squared_norm
from autoaccum._engine.out_of_memory import Phase
from autoaccum._engine.steady import is_number_due
from autoaccum._engine.window_loss import WholeWindow
from autoaccum._loss.explaining import OF_SPLIT
from autoaccum._loss.sample_choices import MOST_SAMPLES
from autoaccum._loss.summands import is_same
from autoaccum._loss.window_weights import Alone, WindowWeights
from autoaccum._oom import is_oom, let_go
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._engine.batchnorm import BatchNorms
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import Progress
    from autoaccum._engine.noise_scale import NoiseScale, Spread
    from autoaccum._engine.peers import Peers
    from autoaccum._engine.savepoint import Savepoint
    from autoaccum._loss.settling import Totals
    from autoaccum._loss.summands import SummandKey
    from autoaccum._sizing.sizing import Sizing

# The relative difference of sums of split.weight that rounding may cause.
_ADDS_UP = 1e-6
# Samples of a check of a model: two odd parts, since a model may take pairs.
_OF_A_MODEL = 6


class CarefulPath:
    """Runs the micro-batches of windows, and leaves their gradient in `.grad`.

    Catches only lack of memory for a check that the training does not need.
    """

    def __init__(
        self,
        step: GradientStep,
        sizing: Sizing,
        savepoint: Savepoint,
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
        # Of the state before losses are tried on a few samples.
        self._before_trying = savepoint.like_it()
        self._whole = WholeWindow(step, savepoint) if step.options.loss_scope == "window" else None

    def run(
        self, window: Window, at: Progress, totals: Totals | None, *, is_first: bool, measures_noise: bool
    ) -> PartResult:
        """Run a window, or this process's part, from its start; `totals` predict, or are, the weights of all parts."""
        if self._whole is not None:
            return self._run_whole(self._whole, window, at, is_first=is_first)
        step, sizing, given = self._step, self._sizing, PartResult(window.samples)
        noise = self._noise if measures_noise else None
        weights: Alone | WindowWeights | None = None
        first_norm: Tensor | None = None
        while at.done < window.samples:  # once, but where each micro-batch decides the size of the next
            step.stage.phase, at.size = Phase.WEIGH, None
            sizes, before = sizing.cut(at.done), len(at.sizes)
            if noise is not None:
                sizes = self._cut_to_measure(noise, sizes)
            at.sizes = (*at.sizes[:before], *sizes)
            if weights is None:
                self._check_losses(window, at, sizes, is_first=is_first)
                weights = self._weights_of(window, at, totals)
            if sizing.is_learning and noise is None:
                sizes = sizes[:1]  # its measurement decides the next size
            starts = tuple(accumulate(sizes[:-1], initial=at.done))
            feed = step.transfer.feed(window, sizes, starts)
            with closing(feed):
                for size, start in zip(sizes, starts, strict=True):
                    at.size, sizing.start = size, start
                    self._one(feed, window, size, start, weights, given)
                    if noise is not None and first_norm is None:
                        first_norm = self._squared_norm()
                    at.done += at.size
            at.sizes = at.sizes[: before + len(sizes)]
        at.size = None
        if given.doubt is None and isinstance(weights, WindowWeights):
            weights.finish()
            given.weights = weights
            given.spread = None if first_norm is None else self._spread(first_norm, weights, window.samples)
        return given

    # --- micro-batches ------------------------------------------------------------------------------------------------

    def _one(
        self,
        feed: Generator[Any, None, None],
        window: Window,
        size: int,
        start: int,
        weights: Alone | WindowWeights,
        into: PartResult,
    ) -> None:
        """Run the next micro-batch forward and backward."""
        step, sizing = self._step, self._sizing
        self._enter(size, window.samples)
        step.stage.phase = Phase.TRANSFER
        step.accumulate(next(feed), size, weights, into, start=start)
        if sizing.measures:
            sizing.leave(size)

    def _enter(self, size: int, samples: int) -> None:
        if self._norms.rescales:
            self._norms.rescale(size / samples)
        if self._sizing.measures:
            self._sizing.enter(size)

    def _run_whole(self, whole: WholeWindow, window: Window, at: Progress, *, is_first: bool) -> PartResult:
        """Run a window whose loss is computed over all of it."""
        at.sizes = self._sizing.cut(0)

        def enter(start: int, size: int | None) -> None:
            at.size, at.done = size, max(at.done, start)
            if size is not None:
                self._sizing.start = start
                self._enter(size, window.samples)

        given = whole.run(window, at.sizes, entering=enter, is_first=is_first)
        at.size = None
        return given

    # --- weights ------------------------------------------------------------------------------------------------------

    def _check_losses(self, window: Window, at: Progress, sizes: Sequence[int], *, is_first: bool) -> None:
        """Try the losses on a few samples, where it is not known yet how they weigh them, or it is time again."""
        step, is_part, on_all = self._step, self.peers.is_part, self.peers.samples_to_try
        # Parts of windows are tried in the same windows on all ranks.
        is_due = on_all is not None if is_part else is_first
        if is_due and step.objective.knowledge.is_torch_loss:  # whatever the structure of windows
            self._windows_due += 1
            is_due = is_number_due(self._windows_due)
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
        try:
            step.check_losses(window, self._before_trying, at_most=at_most)
        except Exception as error:
            if not (knowledge.is_torch_loss and is_oom(error)):
                raise
            let_go(error)
            knowledge.is_checked = True  # it is tried again when the next check is due
            step.memory.release()
            if not self._before_trying.is_restored:  # which failed, too; once more, or else the window fails
                self._before_trying.restore()
        self._before_trying.forget()
        step.memory.trim()  # the window needs it

    def _weights_of(self, window: Window, at: Progress, totals: Totals | None) -> Alone | WindowWeights:
        """Return what weighs the losses of a window, or of this process's part of it."""
        knowledge, is_part = self._step.objective.knowledge, self.peers.is_part
        knowledge.refuse_number(window, is_part=is_part)
        if len(at.sizes) == 1 and not is_part:
            return Alone(knowledge)
        if knowledge.default is not None and OF_SPLIT in knowledge.default.hints and not self._adds_up:
            self._check_split(window, at.sizes)
        if self.peers.runs_forward_first() and not (totals is not None and totals.is_exact):
            totals = self.peers.totals_of(self._run_forward(window, at), window.samples)
        return WindowWeights(knowledge, window, totals, has_to_pass=self._step.passes is not None)

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
        self._before_trying.take(with_attributes=True)
        step.stage.phase = Phase.FORWARD
        with closing(step.transfer.feed(window, at.sizes)) as feed:
            for size, start in zip(at.sizes, starts, strict=True):
                at.size, self._sizing.start = size, start
                batch = copied(next(feed))
                weights.enter(start, size, batch)
                for source in step.objective.calls.sources:
                    with step.precision.autocast():
                        losses, _ = step.objective.values(source, batch, size)
                    for loss in losses:
                        if not loss.is_reported:
                            weights.note(loss)
                    del losses
        at.size = None
        self._before_trying.restore()
        self._before_trying.forget_attributes()
        weights.finish()
        return weights.totals()

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
