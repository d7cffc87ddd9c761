"""Turns the timelines of a traced step into an `Estimate` of its peak on the CPU or on a card."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.card_properties import properties_of
from autoaccum._estimate.cuda_allocator import Served, serve
from autoaccum._estimate.cuda_dispatch import cublas_bytes
from autoaccum._estimate.moments import condensed
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.gpus import Card
    from autoaccum._estimate.moments import StepMemory

# A prediction that is only about right, by the bends of workspaces and by the allocator's fragments, is within this
# factor, and segments.
_FAR = 1.5
_SEGMENTS_BYTES = 256 * 2**20
# Micro-batches are smaller than two to this power.
_POWERS = 40


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one training step at its peak. The parts add up to `peak_bytes`.

    Attributes:
        size: Samples in the micro-batch.
        phase: The phase with the peak: "forward", "backward" or "optimizer".
        peak_bytes: Bytes of tensors at the peak, as rounded by the device's allocator.
        reserved_bytes: Bytes that the allocator has reserved on the device by then, at least `peak_bytes`.
        parameters_bytes: Weights.
        buffers_bytes: Buffers.
        gradients_bytes: Gradients of parameters.
        optimizer_bytes: The optimizer's state.
        inputs_bytes: The micro-batch, and the next one being transferred.
        activations_bytes: Tensors saved for the backward pass, the outputs and the loss.
        temporary_bytes: Everything else: temporary tensors of operators, workspaces, rounding.
    """

    size: int
    phase: str
    peak_bytes: int
    reserved_bytes: int
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    inputs_bytes: int
    activations_bytes: int
    temporary_bytes: int


