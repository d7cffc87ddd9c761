"""Turns the timelines of a traced step into an `Estimate` of its peak on the CPU or on a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.cuda_allocator import Served, serve
from autoaccum._estimate.cuda_dispatch import cublas_bytes
from autoaccum._sizing.footprint import Estimate, Footprint
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._estimate.allocation_trace import Timeline
    from autoaccum._estimate.gpus import Card


@dataclass(frozen=True, slots=True)
class Traced:
    """A training step traced at a few sizes.

    Attributes:
        timelines: One for each size, ascending.
        kind: The kernels traced: "cpu" or "cuda".
        real_step: Whether real tensors had to be used.
        notes: The assumptions, each a sentence.
    """

    timelines: tuple[Timeline, ...]
    kind: str
    real_step: bool = False
    notes: tuple[str, ...] = ()

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
        footprints = tuple(_footprint(timeline, card) for timeline in self.timelines)
        return Estimate(footprints, self.real_step, self.notes)


def _footprint(timeline: Timeline, card: Card | None) -> Footprint:
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
        served = _served(timeline, card)
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


def _served(timeline: Timeline, card: Card) -> Served:
    """Replay a step in a card's memory, or without a limit if it does not fit."""
    for_cublas = 2 * cublas_bytes(card.name)
    step = timeline.with_held(for_cublas)
    plenty = serve(step)
    assert plenty is not None
    # If memory is short, the allocator flushes its cache first.
    return plenty if plenty.reserved_bytes <= card.free_bytes else serve(step, card.free_bytes) or plenty
