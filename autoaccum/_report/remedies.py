"""Finds changes that would reduce the memory of a step, by tracing the step again with one change, or several.

Used only if not even one sample fits or windows are cut into many micro-batches. Nothing is measured: the memory of a
changed step is predicted by `_estimate` and compared with its prediction for the unchanged step.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from autoaccum._data.nesting import map_tensors
from autoaccum._engine.saving_names import CHECKPOINT, CHUNKED, OFFLOAD
from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.gpus import known_cards
from autoaccum._report.records import Remedy
from autoaccum._report.savings import saves, together
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.gpus import Card
    from autoaccum._estimate.trace import Estimate, Traced
    from autoaccum._report.capacity import Asked

# With this many micro-batches per window or more, a cut is worth improving.
MANY_MICRO_BATCHES = 8

# Optimizers with two state values per parameter that have 8-bit versions (bitsandbytes keeps one
# float32 scale for each of its blocks of 256 numbers: https://huggingface.co/docs/bitsandbytes, 8-bit optimizers).
_TWO_NUMBERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
_BITS8_BYTES = 1 + 4 / 256
_HALF = ("bf16", "fp16")
_TOKENS = 2  # dimensions: samples and tokens


@dataclass(frozen=True)
class Place:
    """Where a step should fit.

    Attributes:
        kind: "cpu" or "cuda".
        card: The card; None for a device at hand.
        room_bytes: The memory a step may use there.
        unlimited_bytes: The same without the user's memory limit; None if there is no limit.
        holds_model: Whether that includes the model.
        precision: The precision of the step.
        half: Whether the device supports bf16, and therefore TF32.
        failed: The smallest size that was tried there and did not fit; None if there is none.
    """

    kind: str
    card: Card | None
    room_bytes: int
    unlimited_bytes: int | None
    holds_model: bool
    precision: str
    half: bool
    failed: int | None = None

    def largest(self, estimate: Estimate, most: int, *, safely: bool = False) -> int:
        """Return the largest micro-batch up to `most` that is predicted to fit; 0 if none is.

        Args:
            estimate: The memory of steps.
            most: The largest size of interest.
            safely: Whether it fits in spite of the prediction's uncertainty.
        """
        room_bytes = self.room_bytes + self._model_bytes(estimate)
        return estimate.largest(estimate.safe_bytes(room_bytes) if safely else room_bytes, most)

    def as_tried(self, estimate: Estimate) -> Place:
        """Return the place with its room reduced, so that the step is not predicted to fit at sizes that failed."""
        if self.failed is None:
            return self
        needed = estimate.reserved_bytes(self.failed) - self._model_bytes(estimate)
        return replace(self, room_bytes=min(self.room_bytes, needed - 1))

    def _model_bytes(self, estimate: Estimate) -> int:
        first = estimate.footprints[0]
        return 0 if self.holds_model else first.parameters_bytes + first.buffers_bytes


class _Change(NamedTuple):
    """One change of the step, and its memory after it."""

    name: str
    how: str
    cost: str
    estimate: Estimate
    place: Place | None = None  # None for the same place
    memory: tuple[str, ...] = ()  # what `fit` takes as `memory` for it


class _Lever(NamedTuple):
    """A change that combines with others.

    Attributes:
        name: Its name.
        short: Its name among others.
        how: How to make it.
        cost: Its disadvantage.
        options: Arguments of the trace that it changes.
        of_timeline: What it changes in a traced step, given the bytes of a weight; None if nothing.
        memory: What `fit` takes as `memory` for it; empty if it is another change.
    """

    name: str
    short: str
    how: str
    cost: str
    options: Mapping[str, Any]
    of_timeline: Callable[[int, Timeline], Timeline] | None = None
    memory: tuple[str, ...] = ()


class Remedies:
    """Traces changed steps.

    Args:
        asked: The question about the job.
        place: Where it should fit.
        trace: `trace_step` with the parts of the job bound; takes the arguments that a remedy changes.
        model: The model, only inspected.
        optimizer: The optimizer, only inspected.
        cards: The cards that were asked about; a larger card is looked for among them first.
    """

    def __init__(
        self,
        asked: Asked,
        place: Place,
        trace: Callable[..., Traced],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        cards: Sequence[Card] = (),
    ) -> None:
        self._asked = asked
        self._cards = cards
        self._place = place
        self._trace = trace
        self._model = model
        self._optimizer = optimizer
        self._unchanged: Traced | None = None
        self._as_it_is = self._estimate()
        self._place = place.as_tried(self._as_it_is)

    def all(self) -> tuple[Remedy, ...]:
        """Return the remedies, most effective first."""
        before = self._place.largest(self._as_it_is, self._asked.most)
        size = self._as_it_is.footprints[0].size
        now_bytes = self._as_it_is.reserved_bytes(size)
        found = []
        for change in self._changes():
            peak, place = change.estimate.reserved_bytes(size), change.place or self._place
            largest = place.largest(change.estimate, self._asked.most)
            if largest > before or (peak < now_bytes and largest >= max(before, 1)):
                safe = min(largest, place.largest(change.estimate, self._asked.most, safely=True))
                found.append(Remedy(change.name, change.how, peak, largest, change.cost, safe, change.memory))
        return tuple(sorted(found, key=lambda one: (-(one.micro_batch or 0), one.peak_bytes or 0)))

    def _changes(self) -> Iterator[_Change]:
        levers = [self._half_weights(), self._checkpointed(), self._bits8(), self._chunked()]
        yield from self._made_by_each(self._combined(levers))
        for change in (
            self._half,
            self._offloaded,
            self._adafactor,
            self._fused,
            self._shorter,
            self._unlimited,
            self._larger,
        ):
            # A change that cannot be traced, such as one that needs values, is left out.
            with suppress(InvalidInputError):
                if (changed := change()) is not None:
                    yield changed

    @staticmethod
    def _combined(levers: Sequence[_Lever | None]) -> list[tuple[_Lever, ...]]:
        """Return each lever by itself, and those that are worth combining, as far as they can be had."""
        half, checkpoint, bits8, chunks = levers
        several = [(half, checkpoint), (half, checkpoint, bits8)]
        several += [(checkpoint, chunks)] if checkpoint is not None and chunks is not None else []
        found: dict[tuple[str, ...], tuple[_Lever, ...]] = {}
        for those in (*((one,) for one in levers), *several):
            had = tuple(one for one in those if one is not None)
            if had:
                found.setdefault(tuple(one.name for one in had), had)
        return list(found.values())

    def _made_by_each(self, combined: Sequence[tuple[_Lever, ...]]) -> Iterator[_Change]:
        for levers in combined:
            options = {name: value for lever in levers for name, value in lever.options.items()}
            if (adapt := together([lever.options.get("adapt") for lever in levers])) is not None:
                options["adapt"] = adapt
            weights: torch.dtype = options.get("weights") or next(self._model.parameters()).dtype  # of the state
            # The model may fail with the change: an input, or a tensor that it makes, may not match the rest.
            with suppress(Exception):
                traced = self._traced(**options)
                for lever in levers:
                    if lever.of_timeline is not None:
                        traced = traced.changed(partial(lever.of_timeline, weights.itemsize))
                yield _Change(
                    levers[0].name if len(levers) == 1 else " + ".join(lever.short for lever in levers),
                    "; ".join(lever.how for lever in levers),
                    "; ".join(lever.cost for lever in levers),
                    traced.estimate(self._place.card),
                    memory=_memory_of(levers),
                )

    def _estimate(self, **changed: Any) -> Estimate:
        return self._traced(**changed).estimate(self._place.card)

    def _traced(self, **changed: Any) -> Traced:
        options = {
            "batch": self._asked.batch,
            "precision": self._place.precision,
            "kind": self._place.kind,
            "sizes": sorted({1, self._asked.most}),
            "tensor_float": self._place.half,
            "card": self._place.card,
        }
        if not changed:
            if self._unchanged is None:
                self._unchanged = self._trace(**options)
            return self._unchanged
        return self._trace(**options | changed)

    def _estimate_if_accepted(self, **changed: Any) -> Estimate | None:
        """Return the estimate; None if the model fails with the change, by any exception."""
        with suppress(Exception):
            return self._estimate(**changed)
        return None

    def _half(self) -> _Change | None:
        if self._place.precision in _HALF or not self._place.half:
            return None
        cost = "activations have 8 significant bits"
        return _Change("bf16", "precision='bf16'", cost, self._estimate(precision="bf16"))

    def _half_weights(self) -> _Lever | None:
        if not self._place.half or any(one.dtype is not torch.float32 for one in self._model.parameters()):
            return None
        if any(one.is_complex() for one in self._model.buffers()):
            return None  # they would lose their imaginary part
        how = (
            "model.to(torch.bfloat16) before the optimizer is made; also floating inputs and a loss with weights "
            "(torchao's AdamW with bf16_stochastic_round=True rounds updates stochastically)"
        )
        # The last of a weight's 8 significant bits is worth 1/256 to 1/128 of it; an update below half of that is lost.
        cost = (
            "sums of gradients and updates have 8 significant bits: an update below 1/256 of its weight may be lost, "
            "so be careful with small learning rates"
        )
        return _Lever("bf16 weights", "bf16 weights", how, cost, {"weights": torch.bfloat16})

    def _checkpointed(self) -> _Lever | None:
        with saves(CHECKPOINT)(self._model) as way:
            pass
        if not way:
            return None
        how = f"memory={CHECKPOINT!r}, or torch.utils.checkpoint: {way}"
        adapt = {"adapt": saves(CHECKPOINT)}
        return _Lever(
            "activation checkpointing", "checkpointing", how, "a second forward pass", adapt, memory=(CHECKPOINT,)
        )

    def _chunked(self) -> _Lever | None:
        with saves(CHUNKED)(self._model) as way:
            pass
        if not way:
            return None
        cost = "logits are computed once more"
        options = {"adapt": saves(CHUNKED)}
        return _Lever("loss in chunks", "loss in chunks", f"memory={CHUNKED!r}", cost, options, memory=(CHUNKED,))

    def _bits8(self) -> _Lever | None:
        if self._place.kind != "cuda" or not isinstance(self._optimizer, _TWO_NUMBERS):
            return None
        how = "torchao.optim.AdamW8bit or bitsandbytes.optim.AdamW8bit"
        return _Lever("8-bit optimizer", "8-bit", how, "its state is rounded to 8 bits", {}, _in_8_bits)

    def _offloaded(self) -> _Change | None:
        if self._place.kind == "cpu":
            return None
        estimate = self._estimate(adapt=saves(OFFLOAD))
        how = f"memory={OFFLOAD!r}, or torch.autograd.graph.save_on_cpu"
        cost = "activations are copied to the host and back"
        return _Change("offloaded activations", how, cost, estimate, memory=(OFFLOAD,))

    def _adafactor(self) -> _Change | None:
        if not isinstance(self._optimizer, _TWO_NUMBERS):
            return None
        lr = float(self._optimizer.param_groups[0]["lr"])
        estimate = self._estimate(optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=lr))
        cost = "another optimizer, which needs its own learning rate"
        return _Change("Adafactor", "torch.optim.Adafactor", cost, estimate)

    def _fused(self) -> _Change | None:
        kind: Any = type(self._optimizer)
        first = self._optimizer.param_groups[0]
        is_adam = isinstance(self._optimizer, torch.optim.Adam | torch.optim.AdamW)
        if self._place.kind != "cuda" or not is_adam or first.get("fused"):
            return None
        lr = float(first["lr"])
        estimate = self._estimate(optimizer=lambda parameters: kind(parameters, lr=lr, fused=True))
        cost = "none, except that a partial update cannot be detected"
        return _Change("fused optimizer", f"{kind.__name__}(..., fused=True)", cost, estimate)

    def _shorter(self) -> _Change | None:
        half = _half_as_long(self._asked.batch)
        if half is None:
            return None
        batch, length = half
        # The model may accept one length only.
        estimate = self._estimate_if_accepted(batch=batch)
        if estimate is None:
            return None
        return _Change(f"inputs of length {length}", "half the batch's length", "less context", estimate)

    def _unlimited(self) -> _Change | None:
        if self._place.unlimited_bytes is None:
            return None
        place = replace(self._place, room_bytes=self._place.unlimited_bytes)
        cost = "the memory that the limit keeps free"
        return _Change("a higher memory limit", "at most, no memory_limit", cost, self._as_it_is, place)

    def _larger(self) -> _Change | None:
        """Find the smallest card that does not need many micro-batches, among those asked about if one is there."""
        if self._place.card is None or self._place.unlimited_bytes is not None:
            return None
        traced = {self._place.half: [self._traced()]}
        enough = -(-self._asked.target_batch // MANY_MICRO_BATCHES)
        for cards, which in ((self._cards, ", the smallest asked about that suffices"), (known_cards(), "")):
            for card in sorted(cards, key=lambda one: one.free_bytes):
                if card.free_bytes <= self._place.card.free_bytes:
                    continue
                if self._place.precision == "bf16" and not card.bf16:
                    continue
                known = traced.setdefault(card.tensor_float, [])
                fitting = next((one for one in known if one.holds_for(card)), None)
                if fitting is None:
                    fitting = self._traced(tensor_float=card.tensor_float, card=card)
                    known.append(fitting)
                estimate = fitting.estimate(card)
                if estimate.fits(enough, estimate.safe_bytes(card.free_bytes)):
                    place = replace(self._place, card=card, room_bytes=card.free_bytes)
                    return _Change("a larger card", f"such as {card.name}{which}", "the card", estimate, place)
        return None


def _memory_of(levers: Sequence[_Lever]) -> tuple[str, ...]:
    """Return what `memory` takes for levers together; empty if one is another change."""
    return tuple(name for lever in levers for name in lever.memory) if all(lever.memory for lever in levers) else ()


def computes_bf16(device: str) -> bool:
    """Whether a device at hand supports bf16; NVIDIA cards do from Ampere on."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)


def are_due(largest: int, target_batch: int) -> bool:
    """Whether to look for remedies: not one sample fits, or windows are cut into many micro-batches."""
    return largest * MANY_MICRO_BATCHES <= target_batch and largest < target_batch


def _in_8_bits(element_bytes: int, timeline: Timeline) -> Timeline:
    """Return a step whose optimizer keeps one byte, and a share of a scale, for each number of its state."""
    storages = [
        replace(one, size_bytes=int(one.size_bytes / element_bytes * _BITS8_BYTES))
        if one.category is Category.OPTIMIZER
        else one
        for one in timeline.storages
    ]
    return replace(timeline, storages=storages)


def _half_as_long(batch: Any) -> tuple[Any, int] | None:
    """Return a batch with token sequences cut to half their length, and that length; None if it holds none."""
    lengths: list[int] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.dim() == _TOKENS and len(tensor) and not tensor.is_floating_point():
            lengths.append(tensor.shape[1])
        return tensor

    map_tensors(look, batch)
    length = max(lengths, default=0)
    half = length // 2
    if not half:
        return None

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, :half] if tensor.dim() >= _TOKENS and tensor.shape[1] == length else tensor

    return map_tensors(cut, batch), half
