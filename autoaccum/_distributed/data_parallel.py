"""Makes one window with several processes together: each works on its part, then all make one optimizer step.

Processes do not communicate while they work on their micro-batches, so one that runs out of memory there delays the
others only by the time of its second attempt. Then they agree in two steps, like a distributed commit. In the first,
they exchange the weights of their parts and confirm that all are done; gradients are then summed in flat buckets. In
the second, they confirm that all hold the sum; each then steps its own optimizer. Until then every process can still go
back to the start of the window, and if one has to, all do.
"""

from __future__ import annotations

import hashlib
import io
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum._data.batches import Window
from autoaccum._data.nesting import copied
from autoaccum._distributed.buckets import Buckets, as_plain
from autoaccum._engine.does_not_fit import whole_does_not_fit
from autoaccum._engine.gradients import LossSum, WindowResult
from autoaccum._engine.noise_scale import Spread, squared_norm
from autoaccum._engine.out_of_memory import Phase
from autoaccum._engine.peers import Peers
from autoaccum._engine.steady import is_number_due
from autoaccum._loss.loss_check import MOST_SAMPLES
from autoaccum._loss.loss_forms import Common
from autoaccum._loss.reported import LOSS, WEIGHT, means
from autoaccum._loss.terms import in_full
from autoaccum._oom import first_line, is_device_lost, is_oom, let_go
from autoaccum.errors import InvalidInputError, StartAgainError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import PartResult
    from autoaccum._engine.peers import BeforeStep, Work
    from autoaccum._loss import reported
    from autoaccum._loss.loss_weights import Slot
    from autoaccum._sizing.sizing import Sizing


_T = TypeVar("_T")
# Attempts at determining the weights of parts.
_TRIES = 4
_STATISTICS = ("running_mean", "running_var")


class Part(NamedTuple):
    """A rank's message about its part of a window, once that is done.

    Attributes:
        samples: Samples in the part.
        weight: What the part's loss is divided by; None if it is on the device, or makes no difference.
        known: Digest of what is known about the losses and of their names.
        flags: Which parameters have a gradient and which buffers were written, packed; None for those of its last
            message, so that messages stay short.
        requests: Actions that the rank requests after this window, as bits.
        larger: Micro-batch size that it requests from the next window on, if ranks agree on sizes; None for no request.
        is_stale: Whether the weights that parts were given beforehand do not hold by what it knows of the losses now.
        variance: The variance of its gradients, if noise was measured.
        failed: What ran out of memory on it since its last message: samples and widths.
    """

    samples: int
    weight: float | None
    known: bytes
    flags: bytes | None
    requests: int
    larger: int | None = None
    variance: float | None = None
    is_stale: bool = False
    failed: tuple[tuple[int, tuple[int, ...]], ...] = ()


