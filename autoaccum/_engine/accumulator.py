"""Adds one batch's gradient to `.grad`, in micro-batches that fit, for loops that bring their own optimizer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._data.sample_sizes import largest_first
from autoaccum._engine.gradient_checks import no_gradient
from autoaccum._engine.gradients import Reduced
from autoaccum._engine.noise_scale import shuffled
from autoaccum._engine.peers import GradientPeers
from autoaccum._engine.phases import Phase
from autoaccum._engine.steady import NotSteadyError
from autoaccum._engine.window import Engine
from autoaccum._loss.reported import means
from autoaccum._records import BackwardReport, DeviceScalar
from autoaccum._sizing.cache_entry import CacheEntry
from autoaccum._sizing.offline_search import Line
from autoaccum._sizing.planner import TILE, plan
from autoaccum._sizing.sizing import Cutting, Sizing, SizingOptions
from autoaccum._system import exceptions, signals
from autoaccum._system.environment import max_micro_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from autoaccum._data.batches import Window
    from autoaccum._engine.events import Events
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import Given
    from autoaccum._engine.noise_scale import NoiseScale
    from autoaccum._engine.peers import BeforeUpdate, Work
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
    """What cuts and runs batches, up to one that is larger than any that fitted.

    Attributes:
        sizing: Cuts the batches.
        engine: Computes their gradients.
        entry: What the cache holds of them.
    """

    sizing: Sizing
    engine: Engine
    entry: CacheEntry


class AloneWithGradients(GradientPeers):
    """The only process that computes a gradient."""

    sending = None

    def __init__(self, step: GradientStep) -> None:
        self._step = step

    def reduce(self, given: Given, work: Work, before_update: BeforeUpdate) -> Reduced:  # noqa: ARG002 - as Peers has it
        """Correct the gradient, which already is that of the whole window, by what single micro-batches lack."""
        factor = given.correction
        if not isinstance(factor, float) or factor != 1.0:
            torch._foreach_mul_([p.grad for p in self._step.parameters if p.grad is not None], factor)
        losses = given.corrected()
        before_update(losses, given.samples)
        return Reduced(losses, means(given.slots) if given.reported else {}, given.samples, spread=given.spread)


class GradientAccumulator:
    """Adds gradients of whole batches to `.grad`, whatever fits at once.

    Args:
        step: Computes gradients.
        events: Counts batches and reports out-of-memory errors.
        notices: Reports choices made for the user.
        peers: Makes what stands for the processes that compute the gradient together, again whenever the parameters
            have changed; None if this one is alone.
        noise: The gradient noise scale to measure; None without `noise_scale`.
        entry_of: Returns what the cache holds of batches like a window with what memory="auto" has chosen (None without
            it); None for nothing.
    """

    def __init__(
        self,
        step: GradientStep,
        events: Events,
        notices: Notices,
        *,
        peers: Callable[[], GradientPeers] | None = None,
        noise: NoiseScale | None = None,
        entry_of: Callable[[Window, Rung | None], CacheEntry] | None = None,
    ) -> None:
        self._step = step
        self._noise = noise
        self._events = events
        self._notices = notices
        self._make_peers = peers or (lambda: AloneWithGradients(step))
        self._peers: GradientPeers = self._make_peers()
        self._asked = step.options.micro_batch
        self._strategy = step.options.strategy or ("fastest" if self._asked == "auto" else "balanced")
        self._entry_of = entry_of or (lambda *_: CacheEntry(step.memory))
        self._parameters: list[nn.Parameter] = []  # those of which gradients are set aside
        self._earlier: list[Tensor | None] = []
        self._sums: list[Tensor | None] | None = None  # where some gradients cannot be added in place
        self._is_added = False
        self._lane: _Lane | None = None
        self._lanes_of: dict[Rung, _Lane | None] = {}
        self._rung: Rung | None = None
        self._tried: str | None = None
        self._compares, self._keeps = False, True
        self._found: Remembered | None = None
        self._looked_up: CacheEntry | None = None

    @property
    def plan(self) -> Plan | None:
        """How the largest batch so far is cut; None before the first batch."""
        return None if self._lane is None else self._lane.sizing.plan

    def add(self, window: Window) -> BackwardReport:
        """Add the gradient of a window to `.grad`.

        Args:
            window: The window, or this process's part of it.

        Raises:
            AutoaccumError: As for `Accumulator.backward`.
        """
        started = time.perf_counter()
        step, noise = self._step, self._noise
        self._earlier, self._parameters = list(map(_GRADIENT, step.parameters)), step.parameters
        lane = self._lane_for(window)
        engine = lane.engine
        measures = noise is not None and noise.is_due(self._events.windows + 1) and lane.sizing.is_settled
        if (
            not step.keeps_outputs and step.options.loss_scope == "micro_batch"
        ):  # outputs are in the order of the samples
            window = shuffled(window, self._events.windows) if measures else largest_first(window)
        step.clear_gradients()
        self._is_added = False
        try:
            reduced, outputs = engine.run(
                window,
                self._finish,
                is_decided=lambda: self._is_added,
                on_change=self._on_change,
                measures_noise=measures,
            )
            elapsed_s = time.perf_counter() - started
            engine.complete(elapsed_s)
        except BaseException as error:
            if self._is_added:
                exceptions.note(error, "autoaccum: the gradient of this batch is in .grad, so it must not be repeated")
            else:
                self._put(self._earlier)
            if _GRAPH_IS_GONE in str(error):
                error.add_note(
                    "autoaccum: the loss depends on a graph of an earlier micro-batch, which is gone once that is done;"
                    " detach what is carried over from one call of the loss to the next"
                )
            raise
        finally:
            self._earlier, self._parameters = [], []
            if engine.lacks:
                lane.entry.forget()
        if noise is not None and reduced.spread is not None:
            noise.learn(reduced.spread, reduced.samples)
        lane.entry.follow(lane.sizing.probe, lane.sizing.fastest)
        return BackwardReport(
            samples=reduced.samples,
            micro_batches=engine.at.sizes,
            oom_events=len(engine.lacks),
            elapsed_s=elapsed_s,
            peak_bytes=engine.peak_bytes,
            recomputed_samples=engine.at.recomputed,
            device_losses={name: DeviceScalar(parts) for name, parts in reduced.losses.items()},
            device_reported={name: DeviceScalar(value) for name, value in reduced.reported.items()},
            outputs=outputs,
        )

    def known(self, batch: Any) -> Window | None:
        """Return a window of a batch of tensors just like those of the last one; None if it is anything else."""
        return None if self._lane is None else self._lane.engine.steady.known(batch)

    # --- memory="auto" ------------------------------------------------------------------------------------------------

    def remembered(self, window: Window) -> tuple[Rung | None, str | None]:
        """Return what an earlier run has chosen for batches like this one, and what it tried; None where it has not."""
        found = self._entry_of(window, None).found
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
            self._lanes_of[self._rung] = self._lane
        self._lane, self._compares = self._lanes_of.pop(rung, None), compares
        self._rung, self._keeps, self._tried = rung, is_chosen, tried
        if is_chosen:
            self._found = None if self._lane is None else self._lane.entry.found
            self._lane, self._lanes_of = None, {}

    @property
    def sizing(self) -> Sizing | None:
        """What cuts batches; None before the first of them."""
        return None if self._lane is None else self._lane.sizing

    def look_up(self, window: Window) -> None:
        """Look up what the cache holds of a batch that is about to be added, as long as modules are as the user's."""
        if self._keeps and (self._lane is None or _is_outgrown(self._lane.sizing, window)):
            self._looked_up = self._entry_of(window, self._rung)

    def _entry(self, window: Window) -> CacheEntry:
        if not self._keeps:
            return CacheEntry(self._step.memory)
        entry = self._looked_up or self._entry_of(window, self._rung)
        self._looked_up = None
        entry.note_tried(self._tried)
        entry.take(self._found)
        self._found = None
        return entry

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        """Set gradients of new parameters aside, and let other processes know of them."""
        known = dict(zip(self._parameters, self._earlier, strict=True))
        new = [parameter for parameter in self._step.parameters if parameter not in known]
        self._earlier += map(_GRADIENT, new)
        self._parameters = [*self._parameters, *new]
        for parameter in new:
            parameter.grad = None
        self._peers = self._make_peers()
        if self._lane is not None:
            self._lane.engine.use(self._peers)

    def _finish(self, given: Given) -> tuple[Reduced, tuple[Any, ...]] | None:
        """Add a window's gradient to earlier ones; None if another process lacks memory for it."""
        self._step.stage.phase = Phase.ADD
        assert self._lane is not None
        reduced = self._peers.reduce(given, self._lane.engine, self._before_adding)
        if reduced is None:
            return None
        with signals.held():  # an interrupt would leave some gradients with this batch, and others without it
            self._is_added = True
            if self._sums is not None:
                self._put(self._sums)
                self._sums = None
            else:
                self._add()
            self._events.windows += 1
        return reduced, given.outputs

    def _before_adding(self, *_: object) -> None:
        """Reject a window without gradients, and allocate while there is a way back."""
        if not self._step.holds_gradients():
            if self._lane is not None and not self._lane.engine.is_due:
                raise NotSteadyError  # the parameters may be new
            raise no_gradient(self._step.parameters)
        pairs = [(before, parameter.grad) for parameter, before in zip(self._parameters, self._earlier, strict=True)]
        added = [(before, own) for before, own in pairs if before is not None and own is not None]
        if not all(_is_plain(before) and _is_plain(own) for before, own in added):
            self._sums = [
                own if before is None else before if own is None else _sum(before, own) for before, own in pairs
            ]

    def _add(self) -> None:
        """Add to earlier gradients in place, which allocates nothing."""
        before, own = [], []
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                if parameter.grad is not None:
                    before.append(earlier)
                    own.append(parameter.grad)
                parameter.grad = earlier
        if before:
            with torch.no_grad():
                torch._foreach_add_(before, own)

    def _put(self, gradients: Sequence[Tensor | None]) -> None:
        with signals.held():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _lane_for(self, window: Window) -> _Lane:
        """Return what cuts and runs a batch, newly made for the first one and for one larger than any that fitted."""
        if self._lane is None or _is_outgrown(self._lane.sizing, window):
            self._lane = self._new_lane(window, self._lane, self._entry(window))
        return self._lane

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
            learns=is_auto and step.options.loss_scope != "window",
            times_after=None if knows_fastest or self._compares else _BATCHES_BEFORE_TIMING,
            most=None if cap is None or cap >= samples else cap,
            **(entry.experience or _experience(known)),
        )
        asked = begins = plan(samples, min(most, samples), strategy=strategy, multiple_of=multiple_of)
        if known is not None and known.sizing.plan.micro_batch < known.sizing.set_plan.micro_batch:  # after failures
            smaller = min(known.sizing.plan.micro_batch, asked.micro_batch)
            begins = plan(samples, smaller, strategy=strategy, multiple_of=multiple_of)
        sizing = Sizing(step.memory, lambda: step.parameters, Cutting(begins, asked), wanted, self._events)
        engine = Engine(
            step,
            sizing,
            self._events,
            self._notices,
            peers=self._peers,
            noise=self._noise,
            elsewhere="outside of Accumulator.backward()",
            owns_gradients=False,
        )
        return _Lane(sizing, engine, entry)


def _experience(known: _Lane | None) -> dict[str, Any]:
    """Return what is known from other batches, as options of `SizingOptions`."""
    if known is None:
        return {}
    size, slope = known.sizing.plan.micro_batch, known.sizing.bytes_per_sample
    return {"begins_with": size, "fitted_before": size, "line": Line(0.0, slope) if slope else None}


def _is_plain(gradient: Tensor) -> bool:
    """Whether it can be added to in place: it is dense, and each element has its own place."""
    return gradient.layout is torch.strided and 0 not in gradient.stride()


def _sum(before: Tensor, own: Tensor) -> Tensor:
    # PyTorch adds a sparse tensor to a dense one, not the reverse.
    return before + own if before.layout is torch.strided else own + before


def _is_outgrown(sizing: Sizing, window: Window) -> bool:
    """Whether a window is larger than any before, and those fitted at once, so that more may."""
    return not sizing.is_learning and window.samples > sizing.plan.target_batch and sizing.plan.accum_steps == 1
