"""Computes one window's gradient micro-batch by micro-batch; a failed micro-batch does not undo completed ones.

A window's micro-batches run in order. If one runs out of memory, buffers and random state are restored to where that
micro-batch began, and the rest of the window is cut again. The window is restarted only if the failed micro-batch's
gradients are already mixed with the others'. Either way, the result is bit for bit that of the same cut without a
failure.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from autoaccum._engine.forward_backward import Accumulated, check_weight
from autoaccum._engine.gradients import Given
from autoaccum._engine.noise_scale import SquaredNorm, spread_of, squared_norm
from autoaccum._engine.phases import Phase
from autoaccum._engine.separate_gradients import Aside
from autoaccum._engine.window_loss import WholeWindow, check_loss_scope
from autoaccum._loss.objective import PAIR, SAMPLES, SUM
from autoaccum._loss.weighting import in_full
from autoaccum._oom import is_oom, let_go
from autoaccum._snapshot import Mark
from autoaccum._system import signals
from autoaccum.errors import InvalidInputError, StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._engine.batchnorm import BatchNorms
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.moving_layers import MovingLayers
    from autoaccum._engine.noise_scale import NoiseScale, Spread
    from autoaccum._engine.peers import GradientPeers, SharedWeights
    from autoaccum._loss.objective import Factors
    from autoaccum._loss.reported import Slot
    from autoaccum._sizing.sizing import Sizing


T = TypeVar("T")

# Elements of a frozen parameter summed at once: their copies in double precision take 2 MiB.
_SUMMED_AT_ONCE = 2**18


class MicroBatches:
    """Runs the micro-batches of one window in order and leaves their gradient in `.grad`.

    Args:
        step: The training step.
        sizing: Cuts the windows.
        loss_scope: "micro_batch", or "window" for a loss computed over the whole window at once.
        norms: The step's BatchNorm layers.
        moving: Reports other layers that move with every micro-batch.
        peers: The processes of the training; None if this one is alone.
        noise: The gradient noise scale that windows are measured for; None without `noise_scale`.

    Raises:
        InvalidInputError: `loss_scope` is unknown, or the loss cannot be computed that way.

    Attributes:
        sizes: The window's current cut, completed micro-batches first.
        size: Size of the micro-batch being processed; None if there is none.
        recomputed: Samples of this window that were computed and discarded.
    """

    def __init__(
        self,
        step: GradientStep,
        sizing: Sizing,
        *,
        loss_scope: str,
        norms: BatchNorms,
        moving: MovingLayers,
        peers: GradientPeers | None = None,
        noise: NoiseScale | None = None,
    ) -> None:
        check_loss_scope(loss_scope)
        self._noise = noise
        self._is_part = peers is not None and peers.is_part
        self._sending = None if peers is None else peers.sending
        self._step = step
        self._norms = norms
        self._moving = moving
        self._sizing = sizing
        self._takes_whole = loss_scope == "window"
        self._kept: list[nn.Parameter] = []
        self.take_stock()

    def take_stock(self) -> None:
        """Read the step's current modules and parameters. Must not be called within a window.

        The next window is treated as a first one: which parameters the model itself writes is not known before it.
        """
        step = self._step
        modules, device = step.objective.modules, step.memory.device
        # The state before the window, and before the current micro-batch.
        self._at_window = Mark(modules, device)
        self._at_micro_batch = Mark(modules, device, earlier=self._at_window)
        self._whole = WholeWindow(step, self._at_window) if self._takes_whole else None
        # Parameters that the model may turn out to write itself: all in the first window, then only the frozen ones.
        present = set(step.parameters)
        self._kept = [parameter for parameter in self._kept if parameter in present]
        unknown = [parameter for parameter in step.parameters if parameter not in set(self._kept)]
        self._frozen = [parameter for parameter in unknown if not parameter.requires_grad]
        self._watched = unknown
        self._versions: list[int] = []
        self._sums: list[Tensor] | None = None
        self._is_first = True
        # Whether micro-batches draw random numbers, as far as the first window has shown. Where they do not, random
        # state is kept once a window: a micro-batch that fails after all that has drawn costs the window.
        self._draws = True
        if self._whole is not None:
            # Every forward pass is made twice, also in the first window, so a momentum encoder must be restored.
            self._at_window.keep_also([*self._kept, *self._frozen])
            self._watched = [parameter for parameter in unknown if parameter.requires_grad]
        elif self._kept:
            self._at_window.keep_also(self._kept)
            self._at_micro_batch.keep_also(self._kept)

    def named_sample(self, index: int) -> str | None:
        """Return a sample's place in the window and its length; None if nothing is known of lengths."""
        return self._window.named(index)

    def begin(self, window: Window, share: SharedWeights | None = None, *, measures_noise: bool = False) -> None:
        """Prepare for a window; nothing in it has run yet.

        Args:
            window: The window, or this process's part of it.
            share: What is known in advance about the weight of the other parts.
            measures_noise: Whether to measure how far the gradients of its micro-batches are apart.
        """
        self._window = window
        self._measured = self._noise if measures_noise else None
        self._share = share
        self._versions_of_data = window.versions()
        self._marked = self._moved = False
        self._adding: Aside | None = None
        self._seen_written: list[nn.Parameter] | None = None  # recorded before the optimizer writes too
        self.sizes: tuple[int, ...] = ()
        self.size: int | None = None
        self.recomputed = 0
        self._forget()

    def run(self, *, aside: bool) -> Given:
        """Continue from what is done to the end of the window.

        Args:
            aside: Whether gradients are collected aside, so that a failed backward pass costs only its micro-batch.

        Raises:
            InvalidInputError: The loss's return value cannot be used.
        """
        self._set_aside()
        pair_weight: float | Tensor | None = None
        if self._whole is not None:
            losses, noted = self._run_whole(self._whole), self._whole.reported
        else:
            self._run_rest(aside=aside)
            pair_weight = self._pair_weight()
            losses = {name: _total(values) for name, values in _by_name(self._accumulated.losses).items()}
            noted = self._accumulated.reported
            if self._step.watch is not None and self._sending is None:
                self._step.watch.check()
        self.size = None
        self._see_what_is_written()
        if not self._moving.has_looked and not self._sizing.is_learning:
            before = self._at_window if self._whole is not None else self._at_micro_batch
            self._moving.look(before, self._at_window, self.sizes, self._kept)
        spread = None if self._measured is None else self._spread(self._measured, pair_weight)
        return Given(losses, pair_weight, self._window.samples, _sums_of(noted) if noted else {}, spread)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The model's outputs for each completed micro-batch, without graphs, if the step keeps them."""
        return tuple(self._accumulated.outputs if self._whole is None else self._whole.parts)

    def put_back_failed(self) -> None:
        """After running out of memory, restore only what has to be repeated."""
        if self._window.versions() != self._versions_of_data:
            raise InvalidInputError(
                "memory ran out after the model had changed its input in place, so the window cannot be done again "
                "from the same data; let the model work on a copy (inputs.clone())"
            )
        if self._step.phase is Phase.RESERVE:
            return  # nothing was touched
        with signals.held():
            if self.size is None or not self._is_intact():
                self.recomputed += self._worked_on()
                self._put_back_window()
            elif self._moved:
                self.recomputed += self.size
                self._put_back_micro_batch()

    def undo(self) -> int:
        """Restore everything to its state before the window.

        Returns:
            The number of parameters that could not be restored: those that the model turned out to write itself in
            its first window, before which none were copied.
        """
        with signals.held():
            self._put_back_window()
            if self._seen_written is not None:
                return len(self._seen_written)
            try:
                return len(self._written())
            except Exception as error:
                if not is_oom(error):
                    raise
                self._sums = None  # checksums need memory that the failed graph still holds; counters need none
                return len(self._written())

    def end(self) -> None:
        """Release the window, which has become an update or was abandoned; `sizes` and `recomputed` stay."""
        if self._norms.rescales:
            self._norms.put_back()
        if self._window.versions() != self._versions_of_data:
            self._step.transfer.copy_always()
        self._forget()
        del self._window

    def start_over(self, share: SharedWeights | None = None) -> None:
        """Restart the window, since its parts do not fit together.

        Args:
            share: As for `begin`.
        """
        self._share = share
        with signals.held():
            self._start_over()

    def _start_over(self) -> None:
        self.recomputed += self._samples_done
        self._put_back_window()

    def _forget(self) -> None:
        self._done = self._samples_done = self._entered = 0
        self._accumulated = Accumulated()
        self._factors: list[Factors] = []
        self._losses_of_whole: dict[str, Tensor] | None = None
        self._squares: list[Tensor | None] = []  # of each completed micro-batch's gradient, if noise is measured

    def _set_aside(self) -> None:
        if self._marked:
            return
        self._step.stage.phase, self.size = Phase.SET_ASIDE, None
        self._at_window.take()
        self._versions = [parameter._version for parameter in self._watched]
        if self._is_first:
            self._sums = _sums(self._frozen)
        self._marked = True

    def _plan(self) -> None:
        """Cut what is not done, and check that completed micro-batches keep their weight in this cut."""
        step = self._step
        step.stage.phase, self.size = Phase.WEIGH, None
        while True:
            done = self.sizes[: self._done]
            rest = self._sizing.cut(sum(done))
            if done and 1 in rest and not self._sizing.is_learning and 1 not in self._sizing.cut(0):
                # BatchNorm rejects a single sample, which only the rest of this window would produce.
                self._start_over()
                continue
            if self._measured is not None:
                rest = self._cut_to_measure(self._measured, rest)
            self.sizes = (*done, *rest)
            place, autocast = step.transfer.place, step.precision.autocast
            if step.passes is None:  # otherwise determined together with the others
                step.objective.settle(self._window, self._told_apart(), place, self._at_micro_batch, autocast)
            factors = self._weigh()
            if factors[: self._done] == self._factors[: self._done]:
                self._factors = factors
                break
            # New knowledge about the loss, or a sum's last bit, changes the weight of completed micro-batches.
            self._start_over()
        if self._sending is not None:
            self._sending.offer()

    def _told_apart(self) -> Sequence[int]:
        """Return a cut on which it shows, as it does between the parts of the window, what the loss runs over."""
        samples = self._window.samples
        if not self._is_part or len(self.sizes) > 1 or samples == 1:
            return self.sizes
        return (samples - samples // 2, samples // 2)

    def _run_rest(self, *, aside: bool) -> None:
        """Run the remaining micro-batches, forward and backward."""
        window, sending = self._window, self._sending
        while self._samples_done < window.samples:
            self._plan()
            if self._norms.is_there and not self._sizing.is_learning:
                self._norms.announce(self.sizes)  # only for a cut that will be used again
            rest = self.sizes[self._done :]
            if self._sizing.is_learning and not self._step.objective.mixes_pairs():
                rest = rest[:1]  # its measurement decides the next size
            with closing(self._step.transfer.feed(window, rest, self._samples_done)) as feed:
                for size in rest:
                    is_aside = aside and self._done > 0
                    # Early sending is left out where noise is measured, from the gradients of this process alone.
                    may_send = sending is not None and not is_aside and self._measured is None
                    if may_send and self._samples_done + size == window.samples:
                        assert sending is not None
                        with sending.last():
                            self._one(feed, size, aside=False)
                    else:
                        self._one(feed, size, aside=is_aside)

    def _run_whole(self, whole: WholeWindow) -> dict[str, Tensor]:
        """Run a window whose loss is computed over all of it, unless only its update has to be retried."""
        if self._losses_of_whole is None:
            self.sizes = self._sizing.cut(0)
            self._norms.announce(self.sizes)
            self._losses_of_whole = whole.run(self._window, self.sizes, entering=self._enter)
        return self._losses_of_whole

    def _one(self, feed: Generator[Any, None, None], size: int, *, aside: bool) -> None:
        """Run one micro-batch forward and backward."""
        step, stage = self._step, self._step.stage
        if aside and step.watch is not None:
            step.watch.begin_aside()
        self.size = size
        self._moved = step.has_added = False
        self._adding = None
        stage.phase = Phase.SET_ASIDE
        if self._done:
            self._at_micro_batch.take(random=self._draws)
            if not self._moving.has_looked:
                self._moving.note()
        self._moved = True
        self._enter(size)
        stage.phase = Phase.TRANSFER
        batch = next(feed)
        given = Accumulated()
        square = None if self._measured is None else self._square()
        with square or nullcontext():
            if aside:
                self._adding = Aside(step.parameters)
                try:
                    with self._adding:
                        if step.watch is not None:
                            step.watch.note()
                        step.accumulate(batch, size, self._factors[self._done], given)
                finally:
                    if step.watch is not None:
                        step.watch.note()
            else:
                step.accumulate(batch, size, self._factors[self._done], given)
        if square is not None:
            self._squares.append(square.value())
        if self._sizing.measures:
            self._sizing.leave(size)
        self._accumulated.add(given)
        self._samples_done += size
        self._done += 1

    def _enter(self, size: int | None) -> None:
        """Prepare for a micro-batch; None means the loss of a whole window."""
        self.size = size
        if size is None:
            return
        self._sizing.start = self._samples_done if self._whole is None else self._entered % self._window.samples
        self._entered += size
        if self._norms.rescales:
            self._norms.rescale(size / self._window.samples)
        if self._sizing.measures:
            self._sizing.enter(size)

    def _worked_on(self) -> int:
        """Samples that have been processed in this window since its last (re)start."""
        return min(self._entered, self._window.samples) if self._whole else self._samples_done + (self.size or 0)

    def _is_intact(self) -> bool:
        """Whether completed gradients are whole and can be separated from those of the failed micro-batch."""
        if self._whole is not None:
            return False
        if self._done == 0:
            return True
        if not self._draws and self._may_have_drawn():
            self._draws = True
            return False
        return not self._step.has_added or (self._adding is not None and not self._adding.adding)

    def _may_have_drawn(self) -> bool:
        """Whether random state is another than before the window; also if there is no memory to tell."""
        try:
            return self._at_window.random.has_moved()
        except Exception as error:
            if not is_oom(error):
                raise
            let_go(error)
            return True

    def _put_back_micro_batch(self) -> None:
        if self._done == 0:
            self._put_back_window()
            return
        self._at_micro_batch.put_back()

    def _put_back_window(self) -> None:
        if self._sending is not None:
            self._sending.spoil()
        if self._adding is not None:
            self._adding.drop()
        self._step.abandon()
        if self._step.watch is not None:
            self._step.watch.forget()
        self._step.objective.put_back_modes()
        if self._marked:
            self._at_window.put_back()
        self._forget()

    def _weigh(self) -> list[Factors]:
        objective = self._step.objective
        if self._is_part and self._share is None:
            # The weight of this part alone; parts are combined by it.
            return objective.factors(self._window, self.sizes, is_part=True)
        totals = None if self._share is None else self._share.totals
        factors = objective.factors(self._window, self.sizes, totals, is_part=self._is_part)
        if self._share is not None and self._share.multiplier != 1.0:
            factors = [one.times(self._share.multiplier) for one in factors]
        if (len(self.sizes) > 1 or self._is_part) and objective.mixes_pairs():
            # Gradients of several losses share one .grad and cannot be corrected one by one afterwards, so the weights
            # of (sum, weight) pairs are computed beforehand, in a forward pass without a graph.
            weights = self._pair_weights()
            for name, weight in (weights if self._share is None else self._share.of_pairs(weights)).items():
                for factor in factors:
                    factor.named[name] = 1.0 / weight
        return factors

    def _pair_weights(self) -> dict[str, float]:
        step = self._step
        weights: dict[str, float] = {}
        self._moved = step.has_added = False
        self._at_micro_batch.take()
        self._moved = True
        with torch.no_grad(), closing(step.transfer.feed(self._window, self.sizes)) as feed:
            for size in self.sizes:
                self.size = size
                batch = next(feed)
                for source in step.objective.sources:
                    with step.precision.autocast():
                        terms, _ = step.objective.terms(source, batch, size)
                    for term in terms:
                        if term.weight is not None and not term.is_reported:
                            weights[term.name] = weights.get(term.name, 0.0) + float(term.weight)
        self._at_micro_batch.put_back()
        self._moved = False
        if not self._is_part:
            for name, weight in weights.items():
                check_weight(name, weight)
        return weights

    def _pair_weight(self) -> float | Tensor | None:
        """Return the total weight of a (sum, weight) pair, whose gradients were accumulated with a provisional one."""
        given = self._accumulated
        if not given.pair_weights:
            return None
        losses = _by_name(given.losses)
        if self._is_part and self._share is None and len(losses) > 1:
            return None
        if len(losses) > 1:
            raise InvalidInputError(
                f"losses {', '.join(map(repr, losses))}: a (sum, weight) pair cannot be combined with other "
                "losses if its weight is not known before the backward pass"
            )
        ((name, weights),) = _by_name(given.pair_weights).items()
        total = sum(weights)
        if not self._is_part:
            check_weight(name, total)
        # A count on the device may be an integer, and would round the quotient to single precision.
        return in_full(total) if isinstance(total, Tensor) and total.device.type != "cpu" else float(total)

    # --- windows in which the noise of gradients is measured ----------------------------------------------------------

    def _cut_to_measure(self, noise: NoiseScale, rest: tuple[int, ...]) -> tuple[int, ...]:
        """Return the cut of what is not done; where a window fits at once, in two."""
        if self._norms.is_there:
            noise.say_batchnorm()
        if self._done or len(rest) > 1:
            return rest
        (size,) = rest
        if size == 1:
            noise.say_one_sample()
            return rest
        if self._norms.is_there:
            noise.say_not_cut()
            return rest
        noise.say_cut_in_two()
        return size - size // 2, size // 2

    def _square(self) -> SquaredNorm:
        step = self._step
        return SquaredNorm(step.parameters, step.memory.device, is_in_parts=len(step.objective.sources) > 1)

    def _spread(self, noise: NoiseScale, pair_weight: float | Tensor | None) -> Spread | None:
        """Return how far the gradients of the window's micro-batches are apart; waits for the device."""
        squares = [square for square in self._squares if square is not None]
        if len(squares) < len(self._squares):
            noise.say_unknown()
            return None
        whole = squared_norm((parameter.grad for parameter in self._step.parameters), self._step.memory.device)
        shares, total = self._shares(pair_weight)
        if not total:
            return None
        unit = total * self._step.loss_scale()
        *norms, norm = (number / unit**2 for number in torch.stack([*squares, whole]).tolist())
        return spread_of(norms, shares, norm, self._window.samples)

    def _shares(self, pair_weight: float | Tensor | None) -> tuple[list[float], float]:
        """Return each micro-batch's share in the mean gradient, and what to divide the gradient by for a mean."""
        common, samples = self._step.objective.common_weight, self._window.samples
        if common == PAIR:
            weights = [float(weight) for _, weight in self._accumulated.pair_weights]
            if pair_weight is None or len(weights) != len(self.sizes):
                return [], 0.0
            return [weight / sum(weights) for weight in weights], float(pair_weight) / samples
        if common == SUM:
            return [size / samples for size in self.sizes], float(samples)
        # Losses of which each runs over something else have no common weight: that of the samples stands for it.
        usual = common in (None, SAMPLES)
        factors = [one.usual if usual else one.of(str(common)) for one in self._factors]
        total = sum(factors)
        return [factor / total for factor in factors] if total else [], total

    # --- parameters that a model itself writes in its forward pass (a momentum encoder, embeddings with max_norm) -----

    def _written(self) -> list[nn.Parameter]:
        if not self._marked:
            return []  # memory ran out before anything else was done
        by_version = zip(self._watched, self._versions, strict=True)
        written = dict.fromkeys(parameter for parameter, version in by_version if parameter._version != version)
        if self._sums is not None:
            # MoCo's original code writes through .data, which does not increment version counters.
            by_sum = zip(self._frozen, self._sums, _sums(self._frozen), strict=True)
            written.update(dict.fromkeys(parameter for parameter, one, other in by_sum if not torch.equal(one, other)))
        return list(written)

    def _see_what_is_written(self) -> None:
        """From now on, keep copies of the parameters that this window has shown to be written."""
        if not self._is_first and not self._watched:
            self._seen_written = []
            return
        self._seen_written = written = self._written()
        if self._is_first:
            self._draws = self._may_have_drawn()
        if written or self._is_first:
            self._kept += written
            self._at_window.keep_also(self._kept)
            self._at_micro_batch.keep_also(self._kept)
            known = set(self._kept)
            self._watched = [parameter for parameter in self._frozen if parameter not in known]
        self._versions = [parameter._version for parameter in self._watched]
        self._is_first, self._sums = False, None

    def refuse_written_parameters(self) -> None:
        """Check that the model has written none of its parameters, once the failed micro-batch's memory is released.

        Raises:
            StateDamagedError: It has, and they cannot be restored.
        """
        if written := self._written():
            raise StateDamagedError(
                f"memory ran out after forward() had modified {len(written)} of the model's parameters for the first "
                "time, and they cannot be restored; reload them, and begin with a smaller micro_batch"
            )


def _by_name(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def _total(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _sums_of(noted: Mapping[Slot, list[Any]]) -> dict[Slot, Any]:
    return {slot: sum(numbers[1:], start=numbers[0]) for slot, numbers in noted.items()}


def _sums(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return checksums that cheaply show whether parameters are unchanged."""
    return [_sum(parameter.detach()) for parameter in parameters]


def _sum(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.device.type == "mps":  # MPS has no double precision
        return tensor.sum()
    if tensor.device.type != "cpu" or tensor.numel() <= _SUMMED_AT_ONCE:
        return tensor.sum(dtype=torch.float64)
    # On the CPU, summing in another type first makes a copy in that type.
    pieces = torch.split(tensor, max(1, _SUMMED_AT_ONCE * len(tensor) // tensor.numel()))
    return torch.stack([_sum(piece) if len(pieces) > 1 else _sum(piece[0]) for piece in pieces]).sum()
