"""One window, made by several processes together: each works on its part, then one update is made by all.

No process says anything to the others while it works on its micro-batches, so that one that runs out of memory there
keeps nobody waiting for longer than its second attempt takes. Then they agree in two steps, as a distributed commit
does: what the parts weigh and that all are done, upon which gradients are added up in flat buckets; and that all hold
the sum, upon which each steps its own optimizer. Up to there every one of them can still go back to where the window
began, and all do where one has to. Where gradients may be sent before all are done, `_distributed/overlap.py` does so.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum._distributed.buckets import Buckets
from autoaccum._distributed.overlap import SHARED, Overlap
from autoaccum._engine.gradients import Reduced
from autoaccum._engine.phases import Phase
from autoaccum._loss.objective import PAIR, SUM
from autoaccum._loss.reported import LOSS, WEIGHT, means
from autoaccum._loss.weighting import in_full
from autoaccum._oom import first_line, is_device_lost, is_oom, let_go
from autoaccum.errors import DoesNotFitError, InvalidInputError, StartAgainError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from autoaccum._data.batches import Window
    from autoaccum._distributed.overlap import Weight
    from autoaccum._distributed.process_group import Ranks
    from autoaccum._engine.gradients import Given
    from autoaccum._engine.optimizer_step import Update
    from autoaccum._engine.peers import BeforeUpdate, Work
    from autoaccum._engine.step import TrainingStep
    from autoaccum._loss.reported import Slot
    from autoaccum._loss.weighting import Weighting
    from autoaccum._sizing.controller import Sizing


_T = TypeVar("_T")
# So often what parts weigh is asked for.
_TRIES = 4
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank says of its part of a window, once that is done.

    Attributes:
        samples: Samples in it.
        weight: What it weighs; None where that is on the device, or makes no difference.
        known: Stands for what is known of the losses.
        names: Stands for their names.
        gradients: Which parameters have a gradient, as bits.
        buffers: Which buffers were written, as bits.
        seconds: How long the rank has worked on it.
        wishes: What it wishes to happen after this window.
        note: Windows of the epoch that its loader has reached.
        has_sent: Whether its gradients are on their way already, as they are.
        larger: The size that it would take from the next window on, where ranks agree on it; None for none.
    """

    samples: int
    weight: float | None
    known: bytes
    gradients: int
    buffers: int
    seconds: float
    wishes: int
    note: int
    has_sent: bool = False
    larger: int | None = None

    def packed(self) -> tuple[Any, ...]:
        """Return the values alone, which are short to send."""
        return tuple(getattr(self, name) for name in self.__slots__)


