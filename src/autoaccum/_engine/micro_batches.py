"""The gradient of one window, micro-batch by micro-batch: when one fails, what is done before it stays done.

A window's micro-batches are run in order. Where one runs out of memory, buffers and random state go back to where that
micro-batch began, and the rest of the window is cut anew. Only where its gradients lie mixed with those of the others
does the window begin anew. Every way leaves, bit for bit, what the same cut leaves that never failed.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoaccum._engine.aside import Aside
from autoaccum._engine.gradients import Given
from autoaccum._engine.phases import Phase
from autoaccum._engine.step import Accumulated, check_weight
from autoaccum._engine.window_loss import WholeWindow, check_loss_scope
from autoaccum._loss.weighting import in_full
from autoaccum._snapshot import Mark
from autoaccum._system import signals
from autoaccum.errors import InvalidInputError, StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._data.batches import Window
    from autoaccum._engine.batchnorm import BatchNorms
    from autoaccum._engine.peers import Peers, SharedWeights
    from autoaccum._engine.step import GradientStep
    from autoaccum._loss.objective import Factors
    from autoaccum._loss.reported import Slot
    from autoaccum._sizing.controller import Sizing


# Numbers of a frozen parameter that are summed at once: their copies in double precision take 2 MiB.
_SUMMED_AT_ONCE = 2**18


class MicroBatches:
    """Runs the micro-batches of one window after the other and leaves their gradient in `.grad`.

    Args:
        step: The training step.
        sizing: Cuts the windows.
        loss_scope: "micro_batch", or "window" for a loss that is taken over the whole window at once.
        norms: The step's BatchNorm layers.
        peers: The processes of the training; None for this one alone.

    Raises:
        InvalidInputError: `loss_scope` is unknown, or the loss cannot be taken in that way.

    Attributes:
        sizes: The present cut of the window, those that are done first.
        size: Size of the micro-batch that is being worked on; None where it is none's turn.
        recomputed: Samples of this window that were computed and thrown away.
    """

    def __init__(
        self,
        step: GradientStep,
        sizing: Sizing,
        *,
        loss_scope: str,
        norms: BatchNorms,
        peers: Peers | None = None,
    ) -> None:
        check_loss_scope(loss_scope)
        self._is_part = peers is not None and peers.is_part
        self._sending = None if peers is None else peers.sending
        self._step = step
        self._norms = norms
        self._sizing = sizing
        self._takes_whole = loss_scope == "window"
        self._kept: list[nn.Parameter] = []
        self.take_stock()

    def take_stock(self) -> None:
        """Take up what the step's modules and parameters are now; not within a window.

        The next window is the first of its kind: what the model turns out to write in it is not known before.
        """
        step = self._step
        modules, device = step.objective.modules, step.memory.device
        # As it was before the window, and before the micro-batch that is being worked on.
        self._at_window = Mark(modules, device)
        self._at_micro_batch = Mark(modules, device, earlier=self._at_window)
        self._whole = WholeWindow(step, self._at_window) if self._takes_whole else None
        # Parameters that the model may turn out to write itself: all of them in the first window, then the frozen ones.
        present = set(step.parameters)
        self._kept = [parameter for parameter in self._kept if parameter in present]
        unknown = [parameter for parameter in step.parameters if parameter not in set(self._kept)]
        self._frozen = [parameter for parameter in unknown if not parameter.requires_grad]
        self._watched = unknown
        self._versions: list[int] = []
        self._sums: list[Tensor] | None = None
        self._is_first = True
        if self._whole is not None:
            # Every forward pass is made twice, the first window's too, so a momentum encoder has to go back at once.
            self._at_window.keep_also([*self._kept, *self._frozen])
            self._watched = [parameter for parameter in unknown if parameter.requires_grad]
        elif self._kept:
            self._at_window.keep_also(self._kept)
            self._at_micro_batch.keep_also(self._kept)

    def begin(self, window: Window, share: SharedWeights | None = None) -> None:
        """Set aside what a window moves before it can fail.

        Args:
            window: The window, or this process's part of it.
            share: What is known beforehand of what the other parts weigh.
        """
        self._window = window
        self._share = share
        self._versions_of_data = window.versions()
        self._marked = self._moved = False
        self._adding: Aside | None = None
        self._seen_written: list[nn.Parameter] | None = None  # before the optimizer writes too
        self.sizes: tuple[int, ...] = ()
        self.size: int | None = None
        self.recomputed = 0
        self._forget()

    def run(self, *, aside: bool) -> Given:
        """Go on from what is done to the window's end.

        Args:
            aside: Whether gradients are taken aside, so that a failed backward pass costs its micro-batch only.

        Raises:
            InvalidInputError: What the loss returns cannot be used.
        """
        self._set_aside()
        pair_weight: float | Tensor | None = None
        if self._whole is not None:
            losses, noted = self._run_whole(self._whole), self._whole.reported
        else:
            self._run_rest(aside=aside)
            pair_weight = self._pair_weight()
            losses = {name: _total(values) for name, values in self._accumulated.losses.items()}
            noted = self._accumulated.reported
        self.size = None
        self._see_what_is_written()
        return Given(losses, pair_weight, self._window.samples, _sums_of(noted) if noted else {})

    def keep(self) -> None:
        """After lack of memory: put back what has to be done again, and no more than that."""
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
        self._refuse_written_parameters()

    def undo(self) -> int:
        """Put everything back as it was before the window.

        Returns:
            How many parameters could not be: those that the model turned out to write itself, of which nothing was
            kept before the first window.
        """
        with signals.held():
            self._put_back_window()
            return len(self._written() if self._seen_written is None else self._seen_written)

    def end(self) -> None:
        """Let go of the window, which has become an update."""
        if self._norms.rescales:
            self._norms.put_back()
        if self._window.versions() != self._versions_of_data:
            self._step.transfer.copy_always()
        self._forget()
        del self._window

    def start_over(self, share: SharedWeights | None = None) -> None:
        """Begin the window anew, since its parts do not go together.

        Args:
            share: As for `begin`.
        """
        self._share = share
        with signals.held():
            self._start_over()

    def _start_over(self) -> None:
        self.recomputed += sum(self.sizes[: self._done])
        self._put_back_window()

    def _forget(self) -> None:
        self._done = self._entered = 0
        self._accumulated = Accumulated()
        self._factors: list[Factors] = []
        self._losses_of_whole: dict[str, Tensor] | None = None

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
        """Cut what is not done, and see that what is done has the weight that it has in this cut."""
        step = self._step
        step.stage.phase, self.size = Phase.WEIGH, None
        while True:
            done = self.sizes[: self._done]
            rest = self._sizing.cut(sum(done))
            if done and 1 in rest and not self._sizing.is_learning and 1 not in self._sizing.cut(0):
                # BatchNorm refuses a sample alone, to which only the rest of this window would come.
                self._start_over()
                continue
            self.sizes = (*done, *rest)
            place, autocast = step.transfer.place, step.precision.autocast
            if step.passes is None:  # else it was asked together with the others
                step.objective.settle(self._window, self._told_apart(), place, self._at_micro_batch, autocast)
            factors = self._weigh()
            if factors[: self._done] == self._factors[: self._done]:
                self._factors = factors
                break
            # What was found out meanwhile, or a sum's last bit, gives the micro-batches that are done another weight.
            self._start_over()
        if self._sending is not None:
            self._sending.offer()

    def _told_apart(self) -> Sequence[int]:
        """Return a cut in which what the loss runs over matters as it does between the parts of the window."""
        samples = self._window.samples
        if not self._is_part or len(self.sizes) > 1 or samples == 1:
            return self.sizes
        return (samples - samples // 2, samples // 2)

    def _run_rest(self, *, aside: bool) -> None:
        """Run the micro-batches that are not done, each forward and backward."""
        while sum(self.sizes[: self._done]) < self._window.samples:
            self._plan()
            if self._norms.is_there and not self._sizing.is_learning:
                self._norms.announce(self.sizes)  # of a cut that will be used again
            start = sum(self.sizes[: self._done])
            rest = self.sizes[self._done :]
            if self._sizing.is_learning and not self._step.objective.mixes_pairs():
                rest = rest[:1]  # what it shows decides on the next one
            with closing(self._step.transfer.feed(self._window, rest, start)) as feed:
                for size in rest:
                    with self._sent_on(size, aside=aside):
                        self._one(feed, size, aside=aside)

    def _sent_on(self, size: int, *, aside: bool) -> AbstractContextManager[None]:
        """Return a context for the next micro-batch, in which its gradients may be sent as they come."""
        is_last = sum(self.sizes[: self._done]) + size == self._window.samples
        if self._sending is None or not is_last or (aside and self._done):
            return nullcontext()
        return self._sending.last()

    def _run_whole(self, whole: WholeWindow) -> dict[str, Tensor]:
        """Run a window whose loss is taken over all of it, unless only its update is to be tried again."""
        if self._losses_of_whole is None:
            self.sizes = self._sizing.cut(0)
            self._norms.announce(self.sizes)
            self._losses_of_whole = whole.run(self._window, self.sizes, entering=self._enter)
        return self._losses_of_whole

    def _one(self, feed: Generator[Any, None, None], size: int, *, aside: bool) -> None:
        """Run one micro-batch forward and backward."""
        step, first = self._step, self._done == 0
        self.size = size
        self._moved = step.has_added = False
        self._adding = None
        step.stage.phase = Phase.SET_ASIDE
        if not first:
            self._at_micro_batch.take()
        self._moved = True
        self._enter(size)
        step.stage.phase = Phase.TRANSFER
        batch = next(feed)
        given = Accumulated()
        if aside and not first:
            self._adding = Aside(step.parameters)
        with self._adding or nullcontext():
            step.accumulate(batch, size, self._factors[self._done], given)
        if self._sizing.measures:
            self._sizing.leave(size)
        self._accumulated.add(given)
        self._done += 1

    def _enter(self, size: int | None) -> None:
        """Make ready for a micro-batch; None for the loss of a whole window."""
        self.size = size
        if size is None:
            return
        start = self._entered % self._window.samples if self._whole is not None else sum(self.sizes[: self._done])
        self._entered += size
        if self._norms.rescales:
            self._norms.rescale(size / self._window.samples)
        self._sizing.start = start
        if self._sizing.measures:
            self._sizing.enter(size)

    def _worked_on(self) -> int:
        """Samples that have been worked on in this window since it began (anew)."""
        return (
            min(self._entered, self._window.samples)
            if self._whole
            else sum(self.sizes[: self._done]) + (self.size or 0)
        )

    def _is_intact(self) -> bool:
        """Whether the gradients of what is done are whole and those of the failed micro-batch can be told from them."""
        if self._whole is not None:
            return False
        if self._done == 0 or not self._step.has_added:
            return True
        return self._adding is not None and not self._adding.adding

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
        if self._marked:
            self._at_window.put_back()
        self._forget()

    def _weigh(self) -> list[Factors]:
        objective = self._step.objective
        if self._is_part and self._share is None:
            # What this part alone weighs; the parts are added up by that.
            return objective.factors(self._window, self.sizes, is_part=True)
        totals = None if self._share is None else self._share.totals
        factors = objective.factors(self._window, self.sizes, totals, is_part=self._is_part)
        if self._share is not None and self._share.multiplier != 1.0:
            factors = [one.times(self._share.multiplier) for one in factors]
        if (len(self.sizes) > 1 or self._is_part) and objective.mixes_pairs():
            # Gradients of several losses lie in one .grad and cannot be set right one by one afterwards, so the weights
            # of (sum, weight) pairs are learned beforehand, by a forward pass without graph.
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
        """Return the weight of a (sum, weight) pair against whose provisional one gradients were accumulated."""
        given = self._accumulated
        if not given.pair_weights or (self._is_part and self._share is None and len(given.losses) > 1):
            return None
        if len(given.losses) > 1:
            raise InvalidInputError(
                f"losses {', '.join(map(repr, given.losses))}: a (sum, weight) pair beside other losses whose weight "
                "is not known beforehand"
            )
        ((name, weights),) = given.pair_weights.items()
        total = sum(weights)
        if not self._is_part:
            check_weight(name, total)
        # A device's own count may be whole, and would round the quotient to single precision.
        return in_full(total) if isinstance(total, Tensor) and total.device.type != "cpu" else float(total)

    # --- parameters that a model itself writes in its forward pass (a momentum encoder, embeddings with max_norm) -----

    def _written(self) -> list[nn.Parameter]:
        if not self._marked:
            return []  # memory ran out before anything else was done
        by_version = zip(self._watched, self._versions, strict=True)
        written = dict.fromkeys(parameter for parameter, version in by_version if parameter._version != version)
        if self._sums is not None:
            # MoCo's own code writes through .data, which moves no counter.
            by_sum = zip(self._frozen, self._sums, _sums(self._frozen), strict=True)
            written.update(dict.fromkeys(parameter for parameter, one, other in by_sum if not torch.equal(one, other)))
        return list(written)

    def _see_what_is_written(self) -> None:
        """Keep from now on what this window has shown to be written."""
        if not self._is_first and not self._watched:
            self._seen_written = []
            return
        self._seen_written = written = self._written()
        if written or self._is_first:
            self._kept += written
            self._at_window.keep_also(self._kept)
            self._at_micro_batch.keep_also(self._kept)
            known = set(self._kept)
            self._watched = [parameter for parameter in self._frozen if parameter not in known]
        self._versions = [parameter._version for parameter in self._watched]
        self._is_first, self._sums = False, None

    def _refuse_written_parameters(self) -> None:
        if written := self._written():
            raise StateDamagedError(
                f"memory ran out in the first window in which the model has written {len(written)} of its parameters "
                "in its forward pass; load them again, and begin with a smaller micro_batch"
            )


def _total(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def _sums_of(noted: Mapping[Slot, list[Any]]) -> dict[Slot, Any]:
    return {slot: sum(numbers[1:], start=numbers[0]) for slot, numbers in noted.items()}


def _sums(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return what tells, once and cheaply, whether parameters are still the same."""
    return [_sum(parameter.detach()) for parameter in parameters]


def _sum(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or tensor.device.type == "mps":  # which has no double precision
        return tensor.sum()
    if tensor.device.type != "cpu" or tensor.numel() <= _SUMMED_AT_ONCE:
        return tensor.sum(dtype=torch.float64)
    # On the CPU a sum in another type makes a copy in that type first.
    pieces = torch.split(tensor, max(1, _SUMMED_AT_ONCE * len(tensor) // tensor.numel()))
    return torch.stack([_sum(piece) if len(pieces) > 1 else _sum(piece[0]) for piece in pieces]).sum()
