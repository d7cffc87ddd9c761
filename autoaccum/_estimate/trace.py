"""Turns the timelines of a traced step into an `Estimate` of its peak on the CPU or on a card."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.card_properties import properties_of
from autoaccum._estimate.cuda_allocator import Served, serve
from autoaccum._estimate.cuda_dispatch import cublas_bytes
from autoaccum._estimate.footprint import Estimate, Footprint
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


@dataclass(frozen=True, slots=True)
class Traced:
    """A training step traced on one kind of device.

    Attributes:
        step_of: Returns the timeline of a size.
        rough_of: Returns about that of a size that would have to be traced, or None.
        sizes: The sizes whose footprints are recorded, ascending.
        kind: The kernels traced: "cpu" or "cuda".
        real_step: Whether real tensors had to be used.
        notes: The assumptions, each a sentence.
        uncertainty: A step on a card may take this share more than predicted.
        told: What the model asked of the card, and was told.
    """

    step_of: Callable[[int], Timeline]
    sizes: tuple[int, ...]
    kind: str
    real_step: bool = False
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

    def estimate(self, card: Card | None = None) -> Replayed:
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
        uncertainty = 0.0 if card is None else self.uncertainty
        return Replayed(
            footprints, self.real_step, self.notes, uncertainty, step_of=self.step_of, rough_of=self.rough_of, card=card
        )


@dataclass(frozen=True, slots=True)
class Replayed(Estimate):
    """An estimate that answers for any size by a replay of the step of that size.

    Attributes:
        step_of: Returns the timeline of a size.
        rough_of: Returns about that of a size that would have to be traced, or None.
        card: The card whose caching allocator serves it; None for exact bytes.
    """

    step_of: Callable[[int], Timeline] = field(kw_only=True, repr=False, compare=False)
    rough_of: Callable[[int], Timeline | None] = field(kw_only=True, repr=False, compare=False)
    card: Card | None = field(kw_only=True)

    def at(self, size: int, room_bytes: int | None = None) -> Footprint:
        """Return the footprint of a step of this size; if it does not fit, what it would reserve without a limit."""
        return _footprint(self.step_of(size), self.card, room_bytes)

    def fits(self, size: int, room_bytes: int) -> bool:
        """Whether a step of this size is predicted to fit in `room_bytes`."""
        rough = self.rough_of(size)
        if rough is not None:
            about = rough.peak().live_bytes
            # Far from the room, the answer is known without tracing this size.
            if about > _FAR * room_bytes or _FAR * about + _SEGMENTS_BYTES < room_bytes:
                return about < room_bytes
        step = self.step_of(size)
        if self.card is None:
            return step.peak().live_bytes <= room_bytes
        return serve(_with_cublas(step, self.card), room_bytes) is not None

    def step_memory(self, size: int) -> StepMemory:
        """Return how the memory of a step of this size goes by."""
        timeline = self.step_of(size)
        return condensed(timeline if self.card is None else _with_cublas(timeline, self.card))

    def record(self) -> Estimate:
        """Return the footprints alone, without the traced step."""
        return Estimate(self.footprints, self.real_step, self.notes, self.uncertainty)


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