class DataParallel(Peers):
    """Makes windows together with other ranks.

    Args:
        ranks: All ranks.
        step: This rank's training step; without an optimizer, gradients are summed and no optimizer step is made.
        requests: Returns the actions that this rank requests after the current window, as bits shared with all ranks.
        drops: Whether a window is left out, given the samples of each rank's part.

    Attributes:
        parts: Each rank's message about its part of the current window, in rank order.
        totals: Combined weights of the current window's parts, if needed before their gradients are computed.
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
        self.is_decided = False
        self._requests = requests
        self._drops = drops
        self._trained = trained(step)
        self._flags = [np.zeros(0, dtype=bool)] * ranks.size  # of each rank's last message
        self._buffers = _SharedBuffers(step)
        self._forms = [_form_of_gradient(parameter) for parameter in self._trained if self.adds_up_gradients]
        copied = {len(self._forms) + index for index in self._buffers.copied}
        self._buckets = Buckets([*self._forms, *self._buffers.at_first], step.memory.device, copied)
        self._slots: list[reported.Slot] = []  # the losses, and values reported in addition
        self._norm, self._weight = (in_full(torch.zeros((), device=step.memory.device)) for _ in range(2))
        self._values = self._norm
        self.totals: dict[Slot, float] | None = None
        self._pairs: dict[str, float] | None = None
        self._known_before = b""
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
        return list(compress(self._trained, self._wanted()))

    def check_parameters(self) -> None:
        """Check that all parameters trained now were trained from the start.

        Raises:
            InvalidInputError: There are new parameters, which the other ranks do not know.
        """
        known = set(self._trained)
        come = [parameter for parameter in trained(self._step) if parameter not in known]
        if come and (self._optimizer_steps is not None or self._begun is not None):
            remedy = "end this call of fit, and go on with the changed model in another"
            if self._optimizer_steps is None:
                remedy = "make another Accumulator for the changed model"
            raise InvalidInputError(
                f"{len(come)} parameters are trained now that were not when training began (shapes "
                f"{', '.join(str(tuple(parameter.shape)) for parameter in come[:3])}), and several ranks add up the "
                f"gradients of those they began with; {remedy}"
            )

    def begin(self, window: Window, sizing: Sizing) -> dict[Slot, float] | None:
        """Begin a window; return the combined weights of its parts if they are needed before the parts are computed."""
        self._window, self._sizing, self.is_decided = window, sizing, False
        self._buffers.begin()
        if self._begun is window.origin:
            return self.totals  # a second attempt of this rank alone
        self._prepare(window)
        self._known_before = self._known()
        self.totals = self._totals_of(window)
        self._begun = window.origin
        return self.totals

    def _prepare(self, window: Window) -> None:
        """Choose the samples on which losses are tried before this window, if they are to be."""
        self._windows += 1
        self.samples_to_try = None
        if is_number_due(self._windows):
            self.samples_to_try = self._samples_to_try(window)

    def _samples_to_try(self, window: Window, *, needs_some: bool = False) -> Window | None:
        """Return samples of several ranks, the same on each, so that all learn the same of the losses.

        Args:
            window: This rank's part of the window.
            needs_some: Whether to return some also where losses need no check.

        Raises:
            InvalidInputError: Some are needed, and cannot be pickled. Raised on every rank.
        """
        sources = min(self.ranks.size, MOST_SAMPLES)
        own: list[Any] = []
        weights = self._step.objective.weights
        knows = weights.needs_no_check or (weights.is_trusted and weights.is_checked)
        with self._step.memory.lifted():  # samples are few, and on the host
            if self.ranks.rank < sources and (needs_some or not knows):
                own = _sendable(window, -(-MOST_SAMPLES // sources))
            said = self.ranks.exchange("samples", (window.samples, own))
        found = [piece for _, pieces in said for piece in pieces]
        if needs_some and not found and any(samples for samples, _ in said):
            raise InvalidInputError(
                "ranks that hold shards of a model send each other samples, and those of this loader cannot be pickled"
            )
        return Window(found, self._step.objective.split) if found else None

    def failed(self, error: Exception, work: Work, number: int) -> None:  # noqa: ARG002 - as Peers has it
        """Handle the consequences of this rank's failure for the others.

        Raises:
            StartAgainError: This rank lacks memory while the others make the optimizer step.
        """
        if self.is_decided and is_oom(error) and not self.ranks.is_in_pass:
            raise _left_behind(error, self.ranks.rank, number) from error

    def reduce(self, given: PartResult, work: Work, before_step: BeforeStep) -> WindowResult | None:
        """Agree with the other ranks and sum the gradients; return None if the attempt must be repeated."""
        if not self.agree(given, work):
            return None
        if not self.samples or self._drops([part.samples for part in self.parts]):
            work.start_over()
            return WindowResult()
        outcome = self.add_up(given)
        result = outcome.result
        result.samples = self.samples
        outcome.run(lambda: before_step(result.losses, result.samples))
        # From here on, this rank cannot know whether the others have received its message and make the optimizer step.
        # If the model sums gradients itself, they all meet once more.
        self.is_decided = self.adds_up_gradients
        if not self.all_ready(outcome):
            self.is_decided = False
            if outcome.failure is not None:
                raise outcome.failure
            work.start_over(self.totals)
            return None
        self.is_decided = True
        return result

    def commit(self) -> bool:
        """Step the optimizer, as all others do now; if memory runs out, retry once after releasing the caches.

        Raises:
            DoesNotFitError: Memory ran out again. The others have made the optimizer step, so the window cannot be
            repeated.
        """
        steps, memory = self._optimizer_steps, self._step.memory
        assert steps is not None
        before, has_failed = steps.made, False
        while True:
            try:
                return steps.commit()
            except Exception as error:
                if steps.made != before or not is_oom(error) or is_device_lost(error):
                    raise
                if has_failed:
                    raise whole_does_not_fit(self._step, first_line(error), Phase.OPTIMIZER, tries=2) from error
                let_go(error)
            has_failed = True
            memory.release()

    def agree(self, given: PartResult, work: Work) -> bool:
        """Confirm that all ranks have completed their parts; return False if some have to repeat theirs.

        Raises:
            RankFailedError: Another rank cannot continue.
        """
        known, shares = self._known(given.slots), self._step.objective.weights.common is Common.OWN_DIVISORS
        # New for every window, since the last one's values are read later; and allocated before the others wait for it.
        self._values = in_full(torch.zeros(len(self._slots), device=self._step.memory.device))
        is_stale = shares != (self.totals is not None) or (shares and known != self._known_before)
        self._exchange_parts(given, known, is_stale=is_stale)
        for part, is_like in zip(self.parts, self._are_like, strict=True):
            if part.failed and is_like:  # else every rank would find it out by failing, and the others wait each time
                work.adopt(part.failed)
        if len({part.known for part in self.parts}) == 1 and not any(part.is_stale for part in self.parts):
            return True
        self._adopt_knowledge()
        self._known_before = self._known()
        self.totals = self._totals_of(self._window)
        work.start_over(self.totals)
        return False

    def _exchange_parts(
        self, given: PartResult, known: bytes, *, is_stale: bool = False, larger: int | None = None
    ) -> None:
        """Exchange the messages about parts."""
        if self._window.samples:
            self._sizing.wait()
        mine = Part(
            samples=self._window.samples,
            weight=given.weight if isinstance(given.weight, float) else None,
            known=known,
            flags=self._own_flags(),
            requests=self._requests(),
            larger=larger,
            variance=None if given.spread is None else given.spread.variance,
            is_stale=is_stale,
            failed=tuple(self._sizing.failed),
        )
        self._sizing.failed.clear()
        self.parts = [Part(*each) for each in self.ranks.exchange("window", tuple(mine))]
        for rank, part in enumerate(self.parts):
            if part.flags is not None:
                self._flags[rank] = np.unpackbits(np.frombuffer(part.flags, dtype=np.uint8)).astype(bool)

    def _own_flags(self) -> bytes | None:
        own = [parameter.grad is not None for parameter in self._trained] + self._buffers.written()
        flags = np.array(own, dtype=bool)
        is_known = np.array_equal(flags, self._flags[self.ranks.rank][: len(flags)])
        return None if is_known else np.packbits(flags).tobytes()

    def _wanted(self) -> list[bool]:
        """Return which parameters have a gradient on any rank."""
        wanted: list[bool] = np.any([flags[: len(self._trained)] for flags in self._flags], axis=0).tolist()
        return wanted

    def add_up(self, given: PartResult) -> Outcome:
        """Replace gradients, losses and buffers by those of the whole window, and unscale and clip the gradients.

        If anything fails on this rank alone, it still sends everything that the others wait for; what it holds
        afterwards is undefined. Everything that is sent was allocated before, so it cannot be missing.

        Returns:
            The outcome, which the others have yet to be informed of.

        Raises:
            InvalidInputError: Nothing counts in the whole window. Raised on every rank.
            RankFailedError: Another rank is gone.
        """
        self._step.stage.phase = Phase.REDUCE
        outcome = Outcome()
        factor = self._factor(given, outcome)
        wanted = self._wanted()
        outcome.run(lambda: self._make_gradients(wanted))
        outcome.run(lambda: self._fill_losses(given, factor))
        self._exchange_sums(outcome, [parameter.grad for parameter in self._trained], wanted, factor)
        outcome.run(lambda: self._read_values(outcome.result))
        outcome.result.spread = outcome.run(self._spread)
        self._unscale_and_clip(outcome)
        return outcome

    def _exchange_sums(
        self,
        outcome: Outcome,
        gradients: Sequence[Tensor | None] = (),
        wanted: Sequence[bool] = (),
        factor: float | Tensor = 1.0,
    ) -> None:
        """Replace losses, gradients and buffers by those of the whole window."""
        samples, rank = [part.samples for part in self.parts], self.ranks.rank
        source = next(rank for rank, own in enumerate(samples) if own)
        written = self._flags[source][len(self._trained) :].tolist()  # and some bits more
        outcome.run(lambda: self._buffers.make_plain(written))
        of_buffers = self._buffers.factors(samples[rank] / sum(samples), is_source=rank == source)
        with self._step.memory.lifted():  # also for the network's threads, while buckets are filled
            self.ranks.all_reduce(self._values)
            failure = self._buckets.add_up(
                [*gradients, *self._buffers.now()],
                self.ranks.all_reduce,
                factors=[*[factor] * len(gradients), *of_buffers],
                wanted=[*wanted, *written],
            )
        outcome.failure = outcome.failure or failure

    def _spread(self) -> Spread | None:
        """Return how far the gradients of parts are from the window's, if noise was measured: the ranks' mean."""
        found = [part.variance for part in self.parts if part.variance is not None]
        if not found:
            return None
        is_sum = self._step.objective.weights.common is Common.SUM
        unit = self._step.loss_scale() * (self.samples if is_sum else 1.0)
        gradients = (parameter.grad for parameter in self._trained)
        whole = float(squared_norm(gradients, self._step.memory.device)) / unit**2
        return Spread(sum(found) / len(found), whole)

    def _unscale_and_clip(self, outcome: Outcome) -> None:
        """Unscale and clip the gradients for the optimizers, with the same norm on every rank."""
        steps = self._optimizer_steps
        if steps is None or steps.clip_grad_norm is None:
            return
        norm = outcome.run(steps.norm)
        if norm is not None:
            outcome.run(lambda: self._norm.fill_(norm))
        # Other kinds of devices, or other numbers of threads, may sum in another order: rank 0's counts.
        if self.ranks.rank:
            self._norm.zero_()
        self.ranks.all_reduce(self._norm)
        if norm is not None:
            outcome.run(lambda: steps.clip(norm.copy_(self._norm)))
        outcome.result.grad_norm = norm

    def all_ready(self, outcome: Outcome) -> bool:
        """Whether every rank holds the same gradients, unscaled and clipped."""
        are_ready = not any(self.ranks.exchange("ready", outcome.failure is not None))
        if are_ready:
            self._begun = None
        return are_ready

    # --- what parts weigh ---------------------------------------------------------------------------------------------

    def _totals_of(self, window: Window) -> dict[Slot, float] | None:
        self._pairs = None
        if self._step.objective.weights.common is not Common.OWN_DIVISORS:
            return None
        totals = sums(self._weights_of_all(window))
        if not window.samples and self._step.objective.weights.mixes_pairs:
            self.of_pairs({})  # the others exchange this too, and wait for this rank
        return totals

    def of_pairs(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """As for `Peers`."""
        if self._pairs is None:  # otherwise a second attempt by this rank alone
            self._pairs = sums(self.ranks.exchange("pairs", dict(weights)))
            if not all(self._pairs.values()):
                raise nothing_counts()
        return {name: self._pairs[name] for name in weights}

    def _weights_of_all(self, window: Window) -> list[dict[Slot, float]]:
        """Return the weights of each part; if one rank runs out of memory computing them, all retry."""
        for _ in range(_TRIES):
            outcome = Outcome()
            own = outcome.run(lambda: self._step.objective.weights.totals(window))
            said = self.ranks.exchange("weights", own)
            if None not in said:
                return said
            if outcome.failure is not None and not is_oom(outcome.failure):
                raise outcome.failure
            outcome.failure = None
            self._step.memory.release()
        lacking = ", ".join(str(rank) for rank, own in enumerate(said) if own is None)
        raise whole_does_not_fit(self._step, f"memory runs out on rank {lacking}", Phase.WEIGH, _TRIES)

    def _factor(self, given: PartResult, outcome: Outcome) -> float | Tensor:
        """Return the factor for this rank's gradients and losses before they are summed over ranks."""
        common = self._step.objective.weights.common
        if self.totals is not None or common is Common.SUM:
            return 1.0
        if any(part.samples and part.weight is None for part in self.parts):
            outcome.run(lambda: self._weight.fill_(given.weight or 0.0))
            self.ranks.all_reduce(self._weight)
            factor = outcome.run(lambda: self._provisional_part(given))
            return 1.0 if factor is None else factor
        total = sum(part.weight or 0.0 for part in self.parts)
        if total == 0.0:
            raise nothing_counts()
        return given.provisional / total

    def _provisional_part(self, given: PartResult) -> Tensor:
        if self._weight.device.type == "cpu" and not float(self._weight):
            raise nothing_counts()
        return given.provisional / self._weight

    def _known(self, slots: Mapping[reported.Slot, Any] | None = None) -> bytes:
        """Return a digest of everything known about the losses, equal wherever that is equal."""
        self._slots = sorted({*self._slots, *(slots or ())})
        text = repr((self._step.objective.weights.in_short(), self._slots))
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    def _adopt_knowledge(self) -> None:
        """Adopt what other ranks know of losses that this one has not seen.

        Raises:
            InvalidInputError: They know something else. Raised on every rank.
        """
        said = self.ranks.exchange("losses", (self._step.objective.weights.knowledge, self._slots))
        self._slots = sorted({slot for _, slots in said for slot in slots})
        self._step.objective.weights.adopt([known for known, _ in said])

    # --- adding up ----------------------------------------------------------------------------------------------------

    def _make_gradients(self, wanted: Sequence[bool]) -> None:
        """Ensure that every gradient that any rank has exists here, and can be added up in place.

        Raises:
            InvalidInputError: One is not dense, or not of its parameter's shape and type when training began.
        """
        for parameter, form, is_wanted in zip(self._trained, self._forms, wanted, strict=True):
            gradient = parameter.grad
            if gradient is None:
                if is_wanted:
                    parameter.grad = torch.zeros_like(parameter, dtype=form.dtype)
                continue
            if gradient.layout != form.layout or gradient.dtype != form.dtype or gradient.shape != form.shape:
                raise self._unlike(parameter, gradient, form)
            if (plain := as_plain(gradient)) is not gradient:
                parameter.grad = plain

    def _unlike(self, parameter: nn.Parameter, gradient: Tensor, form: Tensor) -> InvalidInputError:
        named = (pair for module in self._step.objective.modules for pair in module.named_parameters())
        name = next((repr(name) for name, one in named if one is parameter), "a parameter")
        layout = "" if gradient.layout is form.layout else f" and {gradient.layout}"
        return InvalidInputError(
            f"the gradient of {name} is {tuple(gradient.shape)} of {gradient.dtype}{layout}, and several ranks add up "
            f"dense gradients as they were expected when training began, here {tuple(form.shape)} of {form.dtype}; "
            "pass sparse=False to layers that have sparse gradients, and keep the shapes and types of parameters"
        )

    def _fill_losses(self, given: PartResult, factor: float | Tensor) -> None:
        found = given.slots
        for value, slot in zip(self._values.unbind(), self._slots, strict=True):
            if slot in found:
                value.fill_(found[slot])
        # The rest has its own weights.
        self._values[: sum(kind <= WEIGHT for kind, _ in self._slots)].mul_(factor)

    def _read_values(self, result: WindowResult) -> None:
        found = dict(zip(self._slots, self._values.unbind(), strict=True))
        result.losses = {name: LossSum([value]) for (kind, name), value in found.items() if kind == LOSS}
        result.reported = means(found)