class DataParallel:
    """Makes windows together with other ranks.

    Args:
        ranks: All of them.
        step: This one's training step.
        wishes: Returns what this rank wishes to happen after the present window: bits, of which all learn.
        note: Returns what else this rank has to say with every window.
        look: Given what all ranks have said so, before an update is made; may refuse it, on every rank alike.
        is_timed: Whether it matters how long the device of each rank has worked, which is then waited for.
        room: In which all gradients can be on their way at once; None where they go when all have worked.
        say: Tells the user what has become of that.

    Attributes:
        parts: What each rank has said of its part of the present window, by rank.
        share: What the parts of the present window weigh together, where they cannot be added up afterwards.
        overlap: Sends gradients while the last are made; None where that is not done.
        is_decided: As `Peers` has it.
    """

    is_part = True
    # Whether gradients are added up here, or by the model itself.
    adds_up_gradients = True

    def __init__(
        self,
        ranks: Ranks,
        step: TrainingStep,
        *,
        wishes: Callable[[], int] = lambda: 0,
        note: Callable[[], int] = lambda: 0,
        look: Callable[[Sequence[int]], None] = lambda _: None,
        is_timed: bool = False,
        room: Buckets | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.ranks = ranks
        self.parts: list[Part] = []
        self.is_decided = False
        self._wishes = wishes
        self._note = note
        self._look = look
        self._is_timed = is_timed
        self._step = step
        self._trained = trained(step)
        self._gradients = room or Buckets(self._trained if self.adds_up_gradients else [])
        self.overlap: Overlap | None = None
        if room is not None:
            self.overlap = Overlap(ranks, step, self._trained, room, self._weight_beforehand, say)
        self._say = say
        self._is_on_its_way = False
        self._present = 0
        self._buffers = _SharedBuffers(step)
        self._slots: list[Slot] = []  # the losses, and what is reported beside them
        self._norm, self._pair = (in_full(torch.zeros((), device=step.memory.device)) for _ in range(2))
        self._values = self._norm
        self.share: Share | None = None
        self._known_before = b""
        self._begun: Window | None = None
        self._weighed: tuple[bytes, float] | None = None  # the present part, as far as losses are known
        # What a card's collectives take is taken with the first one: better now than beside a window's activations.
        ranks.add_up(self._norm)

    @property
    def samples(self) -> int:
        """Samples of the present window, on all ranks together."""
        return sum(part.samples for part in self.parts)

    def expected_gradients(self) -> int:
        """Return how many parameters will have a gradient, by what is known on this rank."""
        own = sum(1 << n for n, parameter in enumerate(self._trained) if parameter.grad is not None)
        return (own | self._present).bit_count()

    def check_parameters(self) -> None:
        """See that all that is trained now was trained from the start.

        Raises:
            InvalidInputError: Parameters have come since, of which the other ranks know nothing.
        """
        known = set(self._trained)
        if come := [parameter for parameter in trained(self._step) if parameter not in known]:
            raise InvalidInputError(
                f"{len(come)} parameters are trained now that were not when training began (shapes "
                f"{', '.join(str(tuple(parameter.shape)) for parameter in come[:3])}), and several ranks add up the "
                "gradients of those they began with; end this call of fit, and go on with the changed model in another"
            )

    @property
    def sending(self) -> Overlap | None:
        """Sends gradients while the last micro-batch is made; None where that is not done."""
        return self.overlap

    def begin(self, window: Window, sizing: Sizing) -> Share | None:
        """Begin a window; return what its parts weigh together, where they cannot be added up afterwards.

        Args:
            window: This rank's part.
            sizing: How this rank cuts it.
        """
        self._window, self._sizing, self.is_decided = window, sizing, False
        self._buffers.begin()
        if self._begun is window:
            return self.share  # a second attempt of this rank alone
        self._begun, self._weighed = window, None
        self._known_before = self._known()
        self.share = self._share_of(window)
        if self.overlap is not None:
            weighs_only_then = self._weighs_only_then()
            if weighs_only_then:
                self._say(
                    "overlap=True has no effect with a loss that is a (sum, weight) pair: what the parts of a window "
                    "weigh shows only when they have been worked on"
                )
            self.overlap.begin(None if weighs_only_then else self._wanted())
        return self.share

    def prepare(self) -> None:
        """Make ready for an attempt at the window; nothing to do where each rank makes its passes by itself."""

    def failed(self, error: Exception, work: Work, number: int) -> None:  # noqa: ARG002 - as Peers has it
        """See what a failure on this rank means for the others.

        Raises:
            StartAgainError: This rank lacks memory where the others make the update.
        """
        if self.is_decided and is_oom(error) and not self.ranks.is_in_pass:
            raise _left_behind(error, self.ranks.rank, number) from error

    def reduce(self, given: Given, work: Work, before_update: BeforeUpdate) -> Reduced | None:
        """Agree with the other ranks and add up what all have; None where the attempt has to be made again."""
        if not self.agree(given, work):
            return None
        if not self.samples:
            return Reduced()
        outcome = self.add_up(given)
        outcome.run(lambda: before_update(outcome.losses, self.samples))
        # From here on this rank cannot know whether the others have heard from it and make the update. Where the
        # model adds up gradients they all meet once more.
        self.is_decided = self.adds_up_gradients
        if not self.all_ready(outcome):
            self.is_decided = False
            if outcome.failure is not None:
                raise outcome.failure
            work.start_over(self.share)
            return None
        self.is_decided = True
        return Reduced(outcome.losses, outcome.reported, self.samples, outcome.norm)

    def commit(self, reduced: Reduced) -> Update:
        """Step the optimizer, as all others do now: where memory lacks for it, once more, with the caches released.

        Raises:
            DoesNotFitError: It lacks again; the others have made the update, so the window cannot be made again.
        """
        updates, memory = self._step.updates, self._step.memory
        before = updates.made
        try:
            return updates.commit(reduced.grad_norm)
        except Exception as error:
            if updates.made != before or not is_oom(error) or is_device_lost(error):
                raise
            let_go(error)
        memory.release()
        try:
            return updates.commit(reduced.grad_norm)
        except Exception as error:
            if updates.made != before or not is_oom(error) or is_device_lost(error):
                raise
            raise DoesNotFitError(
                f"the optimizer's step does not fit on {memory.name} ({first_line(error)}); try an optimizer "
                "with less state, foreach=False, or a smaller model"
            ) from error

    def _synchronize(self) -> None:
        """Wait until the device has done what this rank had to do, and not for what other ranks do."""
        if self.overlap is None or self._step.memory.device.type == "cpu":
            self._step.memory.synchronize()
        else:
            torch.accelerator.current_stream(self._step.memory.device).synchronize()

    def _seconds(self) -> float:
        """Return how long this rank has worked on its part."""
        if not self._window.samples:
            return 0.0
        return self._sizing.wait(is_timed=self._is_timed, synchronize=self._synchronize)

    def agree(self, given: Given, work: Work) -> bool:
        """See that all ranks have done their parts; return False where some have to do theirs again.

        Raises:
            RankFailedError: Another rank cannot go on.
        """
        window, objective, seconds = self._window, self._step.objective, self._seconds()
        if self.overlap is not None:
            self.overlap.flush()
        mine = Part(
            samples=window.samples,
            weight=self._weight(window),
            known=self._known(given.slots),
            gradients=sum(1 << n for n, parameter in enumerate(self._trained) if parameter.grad is not None),
            buffers=self._buffers.written(),
            seconds=seconds,
            wishes=self._wishes(),
            note=self._note(),
            has_sent=self.overlap is not None and self.overlap.holds(self._weight_beforehand()),
        )
        # Made anew for every window, since the last one's are read later, and before the others wait for it.
        self._values = in_full(torch.zeros(len(self._slots), device=self._step.memory.device))
        self.parts = [Part(*said) for said in self.ranks.exchange("window", mine.packed())]
        agree = len({part.known for part in self.parts}) == 1
        was_shared, is_shared = self.share is not None, objective.common_weight is None
        goes_on = agree and was_shared == is_shared and (not is_shared or mine.known == self._known_before)
        self._look_what_is_on_its_way(goes_on=goes_on)
        self._look([part.note for part in self.parts])
        if goes_on:
            return True
        if not agree:
            self._learn_from_others()
        self._known_before = self._known()
        self.share = self._share_of(window)
        if was_shared or is_shared or self.share is not None or self._known_before != mine.known:
            work.start_over(self.share)
        return False

    def _look_what_is_on_its_way(self, *, goes_on: bool) -> None:
        """See whether the gradients that were sent are those of the whole window, by what all have said of that."""
        if self.overlap is None:
            return
        held = all(part.has_sent for part in self.parts) and self._bits() == self._present
        self.overlap.end(held=held)
        self._is_on_its_way = goes_on and held
        if not self._is_on_its_way:
            self.overlap.drop()

    def _bits(self) -> int:
        """Return which parameters have a gradient on any rank."""
        bits = 0
        for part in self.parts:
            bits |= part.gradients
        return bits

    def _wanted(self) -> list[bool]:
        return [bool(self._present >> number & 1) for number in range(len(self._trained))]

    def add_up(self, given: Given) -> Outcome:
        """Replace gradients, losses and buffers by those of the whole window, and unscale and clip the gradients.

        Whatever fails on this rank alone, it sends what the others wait for to the end, and what it holds then is of no
        use. Nothing that is sent is made here, and so nothing of it can fail to be there.

        Args:
            given: What this rank's part has given.

        Returns:
            What came of it; still to be told to the others.

        Raises:
            InvalidInputError: Nothing counts in the whole window; on every rank.
            RankFailedError: Another rank is gone.
        """
        self._step.stage.phase = Phase.REDUCE
        outcome = Outcome()
        factor = self._factor(given, outcome)
        self._present = self._bits()
        wanted = self._wanted()
        outcome.run(lambda: self._make_gradients(wanted))
        if self.overlap is not None and self._is_on_its_way:
            outcome.note(self.overlap.take())
        else:
            gradients = [parameter.grad for parameter in self._trained]
            outcome.note(self._gradients.exchange(gradients, self.ranks.add_up, factor=factor, wanted=wanted))
        outcome.run(lambda: self._fill_losses(given, factor))
        self.ranks.add_up(self._values)
        outcome.note(self._buffers.exchange(self.ranks, self.parts))
        outcome.run(lambda: self._read_values(outcome))
        self._unscale_and_clip(outcome)
        return outcome

    def _unscale_and_clip(self, outcome: Outcome) -> None:
        """Bring the gradients to what the optimizers are to be given, by the same norm on every rank."""
        updates = self._step.updates
        norm = outcome.run(updates.norm)
        if not updates.clips:
            return
        if norm is not None:
            outcome.run(lambda: self._norm.fill_(norm))
        # Other kinds of devices, and other numbers of threads, may sum in another order.
        self.ranks.spread(self._norm, 0)
        if norm is not None:
            outcome.run(lambda: updates.clip(norm.copy_(self._norm)))
        outcome.norm = norm

    def all_ready(self, outcome: Outcome) -> bool:
        """Whether every rank holds the same gradients, unscaled and clipped."""
        are_ready = not any(self.ranks.exchange("update", outcome.failure is not None))
        if are_ready:
            self._begun = None
        return are_ready

    # --- what parts weigh ---------------------------------------------------------------------------------------------

    def _share_of(self, window: Window) -> Share | None:
        if self._step.objective.common_weight is not None:
            return None
        said = self._weights_of_all(window)
        totals = {name: sum(one.get(name, 0.0) for one in said) for one in said for name in one}
        share = Share(self.ranks, totals)
        if not window.samples and self._step.objective.mixes_pairs():
            share.of_pairs({})  # the others ask, and wait for an answer
        return share

    def _weights_of_all(self, window: Window) -> list[dict[str, float]]:
        """Return what each part weighs; where one rank lacks memory to find out, all try once more."""
        for _ in range(_TRIES):
            outcome = Outcome()
            own = outcome.run(lambda: self._step.objective.weights(window))
            said = self.ranks.exchange("weights", own)
            if None not in said:
                return said
            if outcome.failure is not None and not is_oom(outcome.failure):
                raise outcome.failure
            outcome.failure = None
            self._step.memory.release()
        raise DoesNotFitError("some rank has no memory left to find out what its part of a window weighs")

    def _weighs_only_then(self) -> bool:
        """Whether what the parts weigh shows only when they have been worked on."""
        return self.share is None and self._step.objective.common_weight == PAIR

    def _weight_beforehand(self) -> Weight | None:
        """Return what this rank's part weighs, where that is known before it is worked on."""
        common = self._step.objective.common_weight
        if self.share is not None:
            return SHARED  # its gradients are weighed in the whole window as they are made
        if common is None or common == PAIR or self._begun is None:
            return None
        return common, self._weight(self._begun)

    def _weight(self, window: Window) -> float | None:
        common = self._step.objective.common_weight
        if common is None or common in (PAIR, SUM):
            return None
        known = self._known()
        if self._weighed is None or self._weighed[0] != known:
            self._weighed = known, self._step.objective.weights(window).get(common, 0.0)
        return self._weighed[1]

    def _factor(self, given: Given, outcome: Outcome) -> float | Tensor:
        """Return by what this rank's gradients and losses are multiplied, so that those of all add up."""
        common = self._step.objective.common_weight
        if self.share is not None or common == SUM:
            return 1.0
        if common == PAIR:
            return self._factor_of_pair(given, outcome)
        own, total = self.parts[self.ranks.rank].weight or 0.0, sum(part.weight or 0.0 for part in self.parts)
        if total == 0.0:
            raise nothing_counts()
        return own / total

    def _factor_of_pair(self, given: Given, outcome: Outcome) -> float | Tensor:
        weight = 0.0 if given.pair_weight is None else given.pair_weight
        outcome.run(lambda: self._pair.fill_(weight))
        self.ranks.add_up(self._pair)
        outcome.run(self._check_pair)
        factor = outcome.run(lambda: given.samples / self._pair)
        return 1.0 if factor is None else factor

    def _check_pair(self) -> None:
        if self._pair.device.type == "cpu" and not float(self._pair):
            raise pairs_weigh_nothing()

    def _known(self, slots: Mapping[Slot, Any] | None = None) -> bytes:
        """Return what stands for all that is known of the losses, alike where that is alike."""
        self._slots = sorted({*self._slots, *(slots or ())})
        known = self._step.objective.knowledge
        text = [(name, _spelled(how)) for name, (how, _) in sorted(known.items())]
        return hashlib.blake2b(repr((text, self._slots)).encode(), digest_size=8).digest()

    def _learn_from_others(self) -> None:
        """Take over, for each loss, what the rank knows that has ruled out most; of those alike the first."""
        said = self.ranks.exchange("losses", (self._step.objective.knowledge, self._slots))
        self._slots = sorted({slot for _, slots in said for slot in slots})
        best: dict[str, tuple[Weighting, int]] = {}
        for known, _ in said:
            for name, (how, ruled_out) in known.items():
                if name not in best or ruled_out > best[name][1]:
                    best[name] = (how, ruled_out)
        own = self._step.objective.knowledge
        self._step.objective.adopt(
            {name: how for name, (how, _) in best.items() if name not in own or _spelled(own[name][0]) != _spelled(how)}
        )

    # --- adding up ----------------------------------------------------------------------------------------------------

    def _make_gradients(self, wanted: Sequence[bool]) -> None:
        """See that each gradient that any rank has is there, in a form that can be sent in parts."""
        for parameter, is_wanted in zip(self._trained, wanted, strict=True):
            if is_wanted and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad = self._gradients.make_sendable(parameter.grad)

    def _fill_losses(self, given: Given, factor: float | Tensor) -> None:
        found = given.slots
        for value, slot in zip(self._values.unbind(), self._slots, strict=True):
            if slot in found:
                value.fill_(found[slot])
        # The rest comes with weights of its own.
        self._values[: sum(kind <= WEIGHT for kind, _ in self._slots)].mul_(factor)

    def _read_values(self, outcome: Outcome) -> None:
        found = dict(zip(self._slots, self._values.unbind(), strict=True))
        outcome.losses = {name: value for (kind, name), value in found.items() if kind == LOSS}
        outcome.reported = means(found)


def trained(step: TrainingStep) -> list[nn.Parameter]:
    """Return the parameters that get gradients, in the order in which ranks speak of them."""
    return [parameter for parameter in step.parameters if parameter.requires_grad]


def _left_behind(error: Exception, rank: int, number: int) -> StartAgainError:
    """Return what is raised where one rank lacked memory while the others began to make an update."""
    return StartAgainError(
        f"rank {rank} ran out of memory ({first_line(error)}) where the others make update {number}, and it cannot "
        "make it after them; every process has to be started again, as torchrun does with --max-restarts, and goes on "
        "from the last checkpoint where fit has a checkpoint="
    )


def nothing_counts() -> InvalidInputError:
    """Return what is raised on every rank where no target of a window counts."""
    return InvalidInputError(
        "no target of this window counts on any rank, so the mean loss over it does not exist; leave such samples out"
    )


def pairs_weigh_nothing() -> InvalidInputError:
    """Return what is raised on every rank where the pairs of a window have no weight."""
    return InvalidInputError(
        "the (sum, weight) pairs of this window have weight 0 together on all ranks, so their mean does not exist; "
        "leave such samples out"
    )


class Outcome:
    """What one rank does by itself while others wait for what it sends: until something fails, then nothing more.

    Attributes:
        failure: What failed.
        losses: The window's losses by name.
        reported: What is reported beside them, by name.
        norm: The norm of the gradients before clipping, where they are clipped.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.losses: dict[str, Tensor] = {}
        self.reported: dict[str, Tensor] = {}
        self.norm: Tensor | None = None

    def run(self, work: Callable[[], _T]) -> _T | None:
        """Do some work and return what came of it; None where it, or something before it, has failed."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - it is told to the others first
                self.failure = error
        return None

    def note(self, failure: Exception | None) -> None:
        """Note what has failed elsewhere."""
        self.failure = self.failure or failure


class Share:
    """What the whole window weighs, of which this rank has a part."""

    multiplier = 1.0

    def __init__(self, ranks: Ranks, totals: Mapping[str, float]) -> None:
        self.totals = totals
        self._ranks = ranks
        self._pairs: dict[str, float] | None = None

    def of_pairs(self, weights: Mapping[str, float]) -> Mapping[str, float]:
        """Return what pairs of these weights in this part weigh in the whole window."""
        if self._pairs is None:  # else it is a second attempt of this rank alone
            said = self._ranks.exchange("pairs", dict(weights))
            self._pairs = {name: sum(one.get(name, 0.0) for one in said) for one in said for name in one}
            if not all(self._pairs.values()):
                raise pairs_weigh_nothing()
        return {name: self._pairs[name] for name in weights}


class _SharedBuffers:
    """The buffers that training moves: after each window every rank has the same.

    BatchNorm's running statistics become their means over the ranks, by samples; whatever else was written is taken
    over from the first rank that had samples.
    """

    def __init__(self, step: TrainingStep) -> None:
        parts = dict.fromkeys(part for module in step.objective.modules for part in module.modules())
        device = step.memory.device.type
        self._owners = [
            (part, name)
            for part in parts
            for name, buffer in part._buffers.items()
            if buffer is not None and buffer.device.type == device
        ]
        at_first = [part._buffers[name] for part, name in self._owners]
        self._forms = [(buffer.shape, buffer.dtype) for buffer in at_first if buffer is not None]
        self._averaged = [isinstance(part, _BatchNorm) and name in _STATISTICS for part, name in self._owners]
        self._buckets = Buckets([buffer for buffer in at_first if buffer is not None]) if at_first else None
        self._before: list[tuple[Tensor | None, int]] = []

    def begin(self) -> None:
        """Note what the buffers are before a window."""
        self._before = [(buffer, 0 if buffer is None else buffer._version) for buffer in self._now()]

    def written(self) -> int:
        """Return which buffers were written since, as bits."""
        bits = 0
        for number, (now, (before, version)) in enumerate(zip(self._now(), self._before, strict=True)):
            # BatchNorm's kernels write without moving a counter.
            by_kernel = self._averaged[number] and self._owners[number][0].training
            if now is not None and (by_kernel or now is not before or now._version != version):
                bits |= 1 << number
        return bits

    def _now(self) -> list[Tensor | None]:
        """Return the buffers; None for one that is no longer of the form in which it would be sent."""
        found = (part._buffers.get(name) for part, name in self._owners)
        return [
            buffer if buffer is not None and (buffer.shape, buffer.dtype) == form else None
            for buffer, form in zip(found, self._forms, strict=True)
        ]

    def exchange(self, ranks: Ranks, parts: Sequence[Part]) -> Exception | None:
        """Make the buffers the same; return what failed here."""
        if self._buckets is None:
            return None
        source = next(rank for rank, part in enumerate(parts) if part.samples)
        wanted = [bool(parts[source].buffers >> number & 1) for number in range(len(self._owners))]
        means = [one and averaged for one, averaged in zip(wanted, self._averaged, strict=True)]
        others = [one and not averaged for one, averaged in zip(wanted, self._averaged, strict=True)]
        factor = parts[ranks.rank].samples / sum(part.samples for part in parts)
        failure = self._buckets.exchange(self._now(), ranks.add_up, factor=factor, wanted=means)
        return self._buckets.exchange(self._now(), lambda one: ranks.spread(one, source), wanted=others) or failure


def _spelled(how: Weighting) -> tuple[Any, ...]:
    weights = None if how.class_weights is None else tuple(how.class_weights.tolist())
    void = sorted(map(sorted, how.void))
    return how.over.name, how.ignore_index, how.target, how.nor, void, weights
