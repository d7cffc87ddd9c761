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
from autoaccum._engine.forward_backward import check_weight
from autoaccum._engine.gradients import PartResult
from autoaccum._engine.noise_scale import spread_of, squared_norm
from autoaccum._engine.out_of_memory import Phase
from autoaccum._engine.steady import is_number_due
from autoaccum._engine.window_loss import WholeWindow
from autoaccum._loss.loss_check import MOST_SAMPLES
from autoaccum._loss.loss_forms import Weighting
from autoaccum._oom import is_oom, let_go

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._engine.batchnorm import BatchNorms
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import Progress
    from autoaccum._engine.noise_scale import NoiseScale, Spread
    from autoaccum._engine.peers import Peers
    from autoaccum._engine.savepoint import Savepoint
    from autoaccum._loss.loss_weights import Factors, Slot
    from autoaccum._sizing.sizing import Sizing

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
        # Of the state before losses are tried on a few samples.
        self._before_trying = savepoint.like_it()
        self._whole = WholeWindow(step, savepoint) if step.options.loss_scope == "window" else None

    def run(
        self, window: Window, at: Progress, totals: Mapping[Slot, float] | None, *, is_first: bool, measures_noise: bool
    ) -> PartResult:
        """Run a window, or this process's part, from its start; `totals` are the weights of all parts, if known."""
        if self._whole is not None:
            return self._run_whole(self._whole, window, at, is_first=is_first)
        step, sizing, given = self._step, self._sizing, PartResult(window.samples)
        noise = self._noise if measures_noise else None
        factors: list[Factors] = []
        first_norm: Tensor | None = None
        while at.done < window.samples:  # once, but where each micro-batch decides the size of the next
            step.stage.phase, at.size = Phase.WEIGH, None
            sizes, before = sizing.cut(at.done), len(factors)
            if noise is not None:
                sizes = self._cut_to_measure(noise, sizes)
            at.sizes = (*at.sizes[:before], *sizes)
            if not factors:
                self._check_losses(window, at, sizes, is_first=is_first)
            factors += self._weigh(window, at, totals)[before:]
            if sizing.is_learning and noise is None and step.objective.weights.weighting is not Weighting.OWN_DIVISORS:
                sizes = sizes[:1]  # its measurement decides the next size
            starts = tuple(accumulate(sizes[:-1], initial=at.done))
            feed = step.transfer.feed(window, sizes, starts)
            with closing(feed):
                for size, start, own in zip(sizes, starts, factors[before:], strict=False):
                    at.size, sizing.start, step.objective.weights.start = size, start, start
                    self._one(feed, window, size, own, given)
                    if noise is not None and first_norm is None:
                        first_norm = self._squared_norm()
                    at.done += at.size
            if sizing.is_learning:
                del factors[before + len(sizes) :]
        at.size = None
        if given.doubt is None:
            given.weight, given.provisional = self._weight(given, window, totals)
            given.spread = self._spread(first_norm, window, at.sizes, factors, given)
        return given

    # --- micro-batches ------------------------------------------------------------------------------------------------

    def _one(
        self, feed: Generator[Any, None, None], window: Window, size: int, factors: Factors, into: PartResult
    ) -> None:
        """Run one micro-batch forward and backward."""
        step, sizing = self._step, self._sizing
        self._enter(size, window.samples)
        step.stage.phase = Phase.TRANSFER
        step.accumulate(next(feed), size, factors, into)
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
        if is_due and step.objective.weights.is_trusted:  # whatever the structure of windows
            self._windows_due += 1
            is_due = is_number_due(self._windows_due)
        if step.passes is not None or not step.objective.needs_check(window, sizes, is_part=is_part, is_due=is_due):
            return  # or determined together with the others
        weights = step.objective.weights
        if weights.is_checked and (weights.is_checked_now or (is_part and not is_due)):
            return
        at.size = None if step.objective.tries_several else 1  # if that does not fit, nothing does
        self._try_losses(on_all or window, larger=max(sizes, default=0))
        at.size = None

    def _try_losses(self, window: Window, *, larger: int) -> None:
        step, weights = self._step, self._step.objective.weights
        # With a loss of torch, the training does not need the check, which takes no memory that is not there.
        at_most = _OF_A_MODEL if weights.is_trusted else MOST_SAMPLES
        try:
            step.check_losses(window, self._before_trying, at_most=at_most, larger=larger)
        except Exception as error:
            if not (weights.is_trusted and is_oom(error)):
                raise
            let_go(error)
            weights.is_checked = True  # it is tried again when the next check is due
            step.memory.release()
            if not self._before_trying.is_restored:  # which failed, too; once more, or else the window fails
                self._before_trying.restore()
        self._before_trying.forget()
        step.memory.trim()  # the window needs it

    def _weigh(self, window: Window, at: Progress, totals: Mapping[Slot, float] | None) -> list[Factors]:
        objective, is_part = self._step.objective, self.peers.is_part
        factors = objective.weights.factors(window, at.sizes, totals, is_part=is_part)
        if totals is not None:
            for factor in factors:
                factor.scale = self.peers.multiplier
        if (len(at.sizes) > 1 or is_part) and objective.weights.mixes_pairs:
            # Gradients of several losses share one .grad and cannot be corrected one by one afterwards, so the weights
            # of (sum, weight) pairs are computed beforehand, in a forward pass without a graph.
            weights = self._pair_weights(window, at)
            for name, weight in (weights if totals is None else self.peers.of_pairs(weights)).items():
                for factor in factors:
                    factor.pairs[name] = 1.0 / (weight or 1.0)  # of a part alone, until the ranks have agreed
        return factors

    def _pair_weights(self, window: Window, at: Progress) -> dict[str, float]:
        step, starts = self._step, accumulate(at.sizes[:-1], initial=0)
        weights: dict[str, float] = {}
        self._before_trying.take(with_attributes=True)
        step.stage.phase = Phase.FORWARD
        with torch.no_grad(), closing(step.transfer.feed(window, at.sizes)) as feed:
            for size, start in zip(at.sizes, starts, strict=True):
                at.size, self._sizing.start = size, start
                batch = copied(next(feed))
                for source in step.objective.sources:
                    with step.precision.autocast():
                        terms, _ = step.objective.terms(source, batch, size)
                    for term in terms:
                        if term.weight is not None and not term.is_reported:
                            weights[term.name] = weights.get(term.name, 0.0) + float(term.weight)
        at.size = None
        self._before_trying.restore()
        self._before_trying.forget_attributes()
        if not self.peers.is_part:
            for name, weight in weights.items():
                check_weight(name, weight)
        return weights

    def _weight(
        self, given: PartResult, window: Window, totals: Mapping[Slot, float] | None
    ) -> tuple[float | Tensor | None, float]:
        """Return what the window's loss is divided by, None if nothing is to be corrected; and what stood for it."""
        weights, is_part = self._step.objective.weights, self.peers.is_part
        if not given.weights:
            total = weights.part_weight(window) if is_part and totals is None else None
            return total, float(window.samples) if total is None else total
        # Those of several losses are proportional to each other.
        name, found = next(iter(given.weights.items()))
        return weights.total(name, found, may_be_nothing=is_part), weights.provisional_total(name)

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

    def _spread(
        self,
        first: Tensor | None,
        window: Window,
        sizes: Sequence[int],
        factors: Sequence[Factors],
        given: PartResult,
    ) -> Spread | None:
        """Return how far the first micro-batch's gradient is from the window's, if measured; waits for the device."""
        if first is None:
            return None
        weights, total = self._weights(sizes, window.samples, factors, given)
        if not total or not sum(weights):
            return None
        unit = total * self._step.loss_scale()
        part, whole = (number / unit**2 for number in torch.stack([first, self._squared_norm()]).tolist())
        return spread_of(part, whole, weights[0] / sum(weights), window.samples)

    def _weights(
        self, sizes: Sequence[int], samples: int, factors: Sequence[Factors], given: PartResult
    ) -> tuple[Sequence[float], float]:
        """Return each micro-batch's weight in the mean gradient, and what to divide the gradient by for a mean."""
        known = self._step.objective.weights
        if known.weighting is Weighting.SUM:
            return sizes, float(samples)
        if given.weights:
            name, found = next(iter(given.weights.items()))
            weights = [float(weight) for weight in found]
            return weights, sum(weights) / known.provisional_total(name)
        # Losses of which each runs over something else have no common weight: that of the samples stands for it.
        own = [one.usual for one in factors]
        return own, sum(own)