def _sendable(window: Window, most: int) -> list[Any]:
    """Return the first samples of a window, as the loader would yield them; nothing if they cannot be pickled."""
    if not window.samples:
        return []
    try:
        found = copied(window.part(0, min(most, window.groups()[0])).raw())
        torch.save(found, io.BytesIO())
    except Exception:  # noqa: BLE001 - of the user's own types; other ranks wait for what is sent
        return []
    return list(found)


def _form_of_gradient(parameter: nn.Parameter) -> Tensor:
    """Return a tensor of the shape and type that a parameter's gradients have."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # from torch 2.9 on
    return torch.empty(parameter.shape, dtype=dtype, device="meta")


def trained(step: GradientStep) -> list[nn.Parameter]:
    """Return the parameters that get gradients, in the order that all ranks use."""
    return [parameter for parameter in step.parameters if parameter.requires_grad]


def _left_behind(error: Exception, rank: int, number: int) -> StartAgainError:
    """Return the error for a rank that lacks memory when the others have begun to make an optimizer step."""
    return StartAgainError(
        f"rank {rank} ran out of memory ({first_line(error)}) while the others make optimizer step {number}, and it "
        "cannot make it after them; every process has to be started again, as torchrun does with --max-restarts, and "
        "goes on from the last checkpoint if fit has a checkpoint="
    )


def sums(said: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Return by name the sum of what ranks say."""
    return {name: sum(one.get(name, 0.0) for one in said) for one in said for name in one}


