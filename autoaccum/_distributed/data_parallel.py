"""Makes one window with several processes together: each works on its part, then all make one optimizer step.

Processes do not communicate while they work on their micro-batches, so one that runs out of memory there delays the
others only by the time of its second attempt. Then they agree in two steps, like a distributed commit. In the first,
they exchange the weights of their parts and confirm that all are done; gradients are then summed in flat buckets. In
the second, they confirm that all hold the sum; each then steps its own optimizer. Until then every process can still go
back to the start of the window, and if one has to, it says so in place of its next message, and all do.
"""

from __future__ import annotations

import hashlib
import pickle
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum._data.batches import Window
from autoaccum._data.nesting import copied
from autoaccum._distributed.buckets import Buckets, Outcome, as_plain
from autoaccum._distributed.consistency import SharedSettings, compare_weights
from autoaccum._distributed.process_group import OutOfMemoryElsewhereError
from autoaccum._engine.due_checks import is_check_window
from autoaccum._engine.gradients import LossSum, WindowResult
from autoaccum._engine.noise_scale import Spread, squared_norm
from autoaccum._engine.out_of_memory import Phase
from autoaccum._engine.peers import BeginAgain, Peers
from autoaccum._loss.batch_counts import counts_in, counts_of
from autoaccum._loss.loss_values import in_full
from autoaccum._loss.reported import LOSS, WEIGHT, means
from autoaccum._loss.sample_choices import MOST_SAMPLES, choices
from autoaccum._loss.settling import NotSettled, PartWeights, Totals, settle
from autoaccum._loss.summand_weights import all_predicted
from autoaccum._oom import clear_traceback_frames, is_device_lost, is_oom, is_too_large
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import PartResult
    from autoaccum._loss import reported
    from autoaccum._loss.batch_counts import Count
    from autoaccum._loss.summands import SummandKey
    from autoaccum._sizing.frontier import Widths
    from autoaccum._sizing.sizing import Sizing


_STATISTICS = ("running_mean", "running_var")


class Part(NamedTuple):
    """A rank's message about its part of a window, once that is done.

    Attributes:
        samples: Samples in the part.
        weights: What the part tells of the window's weights.
        known: What is known about the losses and of their names, in short.
        settings: A digest of the settings of the optimizer's groups.
        flags: Which parameters have a gradient and which buffers were written, packed.
        requests: Actions that the rank requests after this window, as bits.
        failures: What ran out of memory on it since its last message: samples and widths.
        variance: The variance of its gradients, if noise was measured.
        is_stale: Whether what it knows of the losses now asks for weights that it was not given beforehand.
        larger: Micro-batch size that it requests from the next window on, if ranks agree on sizes; None for no request.
    """

    samples: int
    weights: PartWeights
    known: bytes
    settings: bytes
    flags: bytes
    requests: int
    failures: tuple[tuple[int, Widths], ...]
    variance: float | None
    is_stale: bool
    larger: int | None


