"""Adds one batch's gradient to `.grad`, in micro-batches that fit, for loops that bring their own optimizer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._engine.batchnorm import BatchNorms
from autoaccum._engine.gradient_hooks import no_gradient, tell_of_hooks
from autoaccum._engine.gradients import Reduced
from autoaccum._engine.micro_batches import MicroBatches
from autoaccum._engine.moving_layers import MovingLayers
from autoaccum._engine.noise_scale import shuffled
from autoaccum._engine.phases import Phase
from autoaccum._engine.recovery import Recovery
from autoaccum._engine.watched_gradients import WatchedGradients
from autoaccum._loss.reported import means
from autoaccum._oom import let_go
from autoaccum._records import BackwardReport, DeviceScalar
from autoaccum._sizing.cache_entry import CacheEntry
from autoaccum._sizing.headroom import Headroom
from autoaccum._sizing.offline_search import Line
from autoaccum._sizing.planner import TILE, plan
from autoaccum._sizing.sizing import Cutting, Sizing, SizingOptions
from autoaccum._system import signals
from autoaccum._system.environment import max_micro_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from autoaccum._data.batches import Window
    from autoaccum._engine.events import Events
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import Given
    from autoaccum._engine.noise_scale import NoiseScale
    from autoaccum._engine.peers import BeforeUpdate, GradientPeers, Work
    from autoaccum._records import Plan
    from autoaccum._sizing.cache import Remembered
    from autoaccum._sizing.rung_choice import Rung
    from autoaccum._system.notices import Notices

_GRADIENT = attrgetter("grad")
# What autograd says of a graph that has been used.
_GRAPH_IS_GONE = "Trying to backward through the graph a second time"
# Batches after which cuts of full batches are timed, if the strategy asks for it.
_BATCHES_BEFORE_TIMING = 10


@dataclass(frozen=True, slots=True)
class _Lane:
    """What cuts and runs batches for which `.grad` was empty, or for which it was not: one plan does not fit both.

    Attributes:
        sizing: Cuts the batches.
        room: Tracks how much memory they leave free.
        work: Runs their micro-batches.
        recovery: Recovers them from lack of memory.
        entry: What the cache holds of them.
    """

    sizing: Sizing
    room: Headroom
    work: MicroBatches
    recovery: Recovery
    entry: CacheEntry


@dataclass(frozen=True, slots=True)
class _Done:
    """The results of a batch that is complete, before anything of the user's is changed.

    Attributes:
        reduced: Those of the whole batch, over all processes.
        sums: Its gradients, added to earlier ones, by parameter.
    """

    reduced: Reduced
    sums: Sequence[Tensor | None]


class AloneWithGradients:
    """The only process that computes a gradient.

    Args:
        step: What computes it.
    """

    is_part = False
    sending = None

    def __init__(self, step: GradientStep) -> None:
        self._step = step

    def check_parameters(self) -> None:
        """Do nothing: any parameters can be trained."""

    def begin(self, window: Window, sizing: Sizing) -> None:
        """Do nothing: the part is the window."""

    def begin_attempt(self) -> None:
        """Do nothing: no other process is waiting."""

    def reduce(self, given: Given, work: Work, before_update: BeforeUpdate) -> Reduced:  # noqa: ARG002 - as Peers has it
        """Correct the gradient, which already is that of the whole window, by what single micro-batches lack."""
        gradients = [gradient for gradient in map(_GRADIENT, self._step.parameters) if gradient is not None]
        factor = given.correction
        if gradients and (not isinstance(factor, float) or factor != 1.0):
            torch._foreach_mul_(gradients, factor)
        losses, reported = given.corrected_losses(), means(given.slots) if given.reported else {}
        before_update(losses, given.samples)
        return Reduced(losses, reported, given.samples, spread=given.spread)

    def failed(self, error: Exception, work: Work, number: int) -> None:
        """Do nothing: no other process is affected."""


class GradientAccumulator:
    """Adds gradients of whole batches to `.grad`, whatever fits at once.

    Args:
        step: Computes gradients.
        events: Counts batches and reports out-of-memory errors.
        notices: Reports choices made for the user.
        peers: Makes what stands for the processes that compute the gradient together, again whenever the parameters
            have changed; None if this one is alone.
        micro_batch: The most samples at once; "auto" finds it.
        strategy: As for `fit`.
        loss_scope: As for `fit`.
        batchnorm: As for `fit`.
        noise: The gradient noise scale to measure; None without `noise_scale`.
        entry_of: Returns what the cache holds of batches like a window, whether `.grad` is empty before them, and what
            memory="auto" has chosen (None without it); None for nothing.
        looks_always: As for `WatchedGradients`.
    """

    def __init__(
        self,
        step: GradientStep,
        events: Events,
        notices: Notices,
        *,
        peers: Callable[[], GradientPeers] | None = None,
        micro_batch: int | str = "auto",
        strategy: str | None = None,
        loss_scope: str = "micro_batch",
        batchnorm: str = "keep",
        noise: NoiseScale | None = None,
        entry_of: Callable[[Window, bool, Rung | None], CacheEntry] | None = None,
        looks_always: bool = True,
    ) -> None:
        self._step = step
        self._noise = noise
        self._events = events
        self._notices = notices
        self._make_peers = peers or (lambda: AloneWithGradients(step))
        self._peers: GradientPeers = self._make_peers()
        self._asked = micro_batch
        self._strategy = strategy or ("fastest" if micro_batch == "auto" else "balanced")
        self._scope = loss_scope
        self._entry_of = entry_of or (lambda *_: CacheEntry(step.memory))
        self._norms = BatchNorms(step.objective.modules, batchnorm, notices)
        self._moving = MovingLayers(step.objective.modules, notices)
        self._watched = WatchedGradients(step, looks_always=looks_always)
        self._lanes: dict[bool, _Lane] = {}
        self._lanes_of: dict[Rung, dict[bool, _Lane]] = {}
        self._rung: Rung | None = None
        self._tried: str | None = None
        self._compares, self._keeps = False, True
        self._found: dict[bool, Remembered | None] = {}
        self._looked_up: CacheEntry | None = None
        self._has_told_of_hooks = False

    @property
    def plan(self) -> Plan | None:
        """How the largest batch so far is cut where `.grad` was empty before; None before the first batch."""
        lane = self._lanes.get(False) or self._lanes.get(True)
        return None if lane is None else lane.sizing.plan

    def add(self, window: Window) -> BackwardReport:
        """Add the gradient of a window to `.grad`.

        Args:
            window: The window, or this process's part of it.

        Raises:
            AutoaccumError: As for `Accumulator.backward`.
        """
        started = time.perf_counter()
        step = self._step
        step.objective.begin_window()
        if step.parameters_changed():
            self._norms.search()
            self._peers = self._make_peers()
            self._lanes.clear()
            self._lanes_of.clear()
        self._watched.refuse_hooks()
        earlier = list(map(_GRADIENT, step.parameters))
        lane = self._lane(window, is_empty=_are_none(earlier))
        noise = self._noise
        measures = noise is not None and noise.is_due(self._events.windows + 1) and lane.sizing.is_settled
        if measures and not step.keeps_outputs:
            window = shuffled(window, self._events.windows)
        step.clear_gradients()
        try:
            done = self._run(lane, window, earlier, measures_noise=measures)
            outputs = lane.work.outputs
        except BaseException:
            self._put(earlier)
            raise
        finally:
            self._watched.end_batch()
            lane.work.end()
            if lane.recovery.lacks:
                lane.entry.forget()
        if not self._has_told_of_hooks and len(lane.work.sizes) > 1:
            self._has_told_of_hooks = True
            tell_of_hooks(step.parameters, self._notices)
        with signals.held():  # an interrupt would leave some gradients with this batch, and others without it
            self._put([_kept_in(before, both) for before, both in zip(earlier, done.sums, strict=True)])
            self._events.windows += 1
        lane.recovery.choose_next_sizes(self._notices)
        if noise is not None and done.reduced.spread is not None:
            noise.learn(done.reduced.spread, done.reduced.samples)
        lane.entry.follow(lane.sizing.probe, lane.sizing.fastest)
        return BackwardReport(
            samples=done.reduced.samples,
            micro_batches=lane.work.sizes,
            oom_events=len(lane.recovery.lacks),
            elapsed_s=time.perf_counter() - started,
            peak_bytes=lane.recovery.peak_bytes,
            recomputed_samples=lane.work.recomputed,
            device_losses={name: DeviceScalar(loss) for name, loss in done.reduced.losses.items()},
            device_reported={name: DeviceScalar(value) for name, value in done.reduced.reported.items()},
            outputs=outputs,
        )

    # --- memory="auto" ------------------------------------------------------------------------------------------------

    def remembered(self, window: Window) -> tuple[Rung | None, str | None]:
        """Return what an earlier run has chosen for batches like this one, and what it tried; None where it has not."""
        found = self._entry_of(window, self.is_empty, None).found
        return (None, None) if found is None else (found.memory, found.tried)

    def begin_rung(self, rung: Rung, *, compares: bool, is_chosen: bool, tried: str | None = None) -> None:
        """Search for sizes with what saves memory from now on, or take those that were found with it.

        Args:
            rung: What is in force, by names of `memory`.
            compares: Whether it is compared with others: cuts are then not timed, nor kept for other runs.
            is_chosen: Whether it stays, so that the next run can begin with it.
            tried: What was tried before, in words, for that run to tell.
        """
        if self._rung is not None:
            self._lanes_of[self._rung] = self._lanes
        self._lanes, self._compares = self._lanes_of.pop(rung, {}), compares
        self._rung, self._keeps, self._tried = rung, is_chosen, tried
        if is_chosen:
            self._found = {is_empty: lane.entry.found for is_empty, lane in self._lanes.items()}
            self._lanes, self._lanes_of = {}, {}

    def sizing(self, *, is_empty: bool) -> Sizing | None:
        """Return what cuts batches for which `.grad` is empty before, or is not; None before the first of them."""
        lane = self._lanes.get(is_empty)
        return None if lane is None else lane.sizing

    @property
    def is_empty(self) -> bool:
        """Whether there are no earlier gradients."""
        return _are_none(map(_GRADIENT, self._step.parameters))

    def look_up(self, window: Window) -> None:
        """Look up what the cache holds of a batch that is about to be added, as long as modules are as the user's."""
        lane = self._lanes.get(self.is_empty)
        if self._keeps and (lane is None or _is_outgrown(lane.sizing, window)):
            self._looked_up = self._entry_of(window, self.is_empty, self._rung)

    def _entry(self, window: Window, *, is_empty: bool) -> CacheEntry:
        if not self._keeps:
            return CacheEntry(self._step.memory)
        entry = self._looked_up or self._entry_of(window, is_empty, self._rung)
        self._looked_up = None
        entry.note_tried(self._tried)
        entry.take(self._found.pop(is_empty, None))
        return entry

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _run(self, lane: _Lane, window: Window, earlier: Sequence[Tensor | None], *, measures_noise: bool) -> _Done:
        """Compute the window's gradient in the empty `.grad`, and its sums with earlier ones."""
        lane.room.follow(lane.sizing.plan)
        lane.recovery.begin()
        lane.sizing.begin(window)
        lane.work.begin(window, self._peers.begin(window, lane.sizing), measures_noise=measures_noise)
        self._watched.begin_batch(window.tensors(), has_earlier=any(gradient is not None for gradient in earlier))
        try:
            while (done := self._attempt(lane, earlier)) is None:
                pass
        except BaseException as error:
            lane.recovery.give_up(error, window)
            if _GRAPH_IS_GONE in str(error):
                error.add_note(
                    "autoaccum: the loss depends on a graph of an earlier micro-batch, which is gone once that is done;"
                    " detach what is carried over from one call of the loss to the next"
                )
            raise
        return done

    def _attempt(self, lane: _Lane, earlier: Sequence[Tensor | None]) -> _Done | None:
        """Try to compute them, continuing from completed micro-batches; None to try again."""
        peers, work, lack = self._peers, lane.work, None
        sums: list[Tensor | None] = []
        try:
            peers.begin_attempt()
            given = work.run(aside=lane.recovery.takes_gradients_aside)
            self._step.stage.phase = Phase.ADD
            reduced = peers.reduce(given, work, lambda *_: sums.extend(self._sums(earlier)))
            if reduced is not None:
                return _Done(reduced, sums)
        except Exception as error:  # noqa: BLE001 - put_back_or_raise re-raises anything but lack of memory
            peers.failed(error, work, self._events.windows + 1)
            lack = lane.recovery.put_back_or_raise(error)
        sums.clear()  # nothing of a failed attempt stays alive while the next one is planned
        if lack is not None:
            self._watched.refuse_what_is_not_restored()
            lane.recovery.cut_smaller(lack)
        else:
            self._step.memory.release()
        return None

    def _sums(self, earlier: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the sums of earlier gradients, which stay as they are, and this window's, which need not.

        Raises:
            InvalidInputError: There is no gradient.
        """
        if not self._step.holds_gradients():
            raise no_gradient(self._step.parameters)
        with torch.no_grad():
            return [
                parameter.grad if before is None else _sum(before, parameter.grad)
                for parameter, before in zip(self._step.parameters, earlier, strict=True)
            ]

    def _put(self, gradients: Sequence[Tensor | None]) -> None:
        with signals.held():
            for parameter, gradient in zip(self._step.parameters, gradients, strict=True):
                parameter.grad = gradient

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _lane(self, window: Window, *, is_empty: bool) -> _Lane:
        """Return what cuts and runs a batch, newly made for the first one and for one larger than any that fitted."""
        lane = self._lanes.get(is_empty)
        if lane is not None and not _is_outgrown(lane.sizing, window):
            return lane
        self._lanes[is_empty] = lane = self._new_lane(
            window, lane or self._lanes.get(not is_empty), self._entry(window, is_empty=is_empty)
        )
        return lane

    def _new_lane(self, window: Window, known: _Lane | None, entry: CacheEntry) -> _Lane:
        step, samples, cap = self._step, window.samples, max_micro_batch()
        is_auto = not isinstance(self._asked, int)
        most = min(samples if is_auto else int(self._asked), samples if cap is None else cap)
        strategy = "balanced" if self._strategy == "fastest" else self._strategy
        # A multiple of the tile is worth it only where matrix units work in halves.
        multiple_of = TILE if is_auto and step.precision.name != "fp32" else 1
        knows_fastest = entry.found is not None and entry.found.fastest
        wanted = SizingOptions(
            strategy=self._strategy,
            multiple_of=multiple_of,
            by_bytes=is_auto,
            learns=is_auto and self._scope != "window",
            times_after=None if knows_fastest or self._compares else _BATCHES_BEFORE_TIMING,
            most=None if cap is None or cap >= samples else cap,
            **(entry.experience or _experience(known)),
        )
        asked = begins = plan(samples, min(most, samples), strategy=strategy, multiple_of=multiple_of)
        if known is not None and known.sizing.plan.micro_batch < known.sizing.set_plan.micro_batch:  # after failures
            smaller = min(known.sizing.plan.micro_batch, asked.micro_batch)
            begins = plan(samples, smaller, strategy=strategy, multiple_of=multiple_of)
        sizing = Sizing(step.memory, lambda: step.parameters, Cutting(begins, asked), wanted, self._events)
        room = Headroom(step.memory)
        work = MicroBatches(
            step,
            sizing,
            loss_scope=self._scope,
            norms=self._norms,
            moving=self._moving,
            peers=self._peers,
            noise=self._noise,
        )
        return _Lane(sizing, room, work, Recovery(step, work, sizing, room, self._events, self._norms), entry)


def _sum(before: Tensor, own: Tensor | None) -> Tensor:
    """Return a sum that is not in `before`, and in `own` if that needs no memory."""
    if own is None:
        return before
    return own.add_(before) if _are_dense(before, own) else before + own


def _kept_in(before: Tensor | None, both: Tensor | None) -> Tensor | None:
    """Write a sum to the tensor in which the user keeps the gradient, as autograd does, and return that."""
    if before is None or both is None or both is before or not _are_dense(before, both):
        return both
    try:
        with torch.no_grad():
            return before.copy_(both)
    except Exception as error:  # noqa: BLE001 - others may be written already, and the sum itself is as good
        let_go(error)
        return both


def _are_none(gradients: Iterable[Tensor | None]) -> bool:
    return all(gradient is None for gradient in gradients)


def _are_dense(*gradients: Tensor) -> bool:
    return all(gradient.layout is torch.strided for gradient in gradients)


def _experience(known: _Lane | None) -> dict[str, Any]:
    """Return what is known from other batches, as options of `SizingOptions`."""
    if known is None:
        return {}
    size, slope = known.sizing.plan.micro_batch, known.sizing.bytes_per_sample
    return {"begins_with": size, "fitted_before": size, "line": Line(0.0, slope) if slope else None}


def _is_outgrown(sizing: Sizing, window: Window) -> bool:
    """Whether a window is larger than any before, and those fitted at once, so that more may."""
    return not sizing.is_learning and window.samples > sizing.plan.target_batch and sizing.plan.accum_steps == 1