def nothing_counts() -> InvalidInputError:
    """Return the error that every rank raises if a window's loss is divided by 0."""
    return InvalidInputError(
        "nothing that the loss counts (targets, or the weight of a (sum, weight) pair) is in this window on any rank, "
        "so its mean does not exist; leave such samples out"
    )


class Outcome:
    """Results of one rank's own work while others wait for what it sends. After a failure, no more work is done.

    Attributes:
        failure: The first failure.
        result: What has come of it so far.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.result = WindowResult()

    def run(self, work: Callable[[], _T]) -> _T | None:
        """Do some work and return its result; None if it, or anything before it, has failed."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - the others are informed first
                self.failure = error
        return None


class _SharedBuffers:
    """The buffers that training updates, made equal on every rank after each window.

    BatchNorm's running statistics become their means over the ranks, weighted by samples. Every other buffer that was
    written is copied from the first rank that had samples.
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
        self.at_first: list[Any] = [part._buffers[name] for part, name in self._owners]
        self._forms = [_form(buffer) for buffer in self.at_first]
        self._averaged = [isinstance(part, _BatchNorm) and name in _STATISTICS for part, name in self._owners]
        self._before: list[tuple[Tensor | None, int]] = []

    @property
    def copied(self) -> list[int]:
        """Return which are not averaged."""
        return [index for index, averaged in enumerate(self._averaged) if not averaged]

    def begin(self) -> None:
        """Record the buffers before a window."""
        self._before = [(buffer, 0 if buffer is None else buffer._version) for buffer in self.now()]

    def written(self) -> list[bool]:
        """Return which buffers have been written since."""
        # BatchNorm's kernels write without incrementing version counters.
        return [
            now is not None and ((averaged and part.training) or now is not before or now._version != version)
            for now, (before, version), averaged, (part, _) in zip(
                self.now(), self._before, self._averaged, self._owners, strict=True
            )
        ]

    def now(self) -> list[Tensor | None]:
        """Return the buffers; None for one whose shape or type has changed, so that it cannot be sent."""
        found = (part._buffers.get(name) for part, name in self._owners)
        return [
            buffer if buffer is not None and _form(buffer) == form else None
            for buffer, form in zip(found, self._forms, strict=True)
        ]

    def make_plain(self, wanted: Sequence[bool]) -> None:
        """Let buffers be written to in place."""
        for buffer in compress(self.now(), wanted):
            if buffer is not None and (plain := as_plain(buffer)) is not buffer:
                buffer.data = plain

    def factors(self, share: float, *, is_source: bool) -> list[float]:
        """Return what each is multiplied by for the sum over ranks.

        Args:
            share: This rank's share of the running statistics.
            is_source: Whether all ranks get this one's other buffers.
        """
        return [share if averaged else float(is_source) for averaged in self._averaged]


def _form(buffer: Tensor) -> tuple[torch.Size, torch.dtype, torch.layout]:
    return buffer.shape, buffer.dtype, buffer.layout
