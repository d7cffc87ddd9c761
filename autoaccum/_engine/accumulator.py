"""Adds one batch's gradient to `.grad`, in micro-batches that fit, for loops that bring their own optimizer."""

from __future__ import annotations

import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._data.order import largest_first
from autoaccum._engine.dtensor import is_fsdp_module, is_sharded
from autoaccum._engine.out_of_memory import Phase
from autoaccum._engine.peers import Peers
from autoaccum._engine.window import Engine
from autoaccum._engine.window_checks import no_gradient
from autoaccum._loss.knowledge import RecheckWindow
from autoaccum._records import BackwardReport
from autoaccum._sizing.cache import CacheEntry
from autoaccum._sizing.cutting import Cutting, SizingOptions
from autoaccum._sizing.planner import plan
from autoaccum._sizing.sizing import Sizing
from autoaccum._system import signals
from autoaccum._system.launched import max_micro_batch
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._records import Plan
    from autoaccum._saving.savings import SavingLevel
    from autoaccum._sizing.events import Events
    from autoaccum._system.notices import Notices

_GRADIENT = attrgetter("grad")


class GradientAccumulator:
    """Adds gradients of whole batches to `.grad`, whatever fits at once.

    Args:
        step: Computes gradients.
        events: Counts batches and reports out-of-memory errors.
        notices: Reports choices made for the user.
        peers: Makes what stands for the processes that compute the gradient together, again whenever the parameters
            have changed; None if this one is alone.
        entry_of: Returns what the cache holds of batches like a window; None for nothing.
        grows_from: The size from which peers grow the sizes, unless they are fixed; None if sizes are searched for.
    """

    def __init__(
        self,
        step: GradientStep,
        events: Events,
        notices: Notices,
        *,
        peers: Callable[[], Peers] | None = None,
        entry_of: Callable[[Window], CacheEntry] | None = None,
        grows_from: int | None = None,
    ) -> None:
        self._step = step
        self._events = events
        self._notices = notices
        self._make_peers = peers or (lambda: Peers(step))
        self._peers: Peers = self._make_peers()
        self._asked = step.options.micro_batch
        self._grows_from = None if isinstance(self._asked, int) else grows_from
        self._entry_of = entry_of or (lambda _: CacheEntry(step.memory))
        self._parameters: list[nn.Parameter] = []  # those of which gradients are set aside
        self._earlier: list[Tensor | None] = []
        # With earlier gradients, those that cannot be added in place; None for one that can.
        self._sums: list[Tensor | None] | None = None
        self._is_added = False
        self._engine: Engine | None = None  # runs batches, up to one that is larger than any that fitted
        self._entry = CacheEntry(step.memory)  # what the cache holds of them
        self._level: SavingLevel = ()
        self._looked_up: CacheEntry | None = None

    @property
    def plan(self) -> Plan | None:
        """How the largest batch so far is cut; None before the first batch."""
        return None if self._engine is None else self._engine.sizing.plan

    def add(self, window: Window) -> BackwardReport:
        """Add the gradient of a window, or of this process's part of it, to `.grad`."""
        started = time.perf_counter()
        step = self._step
        if not step.is_sharded and any(map(is_fsdp_module, step.objective.modules)):
            raise _came_late()
        self._earlier, self._parameters = list(map(_GRADIENT, step.parameters)), step.parameters
        engine = self._engine_for(window)
        if not step.keeps_outputs and step.options.loss_scope == "micro_batch":  # outputs are in the order of samples
            window = largest_first(window)
        self._is_added = False
        try:
            step.clear_gradients()
            try:
                engine.begin(window, is_made=lambda: self._is_added, on_change=self._on_change)
                while True:
                    with engine.attempt():
                        given = engine.gradient()
                        step.stage.phase = Phase.ADD
                        reduced = self._peers.reduce(given)
                        self._before_adding()
                        self._peers.decide(reduced)
                        self._add()
                        break
            except BaseException as error:
                engine.give_up(error)
                raise
            finally:
                engine.end()
            elapsed_s = time.perf_counter() - started
            engine.learn_from_window(elapsed_s)
        except BaseException as error:
            if self._is_added:
                error.add_note("autoaccum: the gradient of this batch is in .grad, so it must not be repeated")
            else:
                with signals.deferred():
                    for parameter, gradient in zip(self._parameters, self._earlier, strict=True):
                        parameter.grad = gradient
            raise
        finally:
            self._earlier, self._parameters = [], []
            if engine.oom_events:
                self._entry.forget()
        self._entry.keep(engine.sizing.learner.probe)
        return BackwardReport(elapsed_s=elapsed_s, outputs=tuple(given.outputs), **engine.reported(reduced))

    def known(self, batch: Any) -> Window | None:
        """Return a window of a batch of tensors just like those of the last one; None if it is anything else."""
        return None if self._engine is None else self._engine.checks.known(batch)

    # --- save_memory="auto" -------------------------------------------------------------------------------------------

    def begin_level(self, level: SavingLevel) -> None:
        """Search for sizes with what saves memory from now on, or take those that an earlier run found with it."""
        self._level, self._engine = level, None

    def look_up(self, window: Window) -> SavingLevel:
        """Return what save_memory="auto" needed in an earlier run; call it before a batch, with the user's modules."""
        if self._engine is None or _is_outgrown(self._engine.sizing, window):
            self._looked_up = self._entry_of(window)
        return () if self._looked_up is None else self._looked_up.saves

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        """Set gradients of new parameters aside, and let other processes know of them."""
        assert self._engine is not None
        if not self._step.is_sharded and is_sharded(self._step.objective.modules):
            raise _came_late()
        known = dict(zip(self._parameters, self._earlier, strict=True))
        new = [parameter for parameter in self._step.parameters if parameter not in known]
        self._earlier += map(_GRADIENT, new)
        self._parameters = [*self._parameters, *new]
        for parameter in new:
            parameter.grad = None
        self._peers.check_parameters()
        self._peers = self._make_peers()
        self._engine.use(self._peers)

    def _before_adding(self) -> None:
        """Reject a window without gradients, and allocate while there is a way back."""
        if not self._step.holds_gradients():
            error = no_gradient(self._step.parameters)
            if self._engine is not None and not self._engine.checks_all:
                raise RecheckWindow(error)  # the parameters may be new
            raise error
        self._sums = None
        if any(gradient is not None for gradient in self._earlier):
            pairs = zip(self._earlier, map(_GRADIENT, self._parameters), strict=True)
            self._sums = [
                None if before is None or own is None or (_is_plain(before) and _is_plain(own)) else _sum(before, own)
                for before, own in pairs
            ]

    def _add(self) -> None:
        """Add to earlier gradients, which allocates nothing where there is no sum."""
        with signals.deferred():  # an interrupt would leave some gradients with this batch, and others without it
            self._is_added = True
            self._events.windows += 1
            if self._sums is None:
                return
            before, own = [], []
            for parameter, earlier, made in zip(self._parameters, self._earlier, self._sums, strict=True):
                if earlier is not None:
                    if made is None and parameter.grad is not None:
                        before.append(earlier)
                        own.append(parameter.grad)
                    parameter.grad = earlier if made is None else made
            self._sums = None
            if before:
                with torch.no_grad():
                    torch._foreach_add_(before, own)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _engine_for(self, window: Window) -> Engine:
        """Return what cuts and runs a batch, newly made for the first one and for one larger than any that fitted."""
        known = self._engine
        if known is not None and not _is_outgrown(known.sizing, window):
            return known
        entry, self._looked_up = self._looked_up or self._entry_of(window), None
        entry.use(self._level)
        engine = Engine(
            self._step,
            self._sizing(window, None if known is None else known.sizing, entry),
            self._events,
            self._notices,
            peers=self._peers,
            owns_gradients=False,
        )
        self._engine, self._entry = engine, entry
        return engine

    def _sizing(self, window: Window, known: Sizing | None, entry: CacheEntry) -> Sizing:
        """Return what cuts a batch, which begins with what an earlier run has found, or else with what is `known`."""
        step, samples, cap = self._step, window.samples, max_micro_batch()
        is_auto = not isinstance(self._asked, int)
        most = min(samples if is_auto else int(self._asked), samples if cap is None else cap)
        if self._grows_from is not None:
            is_auto, most = False, min(most, self._grows_from if known is None else known.plan.micro_batch)
        experience = entry.experience
        if entry.found is None and known is not None:
            entry.frontier = known.cutter.frontier
            experience = {"begins_with": known.plan.micro_batch, "frontier": known.cutter.frontier}
        wanted = SizingOptions(
            by_width=is_auto,
            learns=is_auto and step.options.loss_scope != "window",
            most=None if cap is None or cap >= samples else cap,
            **experience,
        )
        asked = begins = plan(samples, most)
        if known is not None and known.plan.micro_batch < known.cutter.target_plan.micro_batch:  # after failures
            begins = plan(samples, min(known.plan.micro_batch, asked.micro_batch))
        return Sizing(step.memory, lambda: step.parameters, Cutting(begins, asked), wanted, self._events)


def _came_late() -> InvalidInputError:
    return InvalidInputError(
        "fully_shard was called after this Accumulator was made, which adds up gradients of whole parameters; call "
        "fully_shard first, then make the Accumulator and the optimizer"
    )


def _is_plain(gradient: Tensor) -> bool:
    """Whether it can be added to in place: it is dense, and each element has its own place, which holds its value."""
    if gradient.layout is not torch.strided or gradient.is_conj() or gradient.is_neg():
        return False
    return 0 not in gradient.stride()


def _sum(before: Tensor, own: Tensor) -> Tensor:
    # PyTorch adds a sparse tensor to a dense one, not the reverse.
    return before + own if before.layout is torch.strided else own + before


def _is_outgrown(sizing: Sizing, window: Window) -> bool:
    """Whether a window is larger than any before, and those fitted at once, so that more may."""
    return not sizing.is_learning and window.samples > sizing.plan.target_batch and sizing.plan.accum_steps == 1