class RankPeers(Peers):
    """Makes windows together with other ranks.

    Args:
        ranks: All ranks.
        step: This rank's training step; without an optimizer, gradients are summed and no optimizer step is made.
        requests: Returns the actions that this rank requests after the current window, as bits shared with all ranks.
        drops: Whether a window is left out, given the samples of each rank's part.

    Attributes:
        parts: Each rank's message about its part of the current window, in rank order.
        is_decided: As for `Peers`.
    """

    is_part = True
    # Whether gradients are summed here, rather than by the model itself.
    adds_up_gradients = True

    def __init__(
        self,
        ranks: Ranks,
        step: GradientStep,
        *,
        requests: Callable[[], int] = lambda: 0,
        drops: Callable[[Sequence[int]], bool] = lambda _: False,
    ) -> None:
        super().__init__(step)
        self.ranks = ranks
        self.parts: list[Part] = []
        self._requests = requests
        self._drops = drops
        self._settings = SharedSettings(step)
        self._trained = trained(step)
        self._wanted: list[bool] = []  # which parameters have a gradient on any rank
        self._buffers = _SharedBuffers(step)
        self._forms = [_form_of_gradient(parameter) for parameter in self._trained if self.adds_up_gradients]
        copied = {len(self._forms) + index for index, averaged in enumerate(self._buffers.averaged) if not averaged}
        self._buckets = Buckets([*self._forms, *self._buffers.forms], step.memory.device, copied)
        self._slots: list[reported.Slot] = []  # the losses, and values reported in addition
        self._norm = in_full(torch.zeros((), device=step.memory.device))
        self._values = self._norm
        # Whether ranks exchange predictions, and run forward first: decided together, since an evaluation may change
        # what one of them knows.
        self._shares = self._runs_forward = False
        self._factors: list[float] = []  # of all ranks
        self._begun: Window | None = None
        self._windows = 0
        own = (step.memory.name, step.memory.reading().total_bytes, step.options.memory_limit)
        self._are_like = [one == own for one in ranks.exchange("devices", own)]
        # The first collective allocates GPU memory for all later ones: better now than next to a window's activations.
        ranks.all_reduce(self._norm)

    @property
    def samples(self) -> int:
        """Samples of the current window, over all ranks."""
        return sum(part.samples for part in self.parts)

    def expected_gradients(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient on other ranks, as far as this rank knows."""
        return list(compress(self._trained, self._wanted))

    def check_parameters(self) -> None:
        """Check that all parameters trained now were trained from the start.

        Raises:
            InvalidInputError: There are new parameters, which the other ranks do not know.
        """
        known = set(self._trained)
        come = [parameter for parameter in trained(self._step) if parameter not in known]
        if come and (self._optimizer_steps is not None or self._begun is not None):
            raise InvalidInputError(
                f"{len(come)} parameters are trained now that were not when training began, the first of shape "
                f"{tuple(come[0].shape)}, and several ranks add up the gradients of those they began with; go on with "
                "the changed model in another call of fit, or with another Accumulator"
            )

    # --- a window -----------------------------------------------------------------------------------------------------

    def begin(self, window: Window, sizing: Sizing) -> Totals | None:
        """Begin a window; return what predicts its weights if that is needed before the parts are computed."""
        self._window, self._sizing, self.is_decided = window, sizing, False
        self._buffers.begin()
        if self._begun is window.origin:
            return self.totals  # a second attempt of this rank alone
        self._prepare(window)
        self._weigh(window)
        self._begun = window.origin
        return self.totals

    def begin_attempt(self) -> None:
        """As for `Peers`."""
        self.is_awaited = False
        self._settings.begin()

    def lacking_size(self, error: Exception, size: int | None) -> int | None:
        """As for `Peers`: where the others wait for this rank, which lacks memory, all begin the window again."""
        if self.is_decided:
            raise error
        if not self.is_awaited or not (is_oom(error) or is_too_large(error)):
            return size
        if isinstance(error, OutOfMemoryElsewhereError):
            self._step.stage.phase = Phase.ELSEWHERE
            return error.size
        return self.ranks.lack(size, error)

    def reduce(self, given: PartResult) -> WindowResult:
        """As for `Peers`: agree with the other ranks, and sum the gradients."""
        self.agree(given)
        if not self.samples or self._drops([part.samples for part in self.parts]):
            return WindowResult()
        self._step.stage.phase = Phase.REDUCE
        outcome, result = Outcome(), WindowResult(samples=self.samples)
        self.add_up(given, outcome, result)
        if outcome.failure is not None:
            raise outcome.failure  # of which the others hear in place of the next message
        return result

    def decide(self, reduced: WindowResult) -> WindowResult:
        """As for `Peers`."""
        self.ranks.exchange("ready")
        self._begun, self.is_decided = None, True
        return reduced

    def commit(self) -> bool:
        """Step the optimizer, as all others do now; if memory runs out, retry once after releasing the caches."""
        steps = self._optimizer_steps
        assert steps is not None
        before = steps.made
        try:
            return steps.commit()
        except Exception as error:
            if steps.made != before or not is_oom(error) or is_device_lost(error):
                raise
            clear_traceback_frames(error)
        self._step.memory.release()
        return steps.commit()

    def agree(self, given: PartResult) -> None:
        """Confirm that all ranks have completed their parts, and find what they multiply their gradients by.

        Raises:
            BeginAgain: Some have to repeat theirs.
            InvalidInputError: Their optimizers have unlike settings. Raised on every rank.
            RankFailedError: Another rank cannot continue.
        """
        knowledge, known = self._step.objective.knowledge, self._known(given.slots)
        # New for every window, since the last one's values are read later; and allocated before the others wait for it.
        self._values = in_full(torch.zeros(len(self._slots), device=self._step.memory.device))
        self._exchange_parts(given, known)
        if len({part.settings for part in self.parts}) > 1:
            self._settings.compare(self.ranks)
        for part, is_like in zip(self.parts, self._are_like, strict=True):
            if part.failures and is_like:  # else every rank would find it out by failing, and the others wait each time
                self._sizing.adopt(part.failures)
        if len({part.known for part in self.parts}) == 1 and not any(part.is_stale for part in self.parts):
            self._settle()
            return
        said = self.ranks.exchange("losses", (knowledge.shared(), self._slots))
        self._slots = sorted({slot for _, slots in said for slot in slots})
        knowledge.adopt([of_rank for of_rank, _ in said])
        self._shares, self._runs_forward = len(knowledge.items()) > 1, knowledge.runs_forward_first
        self._weigh(self._window)
        raise BeginAgain(self.totals)

    def _settle(self) -> None:
        """Find what ranks multiply their gradients by.

        Raises:
            BeginAgain: All make the window again.
        """
        knowledge, totals = self._step.objective.knowledge, self.totals
        is_exact = totals is not None and totals.is_exact
        try:
            weights, is_common = [part.weights for part in self.parts], not self.adds_up_gradients
            self._factors = settle(knowledge, weights, is_exact=is_exact, is_common=is_common)
        except NotSettled as wrong:
            self.totals = Totals(wrong.weights, self.samples, is_exact=True)
            self._runs_forward = knowledge.runs_forward_first
            raise BeginAgain(self.totals) from None

    def _weigh(self, window: Window) -> None:
        self.totals = self._predicted(window)
        if self._runs_forward and not window.samples:
            self.totals_of({}, 0)  # the others exchange this too, and wait for this rank

    def _predicted(self, window: Window) -> Totals | None:
        """Return what predicts the weights of a window, if ranks need the same.

        Where passes reduce gradients, all ranks divide by one number from the first on.
        """
        if not self._shares and self.adds_up_gradients:
            return None
        knowledge, in_units = self._step.objective.knowledge, self.adds_up_gradients
        mine = all_predicted(knowledge, window, in_units=in_units) if window.samples else {}
        said = self.ranks.exchange("weights", (mine, window.samples))
        return Totals(sums([weights for weights, _ in said]), sum(samples for _, samples in said))

    def runs_forward_first(self) -> bool:
        """As for `Peers`."""
        return self._runs_forward

    def totals_of(self, weights: Mapping[SummandKey, float], samples: int) -> Totals:
        """As for `Peers`."""
        if self.totals is None or not self.totals.is_exact:  # otherwise a second attempt by this rank alone
            said = self.ranks.exchange("true weights", (dict(weights), samples))
            self.totals = Totals(
                sums([of_rank for of_rank, _ in said]), sum(number for _, number in said), is_exact=True
            )
        return self.totals

    def _is_stale(self) -> bool:
        """Whether weights are needed beforehand by what is known of the losses now, and were not given."""
        return len(self._step.objective.knowledge.items()) > 1 and self.totals is None

    def _larger_size(self) -> int | None:
        """Return the micro-batch size that this rank requests from the next window on, if ranks agree on sizes."""
        return None

    def _exchange_parts(self, given: PartResult, known: bytes) -> None:
        """Exchange the messages about parts."""
        if self._window.samples:
            self._sizing.clock.wait()
        flags = [parameter.grad is not None for parameter in self._trained] + self._buffers.written()
        mine = Part(
            samples=self._window.samples,
            weights=PartWeights() if given.weights is None else given.weights.message(),
            known=known,
            settings=self._settings.digest(),
            flags=np.packbits(np.array(flags, dtype=bool)).tobytes(),
            requests=self._requests(),
            failures=tuple(self._sizing.failures),
            variance=None if given.spread is None else given.spread.variance,
            is_stale=self._is_stale(),
            larger=self._larger_size() if self._window.samples else None,
        )
        self._sizing.failures.clear()
        self.parts = self.ranks.exchange("window", mine)
        self.is_awaited = True
        flags_of_all = np.array([np.frombuffer(part.flags, dtype=np.uint8) for part in self.parts])
        self._wanted = np.unpackbits(np.bitwise_or.reduce(flags_of_all))[: len(self._trained)].tolist()

    def add_up(self, given: PartResult, outcome: Outcome, result: WindowResult) -> None:
        """Replace gradients, losses and buffers by those of the whole window, and unscale and clip the gradients.

        If anything fails on this rank alone, it still sends everything that the others wait for; what it holds
        afterwards is undefined. Everything that is sent was allocated before, so it cannot be missing.

        Raises:
            InvalidInputError: Nothing counts in the whole window. Raised on every rank.
            RankFailedError: Another rank is gone.
        """
        factor = self._factors[self.ranks.rank]
        outcome.run(self._make_gradients)
        self._exchange_sums(given, outcome, result, self._trained, factor)
        result.spread = outcome.run(self._spread)
        self._unscale_and_clip(outcome, result)

    def _exchange_sums(
        self,
        given: PartResult,
        outcome: Outcome,
        result: WindowResult,
        parameters: Sequence[nn.Parameter],
        factor: float,
    ) -> None:
        """Replace losses, gradients of parameters, and buffers by those of the whole window."""
        samples, rank, buffers = [part.samples for part in self.parts], self.ranks.rank, self._buffers
        packed = np.array([np.frombuffer(part.flags, dtype=np.uint8) for part in self.parts])
        flags = np.unpackbits(packed, axis=1)[:, len(self._trained) :]  # and some bits more
        flags[[not own for own in samples]] = 0
        written: list[bool] = flags.max(0).astype(bool).tolist()
        sources: list[int] = flags.argmax(0).tolist()  # the first ranks that wrote
        outcome.run(lambda: self._fill_losses(given, factor))
        outcome.run(lambda: buffers.make_plain(written))
        share = samples[rank] / sum(samples)
        of_buffers = [
            share if is_mean else float(rank == source)
            for is_mean, source in zip(buffers.averaged, sources, strict=False)
        ]
        with self._step.memory.lifted():  # also for the network's threads, while buckets are filled
            self.ranks.all_reduce(self._values)
            self._buckets.add_up(
                outcome,
                [*(parameter.grad for parameter in parameters), *buffers.now()],
                self.ranks.all_reduce,
                factors=[factor] * len(parameters) + of_buffers,
                wanted=self._wanted[: len(parameters)] + written,
            )
        found = dict(zip(self._slots, self._values.unbind(), strict=True))
        result.losses = {name: LossSum([value]) for (kind, name), value in found.items() if kind == LOSS}
        result.reported = outcome.run(lambda: means(found)) or {}

    def _spread(self) -> Spread | None:
        """Return how far the gradients of parts are from the window's, if noise was measured: the ranks' mean."""
        found = [part.variance for part in self.parts if part.variance is not None]
        if not found:
            return None
        unit = self._step.loss_scale() * (self.samples if self._step.objective.knowledge.adds_all else 1.0)
        gradients = (parameter.grad for parameter in self._trained)
        whole = float(squared_norm(gradients, self._step.memory.device)) / unit**2
        return Spread(sum(found) / len(found), whole)

    def _unscale_and_clip(self, outcome: Outcome, result: WindowResult) -> None:
        """Unscale and clip the gradients for the optimizers, with the same norm on every rank."""
        steps = self._optimizer_steps
        if steps is None or steps.clip_grad_norm is None:
            return
        norm = outcome.run(steps.norm)
        # Other kinds of devices, or other numbers of threads, may sum in another order: rank 0's counts.
        outcome.run(lambda: self._norm.zero_() if self.ranks.rank or norm is None else self._norm.copy_(norm))
        self.ranks.all_reduce(self._norm)
        if norm is not None:
            outcome.run(lambda: steps.clip(norm.copy_(self._norm)))
        result.grad_norm = norm

    # --- what is known of losses, and what parts weigh ----------------------------------------------------------------

    def _prepare(self, window: Window) -> None:
        """Compare parameters and choose the samples on which losses are tried before this window, if that is due."""
        self._windows += 1
        knowledge = self._step.objective.knowledge
        self.samples_to_try, knowledge.counted = None, {}
        if is_check_window(self._windows):
            compare_weights(self.ranks, self._step)
            knows = knowledge.needs_no_check or (knowledge.is_torch_loss and knowledge.is_checked)
            self.samples_to_try = self._samples_to_try(window, sends=not knows)

    def _samples_to_try(self, window: Window | None, *, sends: bool) -> Window | None:
        """Return samples of several ranks, the same on each, so that all learn the same of the losses."""
        with self._step.memory.lifted():  # samples are few, and on the host
            most = -(-MOST_SAMPLES // self.ranks.size) if self.ranks.rank < MOST_SAMPLES else 0
            own = _sendable(window, most) if sends and window is not None and window.samples else ([], {})
            said = self.ranks.exchange("samples", own)
        found = [piece for pieces, _ in said for piece in pieces]
        self._step.objective.knowledge.counted = sums([counts for _, counts in said])
        return Window(found, self._step.objective.split) if found else None

    def _known(self, slots: Mapping[reported.Slot, Any] | None = None) -> bytes:
        """Return a digest of everything known about the losses, equal wherever that is equal."""
        self._slots = sorted({*self._slots, *(slots or ())})
        text = repr((self._step.objective.knowledge.in_short(), self._slots))
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    # --- adding up ----------------------------------------------------------------------------------------------------

    def _make_gradients(self) -> None:
        """Ensure that every gradient that any rank has exists here, and can be added up in place.

        Raises:
            InvalidInputError: One is not dense, or not of its parameter's shape and type when training began.
        """
        for parameter, form, is_wanted in zip(self._trained, self._forms, self._wanted, strict=True):
            gradient = parameter.grad
            if gradient is None:
                if is_wanted:
                    parameter.grad = torch.zeros_like(parameter, dtype=form.dtype)
            elif not _has_form(gradient, form):
                named = (pair for module in self._step.objective.modules for pair in module.named_parameters())
                name = next((repr(name) for name, one in named if one is parameter), "a parameter")
                raise InvalidInputError(
                    f"the gradient of {name} is {tuple(gradient.shape)} of {gradient.dtype} ({gradient.layout}), and "
                    "several ranks add up dense gradients as they were expected when training began, here "
                    f"{tuple(form.shape)} of {form.dtype}; pass sparse=False to layers that have sparse gradients, and "
                    "keep the shapes and types of parameters"
                )
            elif (plain := as_plain(gradient)) is not gradient:
                parameter.grad = plain

    def _fill_losses(self, given: PartResult, factor: float) -> None:
        found = given.slots
        for value, slot in zip(self._values.unbind(), self._slots, strict=True):
            if slot in found:
                value.fill_(found[slot])
        # The rest has its own weights.
        self._values[: sum(kind <= WEIGHT for kind, _ in self._slots)].mul_(factor)


def _sendable(window: Window, most: int) -> tuple[list[Any], dict[Count, float]]:
    """Return samples of a window to try, as the loader would yield them, and what is counted in all.

    Nothing, if they cannot be pickled; and no counts, where a split would have to join all samples for them.
    """
    try:
        chosen, _ = next(choices(window, most), (window.part(0, 1), 0))
        found = copied(chosen.raw()) if most else []
        pickle.dumps(found)
        wanted = frozenset(counts_in(window.cut(0, 1), 1)) if window.is_nested else frozenset()
        return list(found), counts_of(window, 0, window.samples, wanted) if wanted else {}
    except Exception:  # noqa: BLE001 - of the user's own types; other ranks wait for what is sent
        return [], {}


def _form_of_gradient(parameter: nn.Parameter) -> Tensor:
    """Return a tensor of the shape and type that a parameter's gradients have."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # from torch 2.9 on
    return torch.empty(parameter.shape, dtype=dtype, device="meta")


def _has_form(tensor: Tensor, form: Tensor) -> bool:
    return tensor.shape == form.shape and tensor.dtype == form.dtype and tensor.layout == form.layout


def trained(step: GradientStep) -> list[nn.Parameter]:
    """Return the parameters that get gradients, in the order that all ranks use."""
    return [parameter for parameter in step.parameters if parameter.requires_grad]


def sums(said: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Return by name the sum of what ranks say."""
    return {name: sum(one.get(name, 0.0) for one in said) for one in said for name in one}


class _SharedBuffers:
    """The buffers that training updates, made equal on every rank after each window.

    BatchNorm's running statistics become their means over the ranks, weighted by samples. Every other buffer that was
    written is copied from the first rank that wrote it.

    Attributes:
        forms: Tensors of their shapes and types when training began.
        averaged: Which are running statistics.
    """

    def __init__(self, step: GradientStep) -> None:
        parts = dict.fromkeys(part for module in step.objective.modules for part in module.modules())
        device = step.memory.device.type
        self._owners = [
            (part, name)
            for part in parts
            for name, buffer in part._buffers.items()
            if buffer is not None and buffer.device.type == device
        ]
        at_first: list[Any] = [part._buffers[name] for part, name in self._owners]
        self.forms = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in at_first]
        self.averaged = [isinstance(part, _BatchNorm) and name in _STATISTICS for part, name in self._owners]
        self._before: list[tuple[Tensor | None, int]] = []

    def begin(self) -> None:
        """Record the buffers before a window."""
        self._before = [(buffer, 0 if buffer is None else buffer._version) for buffer in self.now()]

    def written(self) -> list[bool]:
        """Return which buffers have been written since."""
        # BatchNorm's kernels write without incrementing version counters.
        return [
            now is not None and ((averaged and part.training) or now is not before or now._version != version)
            for now, (before, version), averaged, (part, _) in zip(
                self.now(), self._before, self.averaged, self._owners, strict=True
            )
        ]

    def now(self) -> list[Tensor | None]:
        """Return the buffers; None for one whose shape or type has changed, so that it cannot be sent."""
        found = (part._buffers.get(name) for part, name in self._owners)
        pairs = zip(found, self.forms, strict=True)
        return [buffer if buffer is not None and _has_form(buffer, form) else None for buffer, form in pairs]

    def make_plain(self, wanted: Sequence[bool]) -> None:
        """Let buffers be written to in place."""
        for buffer in compress(self.now(), wanted):
            if buffer is not None and (plain := as_plain(buffer)) is not buffer:
                buffer.data = plain