@dataclass(frozen=True, slots=True)
class Traced:
    """A training step traced on one kind of device.

    Attributes:
        step_of: Returns the timeline of a size.
        rough_of: Returns about that of a size that would have to be traced, or None.
        sizes: The sizes whose footprints are recorded, ascending.
        kind: The kernels traced: "cpu" or "cuda".
        notes: The assumptions, each a sentence.
        uncertainty: A step on a card may take this share more than predicted.
        told: What the model asked of the card, and was told.
    """

    step_of: Callable[[int], Timeline]
    sizes: tuple[int, ...]
    kind: str
    notes: tuple[str, ...] = ()
    uncertainty: float = 0.0
    rough_of: Callable[[int], Timeline | None] = lambda _: None
    told: Mapping[str, object] = field(default_factory=dict)

    def holds_for(self, card: Card) -> bool:
        """Whether another card, which computes float32 alike, would have told the model the same."""
        known = properties_of(card)
        return all(known[name] == answer for name, answer in self.told.items())

    def changed(self, change: Callable[[Timeline], Timeline]) -> Traced:
        """Return the step with a change made to the timeline of each size."""

        def rough_of(size: int) -> Timeline | None:
            rough = self.rough_of(size)
            return None if rough is None else change(rough)

        return replace(self, step_of=lambda size: change(self.step_of(size)), rough_of=rough_of)

    def estimate(self, card: Card | None = None) -> Estimate:
        """Return the peak memory of the steps.

        Args:
            card: The card whose caching allocator serves them; None for exact bytes, as the CPU's allocator counts.

        Raises:
            InvalidInputError: A card is given, but the kernels traced were those of the CPU.
        """
        if card is not None and self.kind != "cuda":
            raise InvalidInputError(
                f"the step was traced with kind={self.kind!r}, and the card {card.name} runs other kernels; trace it "
                "with kind='cuda'"
            )
        # The step of one sample may be that of two, if the model refuses one.
        timelines = {timeline.size: timeline for timeline in map(self.step_of, self.sizes)}
        footprints = tuple(_footprint(timelines[size], card) for size in sorted(timelines))
        return Estimate(footprints, self.notes, 0.0 if card is None else self.uncertainty, self, card)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The predicted memory of a training step of any size.

    Attributes:
        footprints: Footprints of the traced sizes, ascending; at least one.
        notes: Limitations of the estimate, each a sentence.
        uncertainty: A step may take this share more than predicted.
        traced: The traced step.
        card: The card whose caching allocator serves it; None for exact bytes.
    """

    footprints: tuple[Footprint, ...]
    notes: tuple[str, ...]
    uncertainty: float
    traced: Traced = field(repr=False, compare=False)
    card: Card | None

    def at(self, size: int, room_bytes: int | None = None) -> Footprint:
        """Return the footprint of a step of this size; if it does not fit, what it would reserve without a limit."""
        return _footprint(self.traced.step_of(size), self.card, room_bytes)

    def fits(self, size: int, room_bytes: int) -> bool:
        """Whether a step of this size is predicted to fit in `room_bytes`."""
        rough = self.traced.rough_of(size)
        if rough is not None:
            about = rough.peak().live_bytes
            # Far from the room, the answer is known without tracing this size.
            if about > _FAR * room_bytes or _FAR * about + _SEGMENTS_BYTES < room_bytes:
                return about < room_bytes
        step = self.traced.step_of(size)
        if self.card is None:
            return step.peak().live_bytes <= room_bytes
        return serve(_with_cublas(step, self.card), room_bytes) is not None

    @property
    def bytes_per_sample(self) -> int:
        """Memory of tensors per additional sample, by the two largest sizes traced; 0 if there is only one."""
        if len(self.footprints) == 1:
            return 0
        below, above = self.footprints[-2:]
        return max(0, above.peak_bytes - below.peak_bytes) // (above.size - below.size)

    def reserved_bytes(self, size: int) -> int:
        """Predict the bytes that the allocator reserves on the device for a step of this size."""
        return self.at(size).reserved_bytes

    def step_memory(self, size: int) -> StepMemory:
        """Return how the memory of a step of this size goes by."""
        return condensed(self.timeline(size))

    def timeline(self, size: int) -> Timeline:
        """Return the step of this size, with the workspaces of cuBLAS."""
        timeline = self.traced.step_of(size)
        return timeline if self.card is None else _with_cublas(timeline, self.card)

    def safe_bytes(self, room_bytes: int) -> int:
        """Return the prediction up to which a step fits in `room_bytes` in spite of the uncertainty."""
        return int(room_bytes / (1 + self.uncertainty))

    def largest(self, room_bytes: int, most: int) -> int:
        """Return the largest size up to `most` whose step is predicted to fit in `room_bytes`; 0 if none is.

        Powers of two are bisected first, then the sizes between two of them, in an order that does not depend on
        `most`: fragments of the cache can make a size fail below one that fits, and then the order matters.
        """

        def fits(size: int) -> bool:
            return size <= most and self.fits(size, room_bytes)

        power, too_large = -1, _POWERS
        while too_large - power > 1:
            middle = (power + too_large) // 2
            power, too_large = (middle, too_large) if fits(1 << middle) else (power, middle)
        if power < 0:
            return 0
        low, high = 1 << power, 2 << power
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def _footprint(timeline: Timeline, card: Card | None, room_bytes: int | None = None) -> Footprint:
    peak = timeline.peak()
    kept = timeline.kept_for_backward()
    held = dict.fromkeys(Category, 0)
    activations = 0
    for number in peak.alive:
        storage = timeline.storages[number]
        held[storage.category] += storage.size_bytes
        if number in kept:
            activations += storage.size_bytes
    peak_bytes = reserved_bytes = peak.live_bytes
    if card is not None:
        served = _served(timeline, card, room_bytes)
        peak_bytes, reserved_bytes = max(peak_bytes, served.peak_bytes), served.reserved_bytes
    parts = {
        "parameters_bytes": held[Category.PARAMETERS],
        "buffers_bytes": held[Category.BUFFERS],
        "gradients_bytes": held[Category.GRADIENTS],
        "optimizer_bytes": held[Category.OPTIMIZER],
        "inputs_bytes": held[Category.INPUTS],
        "activations_bytes": activations,
    }
    return Footprint(
        size=timeline.size,
        phase=timeline.phase_at(peak.index),
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        temporary_bytes=peak_bytes - sum(parts.values()),
        **parts,
    )


def _served(timeline: Timeline, card: Card, room_bytes: int | None) -> Served:
    """Replay a step in a card's memory, or without a limit if it does not fit."""
    step = _with_cublas(timeline, card)
    served = serve(step, card.free_bytes if room_bytes is None else room_bytes) or serve(step)
    assert served is not None
    return served


def _with_cublas(timeline: Timeline, card: Card) -> Timeline:
    return timeline.with_held(2 * cublas_bytes(card.name))
